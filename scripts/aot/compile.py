"""Compiles the library for accelerators that need not be here, and checks what their compilers say of it.

    make aot
    python scripts/aot/compile.py v5e v6e tpu7x     in an environment with jax[tpu]
    python scripts/aot/compile.py h100              in one with jax[cuda13-local] or jax[cuda12-local]

Every form, the step, the layers and the language model's train step, in float32 and bfloat16. That they compile; that a
gradient's temporaries grow with the length and not faster; that nothing is float64, calls the host, or has as many numbers
as all pairs of tokens; that no block's gradient is added to a whole sequence's; that 131,072 tokens of 16 heads of 128
with gradients fit one TPU v5e. Nothing is run. Exits with 1 and a list if anything does not hold.
"""

import argparse
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

TPU = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
GPU = {"h100": Path(__file__).with_name("h100.txtpb")}
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
for name, value in SETTINGS.items():  # before jax is imported, which reads some of them then
    os.environ.setdefault(name, value)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, SingleDeviceSharding  # noqa: E402

from jax_linattn import feature_maps, init_state, layers, linear_attention, linear_attention_step  # noqa: E402
from jax_linattn.lm import devices as lm_devices  # noqa: E402
from jax_linattn.lm.config import default_config  # noqa: E402
from jax_linattn.lm.model import ModelConfig  # noqa: E402
from jax_linattn.lm.step import abstract_state, compile_step  # noqa: E402

HEADS, DIM = 1, 128  # a TPU's compiler takes time for each head
# Long enough that buffers do not stay in a TPU's vector memory, whose use is not counted; for the associative form, whose
# program grows with log T, shorter.
LENGTHS = (65_536, 131_072)
ASSOCIATIVE_LENGTHS = (1024, 2048)
VECTOR_MEMORY = {"tpu": 2**27, "gpu": 0}  # bytes, at most
QUADRATIC_LENGTHS = (512,)
LAYER_LENGTHS = (4096,)
V5E_BYTES = 15.75e9
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Program(NamedTuple):
    """Something to compile."""

    name: str
    arguments: Callable[[int, Any], tuple]  # from a length and a dtype, abstract
    function: Callable
    lengths: tuple[int, ...] = LENGTHS[:1]
    is_linear: bool = True  # in length: False is for what forms all pairs of tokens
    in_blocks: bool = False  # whether time is gone through in blocks, none of which may touch all of it
    dtypes: tuple[str, ...] = tuple(DTYPES)


def tokens(length: int, dtype, batch: int = 1, heads: int = HEADS, dim: int = DIM) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, length, heads, dim), dtype)


def with_gradients(function: Callable) -> Callable:
    """(arguments, cotangent of the output) -> (output, cotangents of the arguments)."""

    def run(*arguments):
        *inputs, cotangent = arguments
        output, pullback = jax.vjp(function, *inputs)
        return output, pullback(cotangent)

    return run


# By name: options of `linear_attention`, and what is passed to it beside q, k and v.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Callable]]] = {
    "chunked": ({"is_causal": True}, {}),
    "chunked, both ways": ({}, {}),
    "chunked, mask and segments": (
        {"is_causal": True},
        {
            "mask": lambda length: jax.ShapeDtypeStruct((1, length), jnp.bool_),
            "segment_ids": lambda length: jax.ShapeDtypeStruct((1, length), jnp.int32),
        },
    ),
    "chunked, decay a head": (
        {"is_causal": True},
        {"log_decay": lambda length: jax.ShapeDtypeStruct((1, length, HEADS), jnp.float32)},
    ),
    "chunked, decay a feature": (
        {"is_causal": True},
        {"log_decay": lambda length: jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)},
    ),
    "chunked, exponential map": ({"is_causal": True, "feature_map": feature_maps.exp}, {}),
    "recurrent": ({"is_causal": True, "implementation": "recurrent"}, {}),
    "associative": ({"is_causal": True, "implementation": "associative"}, {}),
    "quadratic": ({"is_causal": True, "implementation": "quadratic"}, {}),
}


