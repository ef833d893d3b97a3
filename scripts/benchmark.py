"""Time and memory of causal linear attention beside softmax attention, forward and with gradients; time of decoding.

    python scripts/benchmark.py --lengths 256,1024,4096
    python scripts/benchmark.py --lengths 1024,65536 --forms chunked --memory-only
    python scripts/benchmark.py --decode --lengths 100,1000,10000,100000
    python scripts/benchmark.py --decay

With --decode: a token of the language model of configs/small.py at these positions, linear beside softmax attention.
With --decay: the chunked form with a decay per head and per feature, beside the same without, over four shapes.
Contestants are timed in turn in one process and the minimum of several rounds is printed, so that noise hits all alike.
"""

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_linattn
from jax_linattn.lm import generate
from jax_linattn.lm.config import default_config
from jax_linattn.lm.model import Decoder, ModelConfig
from jax_linattn.lm.sampling import sampling


def contestants(forms: list[Any]) -> dict:
    linear = {form: functools.partial(jax_linattn.linear_attention, is_causal=True, implementation=form) for form in forms}
    return linear | {"softmax": functools.partial(jax.nn.dot_product_attention, is_causal=True)}


def with_gradients(attention):
    def run(*arguments):
        *inputs, cotangent = arguments
        output, pullback = jax.vjp(attention, *inputs)
        return output, pullback(cotangent)

    return run


def compile_all(functions: dict, arguments) -> dict:
    """(name, "forward" or "gradient") to (compiled, compile seconds)."""
    compiled = {}
    for name, attention in functions.items():
        for kind, function, args in (
            ("forward", attention, arguments[:-1]),
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


def decoders(position: int, batch: int) -> dict:
    """By attention: (compiled program that writes a piece, its arguments before and after the carry, the carry)."""
    result = {}
    for attention in ("linear", "softmax"):
        options = {**default_config().model.to_dict(), "attention": attention}
        model = Decoder(ModelConfig(vocabulary_size=96, **options), rngs=nnx.Rngs(0))
        graphdef, cache, rest = generate.with_empty_cache(model, batch, position + generate.PIECE_LENGTH)
        tokens = jax.random.randint(jax.random.key(0), (batch, position), 0, 96)
        if attention == "linear":
            carry = generate.prefill(graphdef, rest, cache, tokens, None)
        else:  # a prompt that long would take T² memory, and what a full cache holds does not change the time
            carry = generate.prefill(graphdef, rest, cache, tokens[:, :1], None)
            set_index = lambda path, x: jnp.full_like(x, position) if "cache_index" in jax.tree_util.keystr(path) else x
            carry = jax.tree_util.tree_map_with_path(set_index, carry)
        keys = jax.random.split(jax.random.key(1), batch)
        how = {"keys": keys, "how": sampling(0.8)}
        compiled = generate.write.lower(graphdef, rest, carry, **how, piece_length=generate.PIECE_LENGTH).compile()
        result[attention] = compiled, rest, carry, how
    return result


def benchmark_decoding(positions: list[int], batch: int, rounds: int) -> None:
    """Prints the time of a token and the bytes of the cache, by position."""
    contestants = {(name, position): run for position in positions for name, run in decoders(position, batch).items()}
    contestants = dict(sorted(contestants.items()))  # the large softmax caches push out no small one
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, (write, rest, carry, how) in contestants.items():
            until = time.perf_counter() + 0.1  # many pieces a round where they are quick
            while True:
                copy = jax.block_until_ready(jax.tree.map(jnp.copy, carry))  # its buffers are used up
                start = time.perf_counter()
                jax.block_until_ready(write(rest, copy, **how))
                best[name] = min(best[name], (time.perf_counter() - start) / generate.PIECE_LENGTH)
                if time.perf_counter() > until:
                    break
    print(f"{'attention':9} {'position':>8} {'µs a token':>10} {'×first':>7} {'cache bytes':>12}")
    for (name, position), (_, _, carry, _) in contestants.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(carry.cache))
        microseconds, ratio = best[name, position] * 1e6, best[name, position] / best[name, positions[0]]
        print(f"{name:9} {position:8} {microseconds:10.1f} {ratio:7.2f} {size:12,}")


DECAY_SHAPES = [(2, 1024, 4, 64), (2, 8192, 4, 64), (2, 4096, 4, 128), (8, 512, 8, 32)]  # B T H D


def benchmark_decay(rounds: int, dtype) -> None:
    """Prints times with decay as ratios to those without, and their geometric mean over the shapes."""
    attend = functools.partial(jax_linattn.linear_attention, is_causal=True, implementation="chunked")
    functions = {
        "none": lambda q, k, v, g: attend(q, k, v),
        "head": lambda q, k, v, g: attend(q, k, v, log_decay=g[..., 0]),
        "feature": lambda q, k, v, g: attend(q, k, v, log_decay=g),
    }
    ratios = {}
    print(f"{'B T H D':14} {'decay':8} {'pass':9} {'ms':>9} {'×none':>6} {'temporaries MB':>14}")
    for shape in DECAY_SHAPES:
        q, k, v, g, cotangent = (jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 5))
        log_decay = jax.nn.log_sigmoid(g.astype(jnp.float32))
        compiled = compile_all(functions, (q, k, v, log_decay, cotangent))
        best = best_times(compiled, rounds)
        for (name, kind), (executable, _, _) in compiled.items():
            ratio = best[name, kind] / best["none", kind]
            ratios.setdefault((name, kind), []).append(ratio)
            temporaries = executable.memory_analysis().temp_size_in_bytes / 1e6
            row = f"{' '.join(map(str, shape)):14} {name:8} {kind:9} {best[name, kind] * 1e3:9.2f} {ratio:6.2f}"
            print(f"{row} {temporaries:14.1f}")
    for (name, kind), values in ratios.items():
        if name != "none":
            print(f"geometric mean {name:8} {kind:9} {np.exp(np.mean(np.log(values))):26.2f}")


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
    parser.add_argument("--decode", action="store_true", help="time a token of the language model at positions --lengths")
    parser.add_argument("--decay", action="store_true", help="time decay per head and per feature beside none")
    options = parser.parse_args()

    if options.decode:
        print(f"jax {jax.__version__} on {jax.default_backend()}; B={options.batch}, the model of configs/small.py")
        return benchmark_decoding([int(length) for length in options.lengths.split(",")], options.batch, options.rounds)
    if options.decay:
        print(f"jax {jax.__version__} on {jax.default_backend()}; {options.dtype}, the default feature map")
        return benchmark_decay(options.rounds, jnp.dtype(options.dtype))
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
