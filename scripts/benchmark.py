"""Time and memory of causal linear attention beside softmax attention, forward and with gradients.

    python scripts/benchmark.py --lengths 256,1024,4096
    python scripts/benchmark.py --lengths 1024,65536 --forms chunked --memory-only

Contestants are timed in turn in one process and the minimum of several rounds is printed, so that noise hits all alike.
"""

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

import jax_linattn


def contestants(forms: list[Any]) -> dict:
    linear = {form: functools.partial(jax_linattn.linear_attention, is_causal=True, implementation=form) for form in forms}
    return linear | {"softmax": functools.partial(jax.nn.dot_product_attention, is_causal=True)}


def with_gradients(attention):
    def run(query, key, value, cotangent):
        output, pullback = jax.vjp(attention, query, key, value)
        return output, pullback(cotangent)

    return run


def compile_all(functions: dict, arguments) -> dict:
    """(name, "forward" or "gradient") to (compiled, compile seconds)."""
    compiled = {}
    for name, attention in functions.items():
        for kind, function, args in (
            ("forward", attention, arguments[:3]),
            ("gradient", with_gradients(attention), arguments),
        ):
            start = time.perf_counter()
            executable = jax.jit(function).lower(*args).compile()
            compiled[name, kind] = executable, args, time.perf_counter() - start
    return compiled


def best_times(compiled: dict, rounds: int) -> dict:
    best = dict.fromkeys(compiled, float("inf"))
    for round_ in range(rounds + 1):
        for name, (executable, arguments, _) in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(executable(*arguments))
            if round_ > 0:  # the first is a warm-up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="64,256,1024,4096", help="T, separated by commas")
    parser.add_argument("--forms", default="chunked", help="forms, separated by commas")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory-only", action="store_true", help="compile and print temporaries; softmax left out")
    options = parser.parse_args()

    functions = contestants(options.forms.split(","))
    if options.memory_only:
        del functions["softmax"]
    print(f"jax {jax.__version__} on {jax.default_backend()}; B={options.batch} H={options.heads} D=E={options.dim}")
    print(f"{'T':>7} {'form':12} {'pass':9} {'ms':>9} {'×softmax':>9} {'compile s':>9} {'temporaries MB':>14} {'÷ qkv':>6}")
    for length in map(int, options.lengths.split(",")):
        shape = (options.batch, length, options.heads, options.dim)
        arguments = [jax.random.normal(k, shape, jnp.dtype(options.dtype)) for k in jax.random.split(jax.random.key(0), 4)]
        compiled = compile_all(functions, arguments)
        best = {} if options.memory_only else best_times(compiled, options.rounds)
        for (name, kind), (executable, _, compile_seconds) in compiled.items():
            temporaries = executable.memory_analysis().temp_size_in_bytes
            ms = f"{best[name, kind] * 1e3:9.2f}" if best else f"{'-':>9}"
            ratio = f"{best[name, kind] / best['softmax', kind]:9.3f}" if best else f"{'-':>9}"
            share = temporaries / (3 * arguments[0].nbytes)
            row = f"{length:7} {name:12} {kind:9} {ms} {ratio} {compile_seconds:9.2f}"
            print(row, f"{temporaries / 1e6:14.1f} {share:6.2f}")


if __name__ == "__main__":
    main()
