"""Generation: each row is what its prompt gives alone, whatever the batch, the padding and the pieces."""

import functools
import io
import os
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx
from harness import count_compilations
from lm_models import KINDS, model_of

from jax_linattn.lm import generate as module
from jax_linattn.lm.data import Vocabulary
from jax_linattn.lm.generate import (
    continue_texts,
    generate,
    pad_prompts,
    prefill,
    stream,
    stream_texts,
    with_empty_cache,
    write,
)
from jax_linattn.lm.sampling import sample, sampling

SCRIPT = Path(__file__).parent.parent / "scripts" / "generate.py"
PROMPTS = [np.array([1, 2, 3, 4, 5]), np.array([7]), np.array([3, 9, 9, 2, 0, 8])]
RULES = {"greedy": {"temperature": 0}, "sampled": {"temperature": 1.5, "top_k": 8, "top_p": 0.95}}


QUICK = {
    "prefill": jax.jit(prefill.__wrapped__, static_argnames="graphdef"),
    "write": jax.jit(write.__wrapped__, static_argnames=("graphdef", "piece_length")),
}


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    for name, function in QUICK.items():
        monkeypatch.setattr(module, name, function)


def keys_of(*seeds: int) -> jax.Array:
    return jnp.stack([jax.random.key(seed) for seed in seeds])


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_each_row_is_what_its_prompt_gives_alone(kind):
    """Prompts of unequal length, each also in a batch of one and in the bucket of its own length; over two pieces."""
    tokens, mask = pad_prompts(PROMPTS)
    for rule in RULES.values():
        together = generate(model_of(kind), tokens, 40, mask=mask, key=keys_of(5, 6, 7), **rule)
        assert together.shape == (3, 40)
        assert together.dtype == jnp.int32
        for row, prompt in enumerate(PROMPTS):
            alone = generate(model_of(kind), prompt[None], 40, key=keys_of(5 + row), **rule)
            np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_every_token_follows_from_all_before_it(kind):
    """Greedy, and drawn with fold_in(fold_in(key, row), t): by the logits of the whole text in one call."""
    tokens, mask = pad_prompts(PROMPTS)
    graphdef, state = nnx.split(model_of(kind))
    whole = jax.jit(lambda tokens: nnx.merge(graphdef, state)(tokens))
    key = jax.random.key(3)
    for rule in RULES.values():
        written = np.asarray(generate(model_of(kind), tokens, 34, mask=mask, key=key, **rule))
        texts = [np.concatenate([prompt, written[row]]) for row, prompt in enumerate(PROMPTS)]
        logits = whole(np.stack([np.pad(text, (0, 40 - len(text))) for text in texts]))
        for row, prompt in enumerate(PROMPTS):
            before = logits[row, len(prompt) - 1 : len(prompt) + 33]
            np.testing.assert_array_equal(written[row], draws_of(jax.random.fold_in(key, row), before, sampling(**rule)))


@jax.jit
def draws_of(row_key, logits, how):
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(row_key, jnp.arange(len(logits)))
    return jax.vmap(sample, in_axes=(0, 0, None))(keys, logits, how)


def test_pieces_change_nothing():
    model, key = model_of("linear"), jax.random.key(1)
    tokens, mask = pad_prompts(PROMPTS)
    pieces = list(stream(model, tokens, 33, mask=mask, key=key, piece_length=13))
    assert [piece.shape for piece in pieces] == [(3, 13), (3, 13), (3, 7)]
    expected = generate(model, tokens, 40, mask=mask, key=key)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), expected[:, :33])
    assert generate(model, tokens, 0, mask=mask, key=key).shape == (3, 0)


def test_one_compilation_for_any_length_and_sampling(monkeypatch):
    """A prompt in another bucket compiles its prefill, and nothing else."""
    monkeypatch.setattr(module, "prefill", prefill)
    monkeypatch.setattr(module, "write", write)
    model, key = model_of("hedgehog"), jax.random.key(0)  # of one layer

    def run(prompt_length, length, **rule):
        return generate(model, np.ones((3, prompt_length), np.int32), length, key=key, **rule)

    run(8, 3)
    assert count_compilations(run, 5, 70) == 0
    for rule in [{"temperature": 0}, {"temperature": 0.3}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 2, "top_p": 1.0}]:
        assert count_compilations(functools.partial(run, 7, 2, **rule)) == 0
    assert count_compilations(run, 11, 2) == 1