def forms(depth: "Depth") -> Iterator[Program]:
    for name, (options, extra) in FORMS.items():
        if not (depth.all_forms or name.startswith("chunked")):
            continue
        dtypes = depth.variant_dtypes if "," in name else depth.dtypes
        attend = functools.partial(_attend, names=tuple(extra), options=options)
        kind = {"is_linear": name != "quadratic", "in_blocks": name.startswith(("chunked", "recurrent"))}
        lengths = {"quadratic": QUADRATIC_LENGTHS, "associative": ASSOCIATIVE_LENGTHS}.get(name, LENGTHS)

        def arguments(length, dtype, extra=extra):
            return tokens(length, dtype), *[tokens(length, dtype)] * 2, *[make(length) for make in extra.values()]

        if depth.forward_alone:
            yield Program(f"{name}, forward", arguments, attend, lengths[:1], dtypes=("float32",), **kind)
        yield Program(
            f"{name}, gradient", with_cotangent(arguments), with_gradients(attend), lengths, dtypes=dtypes, **kind
        )


def _attend(query, key, value, *others, names: tuple[str, ...], options: dict[str, Any]):
    return linear_attention(query, key, value, **dict(zip(names, others, strict=True)), **options)


def with_cotangent(arguments: Callable) -> Callable:
    return lambda length, dtype: (*arguments(length, dtype), tokens(length, dtype))


def step() -> Program:
    def arguments(length, dtype):
        token = jax.ShapeDtypeStruct((length, HEADS, DIM), dtype)  # a batch of that many
        return jax.eval_shape(init_state, token, token), token, token, token

    return Program("step", arguments, linear_attention_step, (8,), is_linear=False)


def modules(all_layers: bool) -> Iterator[Program]:
    """A gradient of the parameters and the input of the layers, or of the first alone."""
    width = HEADS * DIM
    makers: dict[str, Callable] = {
        "LinearAttention": lambda **how: layers.LinearAttention(HEADS, width, is_causal=True, **how),
        "MultiScaleRetention": lambda **how: layers.MultiScaleRetention(width, HEADS, **how),
        "LightningAttention": lambda **how: layers.LightningAttention(width, HEADS, layer=0, num_layers=2, **how),
        "GatedLinearAttention": lambda **how: layers.GatedLinearAttention(width, HEADS, **how),
        "HGRN2": lambda **how: layers.HGRN2(width, HEADS, **how),
        "Mamba2": lambda **how: layers.Mamba2(width, HEADS, **how),
        "BasedLinearAttention": lambda **how: layers.BasedLinearAttention(width, HEADS, **how),
        "SlidingWindowAttention": lambda **how: layers.SlidingWindowAttention(width, HEADS, window=64, **how),
    }
    for name, maker in list(makers.items())[: None if all_layers else 1]:

        def split(dtype, maker=maker):
            return nnx.split(maker(dtype=dtype, rngs=nnx.Rngs(0)), nnx.Param, ...)

        def arguments(length, dtype, split=split):
            _, params, rest = nnx.eval_shape(lambda: split(dtype))
            x = jax.ShapeDtypeStruct((1, length, width), dtype)
            return _plain(params), _plain(rest), x

        def gradient(params, rest, x, split=split):
            graphdef, *_ = nnx.eval_shape(lambda: split(x.dtype))

            def loss(params, x):
                output = nnx.merge(graphdef, nnx.State(params), nnx.State(rest))(x)
                return jnp.mean(jnp.square(output.astype(jnp.float32)))

            return jax.grad(loss, argnums=(0, 1))(params, x)

        dtypes = tuple(DTYPES) if name == "LinearAttention" else ("bfloat16",)
        yield Program(f"{name}, gradient", arguments, gradient, LAYER_LENGTHS, dtypes=dtypes)


