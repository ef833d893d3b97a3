"""How many pairs linear attention can keep: Schlag, Irie, Schmidhuber 2021, setting 1, https://arxiv.org/abs/2102.11174.

S keys, each once, are paired with S values by a random permutation, and one key is asked for. A layer of attention learns
the embeddings of keys; values are one-hot and stay so:

    k_s = W_k [e(key_s); onehot(value_s)] + b_k        q = W_q e(asked) + b_q        loss ½|o - onehot(its value)|²

What a layer answers to all S queries is a matrix of rank F at most, the number of features, and no such matrix is nearer to
the identity than ½ · max(0, 1 - F/S): the rank law. (The authors' .164 is below it: they average over batches of queries,
of which the last one is small.) Embeddings of int(2.2·S), d_key = 64, eps = 10⁻⁶, Adam 10⁻³, batches of 32; every 100 steps
all queries of 20 sequences are a test, and training ends at 0.001 or at the 11th test in a row without progress. Where S is
close to F what comes out depends on the seed: elu+1 had .017 to .058 at S = 60 in five runs. Two keys that training
leaves with one direction cost ½/S each, which DPFP-1 shows at S = 100.

FAVOR+ is that of the authors: 64 orthogonal directions, hyperbolic, drawn anew at every step, exp(q·k) without 1/√d. Its
128 features are noise that no training gets used to, so no rank law holds. From about S = 80 on φ(q)ᵀZ is below the eps of
10⁻⁶ to begin with: then o = 0, the loss is ½ and its gradient 0, and it stays so. With eps = 0, which this library can take
and the paper has not, answers are as noisy but not small, and more than ½ is lost.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from matplotlib.figure import Figure
from report import Options, Report, run

import jax_linattn
from jax_linattn import feature_maps
from jax_linattn.lm.figures.style import COLORS, WIDTH, styled

SIZES = (20, 60, 100, 140, 200)  # S
KEY_DIM = 64
BATCH_SIZE = 32
STEPS_A_TEST, TEST_SEQUENCES, MOST_TESTS = 100, 20, 1000
GOOD, PATIENCE = 1e-3, 10


def linear(feature_map, key: Array, query: Array, keys: Array, values: Array) -> Array:
    del key
    return jax_linattn.linear_attention(query, keys, values, feature_map=feature_map, eps=1e-6, implementation="quadratic")


def favor(eps: float, key: Array, query: Array, keys: Array, values: Array) -> Array:
    redrawn = feature_maps.favor_plus(key, KEY_DIM, 64, kind="hyperbolic")
    query, keys = query * KEY_DIM**0.25, keys * KEY_DIM**0.25  # the map estimates exp(q·k/√D), the paper's exp(q·k)
    return jax_linattn.linear_attention(query, keys, values, feature_map=redrawn, eps=eps, implementation="quadratic")


def softmax(key: Array, query: Array, keys: Array, values: Array) -> Array:
    del key
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, keys) * KEY_DIM**-0.5, axis=-1)
    return jnp.einsum("bhts,bshe->bthe", weights, values)


class Kernel(NamedTuple):
    """A kind of attention, and what the authors' logs have as its best loss."""

    attend: Callable[[Array, Array, Array, Array], Array]
    num_features: int | None  # where they are what bounds the loss
    color: str
    published: tuple[float, ...]  # at SIZES


elu, dpfp_1, dpfp_2, dpfp_3 = (
    functools.partial(linear, feature_maps.get(name)) for name in ("elu_plus_one", "dpfp_1", "dpfp_2", "dpfp_3")
)
KERNELS = {
    "elu+1": Kernel(elu, 64, COLORS["elu_plus_one"], (0.00089, 0.02451, 0.16421, 0.27086, 0.34196)),
    "DPFP-1": Kernel(dpfp_1, 128, COLORS["relu"], (0.00078, 0.00043, 0.00021, 0.05101, 0.17321)),
    "DPFP-2": Kernel(dpfp_2, 256, COLORS["dpfp_2"], (0.00031, 0.00097, 0.00050, 0.00051, 0.00037)),
    "DPFP-3": Kernel(dpfp_3, 384, COLORS["taylor"], (0.00048, 0.00049, 0.00048, 0.00086, 0.00088)),
    "FAVOR+": Kernel(functools.partial(favor, 1e-6), None, COLORS["favor_plus"], (0.117, 0.483, 0.496, 0.500, 0.5)),
    "softmax": Kernel(softmax, None, COLORS["softmax attention"], (0.00063, 0.00007, 0.00002, 0.00001, 0.00001)),
}
EXACT_FAVOR = Kernel(functools.partial(favor, 0.0), None, COLORS["exp"], ())
EXACT_SIZES = (60, 100)
QUICK = {"elu+1": (20, 100), "DPFP-1": (20,), "DPFP-2": (60,), "softmax": (20,)}


def init(key: Array, size: int) -> dict[str, Any]:
    """Parameters for S keys: the authors' distributions."""
    width = int(2.2 * size)
    keys = jax.random.split(key, 5)
    near_zero = functools.partial(jax.random.uniform, minval=-1.0, maxval=1.0)
    return {
        "embedding": jax.random.normal(keys[0], (size, width)),
        "key": near_zero(keys[1], (width + size, KEY_DIM)) * KEY_DIM**-0.5,
        "key_bias": near_zero(keys[2], (KEY_DIM,)) * (width + size) ** -0.5,
        "query": near_zero(keys[3], (width, KEY_DIM)) * KEY_DIM**-0.5,
        "query_bias": near_zero(keys[4], (KEY_DIM,)) * width**-0.5,
    }


