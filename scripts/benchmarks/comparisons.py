"""What is compared: each a function that measures, prints a table, and yields its figures as rows for JSON."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import contestants, oracle
from benchmarks.contestants import OURS_NORMALIZED, Contestant
from benchmarks.language_model import compare_writing
from benchmarks.measure import Machine, Program, best_times, compiled, geometric_mean, with_gradients

import jax_linattn

Rows = Iterator[dict[str, Any]]
SHAPES = [(2, 1024, 4, 64), (2, 8192, 4, 64), (2, 4096, 4, 128), (8, 512, 8, 32)]  # B T H D
LENGTHS = [2**n for n in range(8, 18)]
CONTEXTS = [2**n for n in range(4, 17, 2)]
LARGEST_CACHE = 3e9  # bytes, of softmax attention's keys and values
PASSES = ("forward", "gradient")  # the second is forward and backward


def normal(shape: tuple[int, ...], count: int, dtype=jnp.float32) -> list[jax.Array]:
    return [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), count)]


def programs_of(contestant: Contestant, shape: tuple[int, ...], dtype=jnp.float32) -> dict[str, Program]:
    """Forward, and forward with gradients of all three."""
    *inputs, cotangent = normal(shape, 4, dtype)
    if contestant.uses_torch:
        return _torch_programs(contestant, [*inputs, cotangent])
    return {
        "forward": compiled(contestant.attend, *inputs),
        "gradient": compiled(with_gradients(contestant.attend), *inputs, cotangent),
    }


def _torch_programs(contestant: Contestant, arrays) -> dict[str, Program]:
    torch = importlib.import_module("torch")
    *inputs, cotangent = (torch.from_numpy(np.array(x)) for x in arrays)
    with_grad = [x.clone().requires_grad_() for x in inputs]

    def forward():
        with torch.no_grad():
            contestant.attend(*inputs)

    def gradient():
        torch.autograd.grad(contestant.attend(*with_grad), with_grad, cotangent)

    return {"forward": Program(forward), "gradient": Program(gradient)}


def _megabytes(temporaries: int | None) -> str:
    return f"{'' if temporaries is None else f'{temporaries / 1e6:.1f}':>9}"


def _row(text: str, **figures) -> dict[str, Any]:
    print(text, flush=True)
    return figures


def compare_shapes(machine: Machine, rounds: int) -> Rows:
    """Ours beside the public peers, unnormalised, on four shapes; and ours with elu + 1 and the normaliser inside."""
    found, absent = contestants.available(list(contestants.MAKERS))
    for name, reason in absent.items():
        yield _row(f"not here: {name} ({reason})", contestant=name, absent=reason)
    ratios: dict[tuple[str, str], list[float]] = {}
    print(
        f"{'B T H D':12} {'pass':9} {'contestant':23} {'ms':>9} {'÷ ours':>7} {'÷ limit':>8} {'compile s':>9} "
        f"{'temp. MB':>9}"
    )
    for shape in SHAPES:
        here = {name: contestant for name, contestant in found.items() if shape[1] <= contestant.longest}
        for name, contestant in here.items():
            oracle.check(name, contestant, *shape[2:])
        programs = {(name, kind): program for name, it in here.items() for kind, program in programs_of(it, shape).items()}
        best = best_times(programs, rounds)
        for kind in PASSES:
            limit = machine.limit(*shape, itemsize=4, gradients=kind == "gradient")
            for name, contestant in here.items():
                seconds, program = best[name, kind], programs[name, kind]
                ratio = seconds / best["ours", kind]
                if contestant.formula != "softmax" and not contestant.uses_torch and not name.startswith("ours"):
                    ratios.setdefault(("best JAX peer", kind), []).append(ratio)
                yield _row(
                    f"{' '.join(map(str, shape)):12} {kind:9} {name:23} {seconds * 1e3:9.2f} {ratio:7.2f} "
                    f"{seconds / limit:8.2f} {program.compile_seconds:9.2f} {_megabytes(program.temporaries)}",
                    shape=shape,
                    kind=kind,
                    contestant=name,
                    seconds=seconds,
                    of_ours=ratio,
                    of_limit=seconds / limit,
                    compile_seconds=program.compile_seconds,
                    temporaries=program.temporaries,
                )
            peers = ratios.pop(("best JAX peer", kind), None)
            if peers:
                ratios.setdefault(("peer ÷ ours", kind), []).append(min(peers))
            ratios.setdefault(("ours ÷ limit", kind), []).append(best["ours", kind] / limit)
            normalized = best["ours, elu+1 normalised", kind] / best["ours", kind]
            ratios.setdefault(("normalised ÷ ours", kind), []).append(normalized)
    for (name, kind), values in ratios.items():
        mean = geometric_mean(values)
        each = ", ".join(f"{value:.2f}" for value in values)
        yield _row(f"geometric mean, {name}, {kind}: {mean:.2f} ({each})", mean_of=name, kind=kind, mean=mean, each=values)


def compare_lengths(machine: Machine, rounds: int) -> Rows:
    """Time and temporaries against T, B = 1, H = 8, D = 64: linear beside softmax attention."""
    found, absent = contestants.available(["ours", "ours, elu+1 normalised", "softmax, jax.nn", "softmax, torch"])
    for name, reason in absent.items():
        yield _row(f"not here: {name} ({reason})", contestant=name, absent=reason)
    print(f"{'T':>7} {'pass':9} {'contestant':23} {'ms':>10} {'µs/token':>9} {'÷ ours':>7} {'temp. MB':>9} {'÷ qkv':>6}")
    for length in LENGTHS:
        shape = (1, length, 8, 64)
        here = {name: contestant for name, contestant in found.items() if length <= contestant.longest}
        programs = {(name, kind): p for name, it in here.items() for kind, p in programs_of(it, shape).items()}
        best = best_times(programs, rounds, budget=20)
        for (name, kind), program in programs.items():
            seconds = best[name, kind]
            ratio = seconds / best["ours", kind]
            share = None if program.temporaries is None else program.temporaries / (3 * length * 8 * 64 * 4)
            yield _row(
                f"{length:7} {kind:9} {name:23} {seconds * 1e3:10.2f} {seconds / length * 1e6:9.2f} {ratio:7.2f} "
                f"{_megabytes(program.temporaries)} {'' if share is None else f'{share:6.2f}'}",
                shape=shape,
                kind=kind,
                contestant=name,
                seconds=seconds,
                of_ours=ratio,
                temporaries=program.temporaries,
                of_inputs=share,
            )


def compare_steps(machine: Machine, rounds: int) -> Rows:
    """A decoded token against what came before it, H = 8, D = 64: our step beside softmax attention over a cache."""
    heads, dim, tokens = 8, 64, 64
    print(f"{'B':>3} {'context':>8} {'contestant':9} {'µs a token':>11} {'÷ ours':>7} {'state or cache MB':>18}")
    for batch in (1, 64):
        for context in CONTEXTS:
            programs = {"ours": _linear_steps(batch, heads, dim, tokens)}
            sizes = {"ours": batch * heads * (dim * dim + dim) * 4}
            cache = 2 * batch * context * heads * dim * 4
            if cache <= LARGEST_CACHE:
                programs["softmax"] = _softmax_steps(batch, heads, dim, tokens, context)
                sizes["softmax"] = cache
            else:
                text = f"{batch:3} {context:8} softmax   left out: its cache takes {cache / 1e9:.1f} GB"
                yield _row(text, batch=batch, context=context, contestant="softmax", absent=text)
            best = best_times(programs, rounds, budget=10)
            for name, seconds in best.items():
                ratio = seconds / best["ours"]
                yield _row(
                    f"{batch:3} {context:8} {name:9} {seconds / tokens * 1e6:11.1f} {ratio:7.2f} {sizes[name] / 1e6:18.3f}",
                    batch=batch,
                    context=context,
                    contestant=name,
                    seconds=seconds / tokens,
                    of_ours=ratio,
                    size=sizes[name],
                )


def _linear_steps(batch: int, heads: int, dim: int, tokens: int) -> Program:
    """As many tokens, each given what the one before it gave: a loop on the device, as a decoder has it."""
    token = jnp.ones((batch, heads, dim))
    state = jax_linattn.init_state(token, token)

    def steps(state, token):
        step = lambda carry, _: (jax_linattn.linear_attention_step(carry[0], carry[1], carry[1], carry[1]), None)
        return jax.lax.scan(step, (state, token), length=tokens)[0]

    return compiled(steps, state, token)


def _softmax_steps(batch: int, heads: int, dim: int, tokens: int, context: int) -> Program:
    """The same over a full cache [B, H, T, D] of that many tokens, each new one in the place of another."""
    token = jnp.ones((batch, heads, dim))
    cache = jnp.ones((2, batch, heads, context, dim))

    def step(carry, place):
        keys, values, token = carry
        keys, values = (jax.lax.dynamic_update_slice_in_dim(x, token[:, :, None], place, axis=2) for x in (keys, values))
        weights = jax.nn.softmax(jnp.einsum("bhd,bhtd->bht", token, keys) / dim**0.5, axis=-1)
        return (keys, values, jnp.einsum("bht,bhtd->bhd", weights, values)), None

    def steps(cache, token):
        return jax.lax.scan(step, (cache[0], cache[1], token), jnp.arange(tokens) % context)[0][2]

    return compiled(steps, cache, token)


def compare_decays(machine: Machine, rounds: int) -> Rows:
    """The chunked form with a decay per head and per feature, as ratios to none, with the default feature map."""
    attend = functools.partial(OURS_NORMALIZED, implementation="chunked")
    functions: dict[str, Callable] = {
        "none": lambda q, k, v, g: attend(q, k, v),
        "head": lambda q, k, v, g: attend(q, k, v, log_decay=g[..., 0]),
        "feature": lambda q, k, v, g: attend(q, k, v, log_decay=g),
    }
    ratios: dict[tuple[str, str], list[float]] = {}
    print(f"{'B T H D':12} {'decay':8} {'pass':9} {'ms':>9} {'÷ none':>7} {'temp. MB':>9}")
    for shape in SHAPES:
        q, k, v, g, cotangent = normal(shape, 5)
        inputs = q, k, v, jax.nn.log_sigmoid(g)
        programs = {(name, "forward"): compiled(function, *inputs) for name, function in functions.items()}
        for name, function in functions.items():
            programs[name, "gradient"] = compiled(with_gradients(function), *inputs, cotangent)
        best = best_times(programs, rounds)
        for (name, kind), program in programs.items():
            ratio = best[name, kind] / best["none", kind]
            ratios.setdefault((name, kind), []).append(ratio)
            yield _row(
                f"{' '.join(map(str, shape)):12} {name:8} {kind:9} {best[name, kind] * 1e3:9.2f} {ratio:7.2f} "
                f"{_megabytes(program.temporaries)}",
                shape=shape,
                decay=name,
                kind=kind,
                seconds=best[name, kind],
                of_none=ratio,
                temporaries=program.temporaries,
            )
    for (name, kind), values in ratios.items():
        if name != "none":
            mean = geometric_mean(values)
            yield _row(f"geometric mean, {name}, {kind}: {mean:.2f}", decay=name, kind=kind, mean=mean)


def compare_forms(machine: Machine, rounds: int) -> Rows:
    """Our forms beside one another, causal, with the default feature map, B = 1, H = 8, D = 64."""
    print(f"{'T':>6} {'form':12} {'pass':9} {'ms':>9} {'÷ chunked':>9} {'compile s':>9} {'temp. MB':>9}")
    for length in (64, 256, 1024, 4096):
        programs = {}
        for form in ("chunked", "quadratic", "recurrent", "associative"):
            attend = functools.partial(OURS_NORMALIZED, implementation=form)
            for kind, program in programs_of(Contestant(attend), (1, length, 8, 64)).items():
                programs[form, kind] = program
        best = best_times(programs, rounds, budget=20)
        for (form, kind), program in programs.items():
            ratio = best[form, kind] / best["chunked", kind]
            yield _row(
                f"{length:6} {form:12} {kind:9} {best[form, kind] * 1e3:9.2f} {ratio:9.2f} {program.compile_seconds:9.2f} "
                f"{_megabytes(program.temporaries)}",
                length=length,
                form=form,
                kind=kind,
                seconds=best[form, kind],
                of_chunked=ratio,
                compile_seconds=program.compile_seconds,
                temporaries=program.temporaries,
            )


COMPARISONS: dict[str, Callable[[Machine, int], Rows]] = {
    "shapes": compare_shapes,
    "lengths": compare_lengths,
    "steps": compare_steps,
    "writing": compare_writing,
    "decays": compare_decays,
    "forms": compare_forms,
}