def _plain(state) -> Any:
    return nnx.to_pure_dict(state)


# --- compiling and checking -------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """What is compiled for."""

    name: str
    platform: str
    devices: Any


def target_of(name: str) -> Target:
    if name in TPU:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TPU[name])
    else:
        config = GPU[name].read_text()
        topology = topologies.get_topology_desc(platform="cuda", topology_name=name, topology="1x1x4", target_config=config)
    return Target(name, "tpu" if name in TPU else "gpu", topology.devices)


def place(arguments, target: Target):
    sharding = SingleDeviceSharding(target.devices[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)


def compile_for(function: Callable, arguments: tuple, target: Target):
    return jax.jit(function).lower(*place(arguments, target)).compile()


def problems_in(program: str, length: int, is_linear: bool = True, in_blocks: bool = False) -> list[str]:
    """What a compiled program's text shows that must not be there."""
    problems = []
    sums = re.findall(r"= [a-z]+\d+\[([\d,]+)\]\S* add\(", program)
    if in_blocks and max((np.prod([int(n) for n in shape.split(",")]) for shape in sums), default=0) >= length * DIM:
        problems.append("adds to all of a sequence")
    if "f64[" in program:
        problems.append("has float64")
    calls = re.findall(r'custom_call_target="([^"]*callback[^"]*)"', program)
    if calls or re.search(r"\b(infeed|outfeed|send|recv)\(", program):
        problems.append(f"calls the host {calls}")
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"\b[a-z]+\d+\[(\d+(?:,\d+)*)\]", program)]
    if is_linear and max(sizes, default=0) >= length * length:
        problems.append(f"has an array of {max(sizes):,} numbers")
    return problems


class Report:
    """Prints a line a program, and remembers what does not hold."""

    def __init__(self):
        self.problems: list[str] = []
        print(f"{'for':6} {'program':37} {'dtype':9} {'T':>7} {'compile s':>9} {'temporaries MB':>14} {'a token':>8}")

    def add(
        self, target: Target, name: str, dtype: str, length: int, seconds: float, compiled, problems: list[str]
    ) -> None:
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        columns = f"{target.name:6} {name:37} {dtype:9} {length:7} {seconds:9.1f} {temporaries / 1e6:14.1f}"
        print(f"{columns} {temporaries / length:8.0f}", flush=True)
        self.problems += [f"{target.name}, {name}, {dtype}, T = {length}: {problem}" for problem in problems]


class Depth(NamedTuple):
    """How much is compiled for a target."""

    dtypes: tuple[str, ...]
    variant_dtypes: tuple[str, ...]  # of forms with masks, decays and so on
    all_forms: bool  # else the chunked one alone
    forward_alone: bool  # beside a gradient's program, which has it inside
    growth_for: tuple[str, ...]  # dtypes in which memory is compared at two lengths
    all_layers: bool
    train_steps: tuple[tuple[str, int], ...]  # a dtype and a number of devices


BOTH, ONE_DEVICE = ("float32", "bfloat16"), (("float32", 1), ("bfloat16", 1))
QUICK = Depth(BOTH[1:], BOTH[1:], False, False, (), False, ())
USUAL = Depth(BOTH, BOTH[1:], True, False, (), False, ONE_DEVICE)
THOROUGH = Depth(BOTH, BOTH[:1], True, True, ("float32",), True, (("float32", 4), ("bfloat16", 1)))
THOROUGH_FOR = "v5e"


def compile_and_add(make: Callable, target: Target, name: str, dtype: str, length: int, report: Report, **kind: bool):
    """What `make()` compiles, added to the report; None if it does not compile."""
    start = time.perf_counter()
    try:
        compiled = make()
    except Exception as error:  # whatever the compiler raises is what is to be reported
        report.problems.append(f"{target.name}, {name}, {dtype}, T = {length}: {str(error).splitlines()[0]}")
        return None
    problems = problems_in(compiled.as_text(), length, **kind)
    report.add(target, name, dtype, length, time.perf_counter() - start, compiled, problems)
    return compiled