def test_generation_leaves_the_model_alone():
    """Also one that holds a cache."""
    model = nnx.clone(model_of("linear"))
    model.init_cache(2, 1)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    tokens = np.ones((3, 8), np.int32)
    first = generate(model, tokens, 7, key=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), before)
    np.testing.assert_array_equal(first, generate(model_of("linear"), tokens, 7, key=jax.random.key(0)))
    assert not np.array_equal(first, generate(model, tokens, 7, key=jax.random.key(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_carried_does_not_grow(kind):
    """After a prompt of 4 tokens, of 100,000, and after a piece more: the same shapes, so the same program goes on."""
    graphdef, cache, rest = with_empty_cache(model_of(kind), 3, capacity=64)

    def shapes_after(length):
        tokens, mask = (jax.ShapeDtypeStruct((3, length), dtype) for dtype in (jnp.int32, jnp.bool_))
        return jax.eval_shape(functools.partial(prefill, graphdef), rest, cache, tokens, mask)

    carry = shapes_after(4)
    advance = functools.partial(write, graphdef, piece_length=2)
    after, _ = jax.eval_shape(advance, rest, carry, keys_of(0, 1, 2), sampling())
    assert jax.tree.leaves(after) == jax.tree.leaves(carry)
    assert jax.tree.structure(after) == jax.tree.structure(carry)
    if kind != "softmax":  # whose cache has an end
        assert jax.tree.leaves(shapes_after(100_000)) == jax.tree.leaves(carry)
        _, other, _ = with_empty_cache(model_of(kind), 3, capacity=100_000)
        assert [leaf.shape for leaf in jax.tree.leaves(other)] == [leaf.shape for leaf in jax.tree.leaves(cache)]


# --- text -------------------------------------------------------------------------------------------------------------

VOCABULARY = Vocabulary("\n abcdefghi")
TEXTS = ["abcab", "c", "hi"]


def test_texts():
    """Prompt i is written on with seed + i."""
    model = model_of("linear")
    together = continue_texts(model, VOCABULARY, TEXTS, 35, temperature=0.9, seed=4)
    assert [len(text) for text in together] == [35] * 3
    for row, prompt in enumerate(TEXTS):
        assert continue_texts(model, VOCABULARY, [prompt], 35, temperature=0.9, seed=4 + row) == [together[row]]
    pieces = list(stream_texts(model, VOCABULARY, TEXTS, 35, temperature=0.9, seed=4))
    assert len(pieces) == 2
    assert [first + second for first, second in zip(*pieces, strict=True)] == together
    assert continue_texts(model, VOCABULARY, TEXTS, 0) == [""] * 3


@functools.cache
def script() -> dict:
    """The globals of scripts/generate.py, with a tiny model as the checkpoint; once, as it defines flags."""
    module = runpy.run_path(str(SCRIPT))["main"].__globals__
    module["load_model"] = lambda _: (model_of("linear"), VOCABULARY)
    return module


def run_script(*arguments: str) -> None:
    module = script()
    with flagsaver.flagsaver():
        module["main"](flags.FLAGS(["generate.py", *arguments]))


def test_the_script_streams(monkeypatch):
    expected = "abc" + continue_texts(model_of("linear"), VOCABULARY, ["abc"], 70, top_k=5, seed=2)[0] + "\n"
    shown = io.StringIO()
    flushed = []
    monkeypatch.setattr(shown, "flush", lambda: flushed.append(len(shown.getvalue())))
    monkeypatch.setattr(sys, "stdout", shown)
    run_script("--prompt=abc", "--length=70", "--top_k=5", "--seed=2")
    assert shown.getvalue() == expected
    assert flushed == [3, 3 + 32, 3 + 64, 3 + 70, 3 + 70 + 1]


def test_the_script_with_several_prompts(capsys):
    run_script(*(f"--prompt={prompt}" for prompt in TEXTS), "--length=35", "--seed=1", "--temperature=0")
    shown = capsys.readouterr().out
    texts = continue_texts(model_of("linear"), VOCABULARY, TEXTS, 35, temperature=0)
    for row, (prompt, text) in enumerate(zip(TEXTS, texts, strict=True)):
        assert f"--- {row + 1} of 3 ---\n{prompt}{text}\n" in shown


def test_the_script_without_length(capsys):
    run_script("--prompt=abc", "--length=0")
    assert capsys.readouterr().out == "abc\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=abü"], "error: text holds characters that the vocabulary lacks: 'ü'"),
        (["--prompt="], "error: prompts must be at least one, and none of them empty"),
        (["--length=-1"], "error: length must be a whole number, at least 0, got -1"),
        (["--top_k=0"], "error: top_k must be a positive whole number or None, got 0"),
        (["--top_p=1.5"], "error: top_p must be above 0 and at most 1, or None, got 1.5"),
        (["--temperature=-1"], "error: temperature must be at least 0 and a finite float32, got -1.0"),
    ],
)
def test_the_script_says_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        run_script("--prompt=abc", *arguments)
    assert str(exit.value).startswith(message)
    assert "\n" not in str(exit.value)
    assert capsys.readouterr().out == ""


