"""What a token of the language model costs, against its position."""

import jax
import jax.numpy as jnp
from benchmarks.measure import Program, best_times
from flax import nnx

from jax_linattn.lm import generate
from jax_linattn.lm.config import default_config
from jax_linattn.lm.model import Decoder, ModelConfig
from jax_linattn.lm.sampling import sampling

POSITIONS = (100, 1_000, 10_000, 100_000)


def writer(attention: str, position: int) -> tuple[Program, int]:
    """(a program that writes a piece from that position on, bytes of the cache) for the model of configs/small.py."""
    options = {**default_config().model.to_dict(), "attention": attention}
    model = Decoder(ModelConfig(vocabulary_size=96, **options), rngs=nnx.Rngs(0))
    graphdef, cache, rest = generate.with_empty_cache(model, 1, position + generate.PIECE_LENGTH)
    tokens = jax.random.randint(jax.random.key(0), (1, position), 0, 96)
    if attention == "linear":
        carry = generate.prefill(graphdef, rest, cache, tokens, None)
    else:  # a prompt that long would take T² memory, and what a full cache holds does not change the time
        carry = generate.prefill(graphdef, rest, cache, tokens[:, :1], None)
        set_index = lambda path, x: jnp.full_like(x, position) if "cache_index" in jax.tree_util.keystr(path) else x
        carry = jax.tree_util.tree_map_with_path(set_index, carry)
    how = {"keys": jax.random.split(jax.random.key(1), 1), "how": sampling(0.8)}
    compiled = generate.write.lower(graphdef, rest, carry, **how, piece_length=generate.PIECE_LENGTH).compile()

    def prepare():
        return jax.block_until_ready(jax.tree.map(jnp.copy, carry))  # its buffers are used up

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(carry.cache))
    return Program(lambda carry: jax.block_until_ready(compiled(rest, carry, **how)), prepare=prepare), size


def compare_writing(machine, rounds: int):
    """A token of the model of configs/small.py at several positions, one text: linear beside softmax attention."""
    writers = {(name, position): writer(name, position) for position in POSITIONS for name in ("linear", "softmax")}
    best = best_times({key: program for key, (program, _) in writers.items()}, rounds)
    print(f"{'attention':9} {'position':>8} {'µs a token':>10} {'÷ first':>7} {'cache bytes':>12}")
    for (name, position), (_, size) in writers.items():
        seconds, ratio = best[name, position] / generate.PIECE_LENGTH, best[name, position] / best[name, POSITIONS[0]]
        print(f"{name:9} {position:8} {seconds * 1e6:10.1f} {ratio:7.2f} {size:12,}", flush=True)
        yield {"attention": name, "position": position, "seconds": seconds, "of_first": ratio, "size": size}