def check_program(program: Program, target: Target, depth: Depth, report: Report) -> None:
    for dtype in (name for name in depth.dtypes if name in program.dtypes):
        sizes = []
        for length in program.lengths if dtype in depth.growth_for else program.lengths[:1]:
            make = functools.partial(compile_for, program.function, program.arguments(length, DTYPES[dtype]), target)
            kind = {"is_linear": program.is_linear, "in_blocks": program.in_blocks}
            compiled = compile_and_add(make, target, program.name, dtype, length, report, **kind)
            if compiled is not None:
                sizes.append(compiled.memory_analysis().temp_size_in_bytes + VECTOR_MEMORY[target.platform])
        if program.is_linear and len(sizes) == 2 and sizes[1] > 2.1 * sizes[0]:
            report.problems.append(
                f"{target.name}, {program.name}, {dtype}: temporaries grow from {sizes[0]} to {sizes[1]}"
            )


def check_long(target: Target, depth: Depth, report: Report) -> None:
    """131,072 tokens with gradients in one v5e's memory: arguments, outputs and temporaries."""
    length, attend = 131_072, functools.partial(linear_attention, is_causal=True)
    for dtype in depth.dtypes[:1]:
        x = tokens(length, DTYPES[dtype], heads=16)
        make = functools.partial(compile_for, with_gradients(attend), (x, x, x, x), target)
        compiled = compile_and_add(make, target, "H = 16, gradient", dtype, length, report)
        if compiled is not None:
            size = compiled.memory_analysis()
            total = size.argument_size_in_bytes + size.output_size_in_bytes + size.temp_size_in_bytes
            print(f"{target.name:6} of {length:,} tokens in {dtype}: {total / 1e9:.2f} GB with arguments and results")
            if total > V5E_BYTES:
                report.problems.append(f"{target.name}: {length:,} tokens in {dtype} take {total / 1e9:.2f} GB")


def check_train_step(target: Target, depth: Depth, report: Report) -> None:
    """The language model's train step, on one device, and on four with its parameters split over them."""
    for dtype, count in depth.train_steps:
        config = default_config()
        config.update({"context": 2048, "batch_size": count, "shard_parameters": count > 1})
        config.model.update({"dtype": dtype, "num_layers": 1, "num_heads": HEADS})
        mesh = Mesh(np.asarray(target.devices[:count]), (lm_devices.AXIS,))
        graphdef, state = abstract_state(ModelConfig(vocabulary_size=96, **config.model), config, mesh)
        make = functools.partial(compile_step, graphdef, config, mesh, state)
        tokens_a_step = config.context * config.batch_size
        compile_and_add(make, target, f"train step on {count} device(s)", dtype, tokens_a_step, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=[*TPU, *GPU], help="what to compile for")
    parser.add_argument(
        "--quick", action="store_true", help="the chunked form's gradients in bfloat16 alone, about a minute a target"
    )
    options = parser.parse_args()
    start = time.perf_counter()
    print(f"jax {jax.__version__}")
    report = Report()
    for name in options.targets:
        target = target_of(name)
        depth = QUICK if options.quick else THOROUGH if name == THOROUGH_FOR else USUAL
        with mock.patch("jax.default_backend", lambda target=target: target.platform):  # which defaults ask for
            for program in (*forms(depth), step(), *modules(depth.all_layers)):
                check_program(program, target, depth, report)
            check_train_step(target, depth, report)
            if name == "v5e":
                check_long(target, depth, report)
    print(f"{', '.join(options.targets)}: {time.perf_counter() - start:.0f} s")
    if report.problems:
        sys.exit("\n".join(["does not hold:", *report.problems]))


if __name__ == "__main__":
    main()
