"""Text, characters, batches and the trigram baseline."""

import itertools
import math

import numpy as np
import pytest

from jax_linattn.lm import data, trigram


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
        (None, "does not exist; give a text file or a folder"),
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


def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.int32)
    how = {"seed": 3, "batch_size": 4, "context": 16}
    batches = data.TrainBatches(tokens, **how)
    first = list(itertools.islice(batches, 3))
    saved = batches.get_state()
    after = next(batches)
    for step, batch in enumerate([*first, after]):
        np.testing.assert_array_equal(batch.inputs, data.batch_at(tokens, step, **how).inputs)
        np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
        assert batch.inputs.shape == (4, 16)
    resumed = data.TrainBatches(tokens, **how)
    resumed.set_state(saved)
    np.testing.assert_array_equal(next(resumed).inputs, after.inputs)
    assert not np.array_equal(first[0].inputs, data.batch_at(tokens, 0, **{**how, "seed": 4}).inputs)
    starts = np.concatenate([data.batch_at(tokens[:18], step, **how).inputs[:, 0] for step in range(20)])
    assert set(starts) == {0, 1}, "every place that a whole sequence fits in, and no other"


@pytest.mark.parametrize("length", [2, 33, 64, 65, 66, 150])
def test_validation_sees_each_target_once(length):
    tokens = np.arange(length, dtype=np.int32)
    seen = []
    for batch, weights in data.validation_batches(tokens, batch_size=4, context=16):
        assert batch.inputs.shape == batch.targets.shape == weights.shape == (4, 16)
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
