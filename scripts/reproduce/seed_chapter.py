"""The textbook chapters that this library implements: every figure they print, to the digits that they print.

"Causal Linear Attention" and "The Linear Attention Formula" of M. Brenndoerfer's Language AI Handbook print the mean
difference of causal and non-causal attention, count the numbers of what lies between products, and work one example
through by hand. Nothing is computed here as they do: attention is this library's, and sizes are those of its state.

The two plots are theirs as well: causal weights, softmax's beside them, and what is held as a sequence gets longer. Their
random numbers have a seed of their own; --seed changes only those of which nothing but a shape is shown, and --quick leaves
nothing out.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax import Array
from matplotlib.figure import Figure

import jax_linattn
from jax_linattn import feature_maps
from jax_linattn.lm import inspection
from jax_linattn.lm.figures import style
from jax_linattn.lm.figures.weights import draw_pattern

EPS = 1e-6  # the chapters add it to every denominator
DIM = 64

attend = jax.jit(jax_linattn.linear_attention, static_argnames=("is_causal", "feature_map", "eps"))


def reproduce(options: report.Options, out: report.Report) -> None:
    causal_and_not(out)
    sizes(options.seed, out)
    worked_example(out)
    out.save(sizes_figure([1 << power for power in range(4, 15)], DIM), "seed_chapter_sizes")


def causal_and_not(out: report.Report) -> None:
    """Section 8: two attentions on the same random numbers, and what weights the causal one gives."""
    out.section("causal beside non-causal, n=32, d=16, elu+1")
    rng = np.random.RandomState(42)  # NumPy's older generator: the numbers that the chapter printed its figure for
    query, key = (one_head(rng.randn(32, 16).astype(np.float32) * 0.5) for _ in range(2))
    value = one_head(rng.randn(32, 16).astype(np.float32))
    causal, full = (attend(query, key, value, is_causal=is_causal, eps=EPS) for is_causal in (True, False))
    equal(out, "mean absolute difference", f"{jnp.mean(jnp.abs(causal - full)):.4f}", "0.2188")

    weights = np.asarray(jax_linattn.attention_weights(query, key, is_causal=True)[0])
    forward = weights[np.triu_indices(32, 1)]
    equal(out, "largest weight of a later position", f"{np.abs(forward).max():g}", "0")
    above = weights[np.tril_indices(32)].min()
    out.expect("least weight of an earlier position", f"{above:.4f}", "above 0", bool(above > 0))
    apart = np.abs(weights @ value[:, 0] - causal[:, 0]).max()
    out.expect("output - weights @ values, at most", f"{apart:.1g}", "rounding", bool(apart < 1e-5))
    softmax = np.asarray(inspection.softmax_weights(query[None], key[None])[0, 0])
    out.save(draw_pattern({"softmax attention": softmax, "elu_plus_one": weights}), "seed_chapter_weights")


def sizes(seed: int, out: report.Report) -> None:
    """Section 3: what lies between the two products, counted in arrays that the library would make."""
    out.section("what lies between the products, d=64")
    query, key, value = jax.random.normal(jax.random.key(seed), (3, 128, 1, DIM))
    output = attend(query, key, value, eps=EPS)
    equal(out, "n=128: shape of the output", str(output[:, 0].shape), "(128, 64)")
    aggregate, matrix = intermediates(128, DIM)
    equal(out, "n=128: key-value aggregate", "{}x{}".format(*aggregate), "64x64")
    equal(out, "n=128: attention matrix", "{}x{}".format(*matrix), "128x128")
    equal(out, "n=128: ratio", f"{ratio(128):.1f}x", "4.0x")
    equal(out, "n=1,024: ratio", f"{ratio(1024):.0f}x", "256x")
    equal(out, "n=8,192: ratio", f"{ratio(8192):,.0f}x", "16,384x")
    aggregate, matrix = intermediates(10_000, DIM)
    equal(out, "n=10,000: numbers of the attention matrix", f"{np.prod(matrix):,}", "100,000,000")
    equal(out, "n=10,000: numbers of the aggregate", f"{np.prod(aggregate):,}", "4,096")


def worked_example(out: report.Report) -> None:
    """One query, three keys, by hand: the weighted values over the weights, for two maps and for softmax."""
    out.section("by hand: q = 2, k = 0.5, 1, 1.5, v = 10, 20, 30")
    query, key, value = (one_head(np.array(x, np.float32)[:, None]) for x in ([2], [0.5, 1, 1.5], [10, 20, 30]))
    for name, sums, quotient in [("identity", "140 / 6", "23.33"), ("elu_plus_one", "390 / 18", "21.67")]:
        feature_map = feature_maps.get(name)
        state, _ = jax_linattn.causal_linear_attention(
            query[None].repeat(3, 1), key[None], value[None], feature_map=feature_map
        )
        mapped = feature_map(query)[0, 0, 0]
        equal(out, f"{name}: sums", f"{mapped * state.kv.item():.0f} / {mapped * state.key_sum.item():.0f}", sums)
        output = attend(query, key, value, feature_map=feature_map)
        equal(out, f"{name}: output", f"{output.item():.2f}", quotient)
    # With features exp(x) of one dimension the kernel is exp(q + k): softmax's exp(q·k) is that of keys q·k.
    output = attend(query, query * key, value, feature_map=feature_maps.exp)
    equal(out, "softmax", f"{output.item():.2f}", "25.75")
    equal(out, "softmax, of jax.nn", f"{jax.nn.dot_product_attention(query, key, value).item():.2f}", "25.75")


def intermediates(length: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes (of the state of linear attention, of the weights that softmax attention forms); nothing is computed."""
    tokens = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.float32)
    aggregate = jax_linattn.init_state(tokens, tokens).kv
    weights = jax.eval_shape(jax_linattn.attention_weights, tokens, tokens)
    return aggregate.shape[2:], weights.shape[2:]


def ratio(length: int) -> float:
    aggregate, matrix = intermediates(length, DIM)
    return float(np.prod(matrix) / np.prod(aggregate))


def one_head(x: np.ndarray) -> Array:
    """[T, D] -> [T, 1, D]."""
    return jnp.asarray(x)[:, None]


def equal(out: report.Report, what: str, ours: str, published: str) -> None:
    """The digits that the chapter prints, and ours."""
    out.expect(what, ours, published, ours == published)


@style.styled
def sizes_figure(lengths: list[int], dim: int) -> Figure:
    """Numbers between the products over n: n·n of standard attention, D·d_v of linear attention."""
    shapes = [intermediates(length, dim) for length in lengths]
    figure = Figure(figsize=(style.WIDTH, 4))
    axes: Any = figure.subplots()
    lines = [("linear attention, D × d_v", "elu_plus_one"), ("standard attention, n × n", "softmax attention")]
    for (label, name), counts in zip(lines, np.prod(shapes, axis=2).T, strict=True):
        axes.loglog(lengths, counts, base=2, color=style.COLORS[name], marker="o", markersize=4, label=label)
    axes.set_yscale("log", base=10)
    axes.axvline(dim, color="0.7", linewidth=0.8, linestyle="--", label=f"n = d = {dim}")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens, n", ylabel="numbers between the two products", title=f"one head, D = d_v = {dim}")
    axes.grid(color="#e0e0e0", linewidth=0.7)
    axes.legend()
    return figure


if __name__ == "__main__":
    report.run(reproduce, __doc__)
