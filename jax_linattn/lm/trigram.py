"""The baseline that a model must beat: a smoothed character trigram, counted and tuned on the training text alone."""

import itertools
from typing import NamedTuple

import numpy as np

TUNING_FRACTION = 0.1  # of the training tokens, at their end: held out of the counts to choose the strengths
STRENGTHS = tuple((1.0, 2.0**i, 2.0**j) for i, j in itertools.product(range(0, 13), range(-2, 9)))


class Counts(NamedTuple):
    """How often training text holds what is asked, one number a token that is to be predicted."""

    total: int  # n
    c: np.ndarray  # n(c)
    b: np.ndarray  # n(b), where a token follows
    bc: np.ndarray  # n(b c)
    ab: np.ndarray  # n(a b), where a token follows
    abc: np.ndarray  # n(a b c)


def count(train: np.ndarray, tokens: np.ndarray, vocabulary_size: int) -> Counts:
    """Counts in `train` of each token of `tokens` but the first two, c, after its two predecessors, a and b."""
    seen, asked = _grams(train, vocabulary_size), _grams(tokens, vocabulary_size)
    return Counts(
        total=len(train),
        c=_occurrences(seen[0], asked[0][2:]),
        b=_occurrences(seen[0][:-1], asked[0][1:-1]),
        bc=_occurrences(seen[1], asked[1][1:]),
        ab=_occurrences(seen[1][:-1], asked[1][:-1]),
        abc=_occurrences(seen[2], asked[2]),
    )


def _grams(tokens: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One number a token, a pair and a triple."""
    tokens = tokens.astype(np.int64)
    pairs = tokens[:-1] * size + tokens[1:]
    return tokens, pairs, pairs[:-1] * size + tokens[2:]


def _occurrences(seen: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """How often each of `asked` is in `seen`. By sorting, so that a large vocabulary needs no table of its cube."""
    values, counts = np.unique(seen, return_counts=True)
    place = np.minimum(np.searchsorted(values, asked), len(values) - 1)
    return np.where(values[place] == asked, counts[place], 0)


def probabilities(counts: Counts, strengths: tuple[float, float, float], vocabulary_size: int) -> np.ndarray:
    """p(c | a, b), every order smoothed by the one below it, float64:

        p₁(c)        = (n(c)     + α₁ / V)        / (n      + α₁)
        p₂(c | b)    = (n(b c)   + α₂ p₁(c))      / (n(b)   + α₂)
        p₃(c | a, b) = (n(a b c) + α₃ p₂(c | b))  / (n(a b) + α₃)

    Interpolation with weights that grow with what a context has seen: MacKay and Peto 1995, "A hierarchical Dirichlet
    language model".
    """
    alpha_1, alpha_2, alpha_3 = strengths
    p = (counts.c + alpha_1 / vocabulary_size) / (counts.total + alpha_1)
    p = (counts.bc + alpha_2 * p) / (counts.b + alpha_2)
    return (counts.abc + alpha_3 * p) / (counts.ab + alpha_3)


def tune(train: np.ndarray, vocabulary_size: int) -> tuple[float, float, float]:
    """The strengths α with the fewest bits on the last tenth of `train`, when the rest is counted."""
    split = len(train) - max(3, int(len(train) * TUNING_FRACTION))
    counts = count(train[:split], train[split:], vocabulary_size)
    return min(STRENGTHS, key=lambda strengths: _bits(probabilities(counts, strengths, vocabulary_size)))


def trigram_bits(train: np.ndarray, validation: np.ndarray, vocabulary_size: int) -> float:
    """Bits a character of the tuned trigram on all validation tokens but the first, each with its two predecessors.

    Args:
      train: int [n], n >= 6.
      validation: int [m], the text after it, m >= 2.
      vocabulary_size: V.
    """
    tokens = np.concatenate([train[-1:], validation])
    return _bits(probabilities(count(train, tokens, vocabulary_size), tune(train, vocabulary_size), vocabulary_size))


def _bits(p: np.ndarray) -> float:
    return float(-np.mean(np.log2(p)))
