"""How close is close: one function of dtype and length, and the one comparison that all tests use."""

import numpy as np

# Relative root mean square error: (values, gradients).
BASE = {
    "float64": (1e-12, 1e-12),
    "float32": (2e-6, 2e-6),
    "bfloat16": (4e-3, 8e-3),
    "float16": (5e-4, 1e-3),
}


def tolerance(dtype, length: int = 1, *, gradient: bool = False) -> float:
    """The largest relative RMS error allowed over `length` tokens.

    Rounding errors of a sum behave as a random walk, so from 1,024 tokens on the bound grows with the root of the length.
    """
    return BASE[str(np.dtype(dtype))][int(gradient)] * max(1.0, length / 1024) ** 0.5


def relative_rms(actual, expected, floor: float = 0.0) -> float:
    """RMS of the difference over RMS of `expected`, or over `floor` where that is larger."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    if actual.size == 0 or np.array_equal(actual, expected):
        return 0.0
    difference, size = (np.sqrt(np.mean(np.square(x))) for x in (actual - expected, expected))
    return float(difference / max(size, floor)) if max(size, floor) > 0 else float("inf")


def assert_close(actual, expected, dtype=None, length: int = 1, *, gradient: bool = False, floor: float = 0.0, what=""):
    """Fails where the error is above `tolerance`, or not a number. `floor` is for results that are 0 but for rounding."""
    error = relative_rms(actual, expected, floor)
    allowed = tolerance(actual.dtype if dtype is None else dtype, length, gradient=gradient)
    assert error <= allowed, f"{what}: relative RMS error {error:.3g} above {allowed:.3g}"