def mean_loss(attend, params, key: Array, values: Array, asked: Array) -> Array:
    """½|o - onehot|², its mean.

    Args:
      attend: a kernel's.
      params: of `init`.
      key: for random features.
      values: of keys 0 … S - 1, whose order does not matter, int [B, S].
      asked: keys, int [B, T].
    """
    width, size = params["embedding"].shape[-1], values.shape[1]
    onehot = jax.nn.one_hot(values, size)
    # W_k [e; onehot] as the sum of a part that only the key sets and a part that only the value sets.
    by_key = params["embedding"] @ params["key"][:width] + params["key_bias"]
    keys = by_key[None] + params["key"][width:][values]
    query = (params["embedding"] @ params["query"] + params["query_bias"])[asked]
    output = attend(key, query[:, :, None], keys[:, :, None], onehot[:, :, None])[:, :, 0]
    answer = jnp.take_along_axis(onehot, asked[..., None], axis=1)
    return jnp.mean(jnp.sum(jnp.square(output - answer), axis=-1)) / 2


def best_loss(kernel: Kernel, size: int, seed: int) -> tuple[float, int]:
    """(the least test loss, steps): trains until it is good or stays as it is."""
    optimizer = optax.adam(1e-3)
    loss_of = functools.partial(mean_loss, kernel.attend)
    every_key = jnp.arange(size)[None]

    def step(carry, batch):
        params, opt_state = carry
        gradient = jax.grad(loss_of)(params, *batch)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    @jax.jit
    def train_and_test(carry, batches, tests):
        carry, _ = lax.scan(step, carry, batches)
        losses = lax.map(lambda test: loss_of(carry[0], test[0], test[1][None], every_key), tests)
        return carry, jnp.mean(losses)

    rng, key = np.random.default_rng([seed, size]), jax.random.key(seed)
    params = init(key, size)
    carry, losses = (params, optimizer.init(params)), []
    while len(losses) < MOST_TESTS:
        key, *keys = jax.random.split(key, 3)
        values = rng.permuted(np.tile(np.arange(size), (STEPS_A_TEST * BATCH_SIZE + TEST_SEQUENCES, 1)), axis=1)
        asked = rng.integers(0, size, (STEPS_A_TEST, BATCH_SIZE, 1))
        trained_on = values[TEST_SEQUENCES:].reshape(STEPS_A_TEST, BATCH_SIZE, size)
        batches = (jax.random.split(keys[0], STEPS_A_TEST), trained_on, asked)
        tests = (jax.random.split(keys[1], TEST_SEQUENCES), values[:TEST_SEQUENCES])
        carry, loss = train_and_test(carry, batches, tests)
        losses.append(float(loss))
        if losses[-1] <= GOOD or len(losses) - 1 - int(np.argmin(losses)) > PATIENCE:
            break
    return min(losses), len(losses) * STEPS_A_TEST


def rank_law(num_features: int, size: int) -> float:
    return max(0.0, 1 - num_features / size) / 2


def check(report: Report, name: str, size: int, ours: float, steps: int) -> None:
    """A kernel's loss beside the paper's and, where they differ from 0, beside the rank law."""
    kernel = KERNELS[name]
    published = kernel.published[SIZES.index(size)]
    within = 0.002 if name == "softmax" else 0.03
    report.compare(f"{name}, S = {size} ({steps} steps)", ours, published, within=within, digits=".4f")
    law = 0.0 if kernel.num_features is None else rank_law(kernel.num_features, size)
    if law:
        what = f"  rank law, ½(1 - {kernel.num_features}/{size})"
        report.expect(what, f"{ours:.4f}", f"{law:.4f}, +.02", law - 1e-4 <= ours <= law + 0.02)


@styled
def loss_figure(losses: dict[str, dict[int, float]]) -> Figure:
    figure = Figure(figsize=(WIDTH, 4.2))
    axes: Any = figure.subplots()
    fine = np.linspace(SIZES[0], SIZES[-1], 200)
    for name, by_size in losses.items():
        kernel = KERNELS.get(name, EXACT_FAVOR)
        axes.plot(
            list(by_size), list(by_size.values()), label=name, marker="o", markersize=4, linewidth=1.2, color=kernel.color
        )
        axes.plot(SIZES[: len(kernel.published)], kernel.published, "x", color=kernel.color, markersize=8)
        if kernel.num_features is not None and kernel.num_features < SIZES[-1]:
            law = [rank_law(kernel.num_features, size) for size in fine]
            axes.plot(fine, law, "--", color=kernel.color, linewidth=0.9)
    axes.plot([], [], "x", color="#666666", markersize=8, label="the paper's")
    axes.plot([], [], "--", color="#666666", linewidth=0.9, label="rank law")
    axes.set(xlabel="pairs in the sequence, S", ylabel="best loss", ylim=(-0.01, 0.65), xticks=SIZES)
    axes.set_title("a layer of attention recalls one of S values; d = 64")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def reproduce(options: Options, report: Report) -> None:
    report.section("Best loss")
    losses = {}
    for name, kernel in KERNELS.items():
        losses[name] = {}
        for size in QUICK.get(name, ()) if options.quick else SIZES:
            losses[name][size], steps = best_loss(kernel, size, options.seed)
            check(report, name, size, losses[name][size], steps)
    if not options.quick:
        name = "FAVOR+, eps = 0"
        losses[name] = {size: best_loss(EXACT_FAVOR, size, options.seed)[0] for size in EXACT_SIZES}
        report.note(
            f"{name}, not in the paper: {', '.join(f'{loss:.3f} at {size}' for size, loss in losses[name].items())}"
        )
    report.save(loss_figure(losses), "capacity")


if __name__ == "__main__":
    run(reproduce, __doc__)
