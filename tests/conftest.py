"""The world the tests run in: one CPU that plays eight devices, and jax at its strictest."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, max_examples=15, print_blob=False
)
hypothesis.settings.load_profile("suite")

# Flax and optax promote dtypes and ranks inside; what is tested there is not ours to be strict about.
FLAX_FILES = ("test_linen", "test_nnx", "test_attention_fn", "test_lm", "test_readme", "test_package")


@pytest.fixture(autouse=True)
def strict(request):
    """No implicit promotion of dtypes or ranks in the functions under test."""
    if request.path.name.startswith(FLAX_FILES):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
