"""Every form agrees with the loop oracle: values, the final state, and the gradient of each argument by itself.

Field cases 10 (scale), 11 and 13 (the normaliser's axes), 12 (the gradient of k through it), 29, 30, 35, 36 (the initial
state and its gradient), 49 (T ≠ S), 50 (dims of 1, D ≠ E).
"""

import pytest
from cases import BIDIRECTIONAL_CASES, BIDIRECTIONAL_FORMS, CAUSAL_CASES, CAUSAL_FORMS, ONE_OF_EACH, expected
from harness import results_and_gradients, x64
from tolerance import assert_close

RESULTS = ("output", "kv", "key_sum")
ARGUMENTS = ("query", "key", "value", "kv", "key_sum")


# One of each form everywhere; other chunk sizes where most is going on, since compiling takes the time.
MOST = ("everything", "masked", "segments")


def _all(cases, every_form, some_forms):
    return [
        pytest.param(case, form, id=f"{case}-{form}")
        for case in cases
        for form in every_form
        if form in some_forms or case.name.split("_", 1)[1] in MOST
    ]


@pytest.mark.parametrize(("case", "form"), _all(CAUSAL_CASES, CAUSAL_FORMS, ONE_OF_EACH))
def test_causal(case, form):
    _check(case, form)


@pytest.mark.parametrize(("case", "form"), _all(BIDIRECTIONAL_CASES, BIDIRECTIONAL_FORMS, BIDIRECTIONAL_FORMS[:2]))
def test_bidirectional(case, form):
    _check(case, form)


def _check(case, form):
    with x64():
        results, gradients = results_and_gradients(case, form)
    want_results, want_gradients = expected(case)
    for name, got, want in zip(RESULTS, results, want_results, strict=False):
        assert_close(got, want, what=name)
    for name, got, want in zip(ARGUMENTS, gradients, want_gradients, strict=False):
        assert_close(got, want, gradient=True, what=f"gradient of {name}")
