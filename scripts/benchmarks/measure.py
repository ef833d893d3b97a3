"""How anything is measured: compiled once, timed in turn with the others, beside what the machine itself can do."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Program(NamedTuple):
    """Something ready to be timed."""

    run: Callable[..., Any]  # returns when the result is there
    compile_seconds: float = 0.0
    temporaries: int | None = None  # bytes; None = not known
    memory: int | None = None  # bytes of arguments, results and temporaries
    prepare: Callable[[], Any] | None = None  # makes what `run` is called with and uses up; not timed


def with_gradients(function: Callable) -> Callable:
    """(arguments, cotangent of the output) -> (output, cotangents of the arguments)."""

    def run(*arguments):
        *inputs, cotangent = arguments
        output, pullback = jax.vjp(function, *inputs)
        return output, pullback(cotangent)

    return run


def compiled(function: Callable, *arguments) -> Program:
    start = time.perf_counter()
    executable = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    analysis = executable.memory_analysis()
    temporaries = memory = None
    if analysis is not None:
        temporaries = analysis.temp_size_in_bytes
        memory = temporaries + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return Program(lambda: jax.block_until_ready(executable(*arguments)), seconds, temporaries, memory)


def best_times(programs: Mapping[Any, Program], rounds: int, budget: float = 60.0) -> dict[Any, float]:
    """The least seconds of each: in turn, so that noise hits all alike, after one run that warms up.

    Each round begins further on in the list and goes through it in the other direction, so that none comes always after
    the same one, whose threads may still be waiting for work and whose data fill the cache.

    Args:
      programs: by any key.
      rounds: how often each is run; quick ones up to 20 times a round.
      budget: seconds after which no new round is begun, of which two are always done.
    """
    best = {key: _timed(program) for key, program in programs.items()}  # warms up
    start = time.perf_counter()
    keys = list(programs)
    for number in range(rounds):
        first = number * len(keys) // rounds
        in_turn = keys[first:] + keys[:first]
        for key in in_turn if number % 2 == 0 else reversed(in_turn):
            repeats = max(1, min(20, int(0.1 / best[key])))
            best[key] = min(best[key], *(_timed(programs[key]) for _ in range(repeats)))
        if number > 0 and time.perf_counter() - start > budget:
            break
    return best


def _timed(program: Program) -> float:
    arguments = () if program.prepare is None else (program.prepare(),)
    start = time.perf_counter()
    program.run(*arguments)
    return time.perf_counter() - start


class Machine(NamedTuple):
    """What this machine does at best, measured here."""

    flops: float  # multiplications and additions a second, in a large product of matrices
    bytes: float  # bytes a second read and written by a large copy

    @classmethod
    def measure(cls) -> "Machine":
        x = jnp.ones((2048, 2048))
        y = jnp.ones(1 << 26)
        times = best_times({"flops": compiled(jnp.matmul, x, x), "bytes": compiled(lambda y: y + 1, y)}, rounds=8)
        return cls(2 * 2048**3 / times["flops"], 2 * y.nbytes / times["bytes"])

    def limit(self, batch: int, length: int, heads: int, dim: int, itemsize: int, gradients: bool) -> float:
        """Seconds that causal linear attention takes at least: of its recurrence, the state updated and read once for
        each token and twice more for gradients; of its inputs and outputs, each read or written once."""
        tokens = batch * length * heads
        work = 4 * tokens * dim * dim * (3 if gradients else 1)
        traffic = tokens * dim * itemsize * (8 if gradients else 4)
        return max(work / self.flops, traffic / self.bytes)


def geometric_mean(values) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))