def test_the_script_is_interrupted(monkeypatch, capsys):
    def interrupted(*_, **__):
        yield ["ab"]
        raise KeyboardInterrupt

    monkeypatch.setitem(script(), "stream_texts", interrupted)
    with pytest.raises(SystemExit) as exit:
        run_script("--prompt=abc")
    assert exit.value.code == 130
    assert capsys.readouterr() == ("abcab\n", "")


def test_the_script_ends_when_nobody_reads_on(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        run_script("--prompt=abc", "--length=5")


def test_errors():
    model, tokens, key = model_of("linear"), jnp.ones((2, 3), jnp.int32), jax.random.key(0)
    pads_right = np.array([[True, True, True], [True, True, False]])
    for arguments, message in [
        ({"key": None}, "key must be a PRNG key unless temperature is 0, got None"),
        ({"key": jax.random.split(key, 3)}, r"key must be a PRNG key, .* or an array of them \[B\] = \(2,\), got"),
        ({"key": 0}, "key must be a PRNG key, as jax.random.key makes it.* got int"),
        ({"prompts": tokens[:, :0]}, r"prompts must be an integer array \[B >= 1, T >= 1\], got int32 \(2, 0\)"),
        ({"prompts": tokens[0]}, r"prompts must be an integer array .* got int32 \(3,\)"),
        ({"prompts": tokens * 1.0}, r"prompts must be an integer array .* got float32 \(2, 3\)"),
        ({"prompts": tokens * 11}, "prompts must be tokens from 0 to 10, got numbers from 11 to 11"),
        ({"prompts": tokens * -1}, "prompts must be tokens from 0 to 10, got numbers from -1 to -1"),
        ({"length": -1}, "length must be a whole number, at least 0, got -1"),
        ({"length": 2.0}, "length must be a whole number, at least 0, got 2.0"),
        ({"mask": np.ones((2, 3))}, "mask must be bool"),
        ({"mask": pads_right}, "mask must be True for each prompt's last token: pads stand on the left"),
        ({"temperature": -1}, "temperature must be at least 0 and a finite float32, got -1"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and a finite float32, got nan"),
        ({"top_k": 0}, "top_k must be a positive whole number or None, got 0"),
        ({"top_k": 2.0}, "top_k must be a positive whole number or None, got 2.0"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, or None, got 0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, or None, got 1.01"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, **{"prompts": tokens, "length": 2, "key": key, **arguments})
    with pytest.raises(ValueError, match="piece_length must be at least 1, got 0"):
        stream(model, tokens, 2, key=key, piece_length=0)
    with pytest.raises(ValueError, match="none of them empty"):
        pad_prompts([np.array([1]), np.array([], int)])
