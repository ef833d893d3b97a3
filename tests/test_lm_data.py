"""Text, characters, batches and the trigram baseline."""

import itertools
import json
import math

import numpy as np
import pytest

from jax_linattn.lm import data, trigram
from jax_linattn.lm.batches import train_batches, validation_batches


def test_the_default_corpus_is_there_and_split():
    corpus = data.load_corpus("", context=128)
    total = len(corpus.train) + len(corpus.validation)
    assert total > 200_000
    assert len(corpus.validation) == int(total * 0.1)
    text = corpus.vocabulary.decode(corpus.train) + corpus.vocabulary.decode(corpus.validation)
    assert text == data.read_corpus()
    assert 1 < trigram.trigram_bits(corpus.train, corpus.validation, corpus.vocabulary.size) < 4


def test_files_and_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes("zwei\r\nüß".encode())
    (tmp_path / "a.md").write_text("one", encoding="utf-8")
    (tmp_path / "deep" / "c.txt").write_bytes(b"\xef\xbb\xbfthree")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert data.read_corpus(str(tmp_path / "b.txt")) == "zwei\nüß"
    assert data.read_corpus(str(tmp_path)) == "one\nzwei\nüß\nthree"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; give a text file or a folder of them"),
        (b"", "holds no text"),
        (b" \n", "holds no text"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"text\x00", "is binary"),
        (b"too short", "has 9 characters, too few for sequences of 128"),
    ],
)
def test_a_corpus_that_will_not_do(tmp_path, content, message):
    path = tmp_path / "corpus"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.load_corpus(str(path), context=128)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"holds no text \(0 file"):
        data.read_corpus(str(tmp_path))


def test_vocabulary():
    vocabulary = data.Vocabulary.of("hello wörld 🙂")
    assert vocabulary.characters == " dehlorwö🙂"
    assert vocabulary.decode(vocabulary.encode("öld🙂")) == "öld🙂"
    assert vocabulary.encode("").shape == (0,)
    with pytest.raises(ValueError, match=r"lacks: 'Zz'; it knows ' dehlor"):
        vocabulary.encode("hzZ")


def starts_of(batches, count: int) -> np.ndarray:
    """Where the sequences of the next batches start, in a text whose tokens are their places."""
    rows = list(itertools.islice(batches, count))
    for batch in rows:
        np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
    return np.stack([batch.inputs[:, 0] for batch in rows])


def test_each_pass_takes_every_window_once_in_a_new_order():
    tokens = np.arange(27, dtype=np.int32)  # 24 places for 3 tokens and a target
    starts = starts_of(train_batches(tokens, seed=3, batch_size=4, context=3), 12).reshape(2, 24)
    np.testing.assert_array_equal(np.sort(starts), [range(24)] * 2)
    assert not np.array_equal(starts[0], starts[1])
    other = starts_of(train_batches(tokens, seed=4, batch_size=4, context=3), 6).ravel()
    assert not np.array_equal(starts[0], other)


@pytest.mark.parametrize("batch_size", [1, 2, 30])
def test_batches_of_one_and_of_more_than_there_are_windows(batch_size):
    batches = train_batches(np.arange(27, dtype=np.int32), seed=3, batch_size=batch_size, context=16)
    assert starts_of(batches, 3).shape == (3, batch_size)


def test_a_position_is_continued_also_by_other_numbers_of_processes():
    how = {"tokens": np.arange(100, dtype=np.int32), "seed": 3, "batch_size": 4, "context": 16}
    batches = train_batches(**how)
    starts_of(batches, 30)  # into the second pass
    saved = json.loads(json.dumps(batches.get_state()))
    expected = starts_of(batches, 5)
    resumed = train_batches(**how)
    resumed.set_state(saved)
    np.testing.assert_array_equal(starts_of(resumed, 5), expected)
    shares = [train_batches(**how, process=(number, 2)) for number in range(2)]
    for share in shares:
        starts_of(share, 30)
        assert share.get_state() == saved
        share.set_state(saved)
    first, second = (starts_of(share, 5) for share in shares)
    assert first.shape == (5, 2)
    np.testing.assert_array_equal(np.sort(np.concatenate([first, second], axis=1)), np.sort(expected))


@pytest.mark.parametrize("length", [2, 33, 64, 65, 66, 150])
def test_validation_sees_each_target_once(length):
    tokens = np.arange(length, dtype=np.int32)
    seen = []
    shares = [validation_batches(tokens, batch_size=4, context=16, process=(number, 2)) for number in range(2)]
    for batch, weights in itertools.chain.from_iterable(zip(*shares, strict=True)):
        assert batch.inputs.shape == batch.targets.shape == weights.shape == (2, 16)
        real = weights > 0
        np.testing.assert_array_equal(batch.targets[real], batch.inputs[real] + 1)
        seen.extend(batch.targets[real])
    np.testing.assert_array_equal(seen, np.arange(1, length))


def test_trigram_by_hand():
    """Trained on "abab", V = 3, α = (1, 2, 4), for c after "ab" and "ba":

    p₁ = (2 + 1/3) / 5 for a and b; p₂(a | b) = (1 + 2 p₁) / (1 + 2), p₂(b | a) = (2 + 2 p₁) / (2 + 2);
    p₃(a | a, b) = (1 + 4 p₂) / (1 + 4), p₃(b | b, a) = (1 + 4 p₂) / (1 + 4).
    """
    train, asked = np.array([0, 1, 0, 1]), np.array([0, 1, 0, 1])
    p1 = (2 + 1 / 3) / 5
    after_ab = (1 + 4 * (1 + 2 * p1) / 3) / 5
    after_ba = (1 + 4 * (2 + 2 * p1) / 4) / 5
    strengths = (1.0, 2.0, 4.0)
    np.testing.assert_allclose(
        trigram.probabilities(trigram.count(train, asked, 3), strengths, 3), [after_ab, after_ba], rtol=1e-12
    )


def test_trigram_is_a_distribution_and_learns():
    rng = np.random.default_rng(0)
    train, size = rng.integers(0, 5, 500), 6
    for a, b in [(0, 1), (4, 4), (5, 0), (5, 5)]:
        contexts = [trigram.count(train, np.array([a, b, c]), size) for c in range(size)]
        total = sum(trigram.probabilities(counts, (1.0, 8.0, 2.0), size).item() for counts in contexts)
        assert math.isclose(total, 1, rel_tol=1e-12)
    cycle = np.arange(600) % 6
    assert trigram.trigram_bits(cycle[:540], cycle[540:], 6) < 0.05
    noise = rng.integers(0, 4, 20_000)
    assert abs(trigram.trigram_bits(noise[:18_000], noise[18_000:], 4) - 2) < 0.02
