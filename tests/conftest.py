"""The world the tests run in: one CPU that plays eight devices, and jax at its strictest."""

import gc
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compilation is most of the suite's time, and most of that is spent on fast machine code, which what is tested does not
# need. Programs that are equal are compiled once for all tests and processes.
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def known(*flags: str) -> bool:
    """Whether this version of jax has the flags: it ends the process over one that it has not."""
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # else this is a process of the tests'
    quick = QUICK if known(*QUICK) else filter(known, QUICK)
    flags = ["--xla_force_host_platform_device_count=8", *quick]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="jax_linattn-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, max_examples=10, print_blob=False
)
hypothesis.settings.load_profile("suite")

gc.set_threshold(200_000, 20, 100)  # what jax traces and keeps is much, and little of it is ever garbage

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
