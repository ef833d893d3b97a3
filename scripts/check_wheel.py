"""Builds the wheel, installs it into an empty folder, and uses it from there, outside the checkout."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USE = """
import jax, jax.numpy as jnp, jax_linattn, pathlib, sys
assert pathlib.Path(jax_linattn.__file__).is_relative_to(sys.argv[1]), jax_linattn.__file__
assert "flax" not in sys.modules
x = jnp.ones((1, 70, 2, 8))
assert jnp.allclose(jax_linattn.linear_attention(x, x, x, is_causal=True), 1)
import jax_linattn.linen, jax_linattn.nnx, jax_linattn.lm.model
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = lambda *command, **how: subprocess.run([sys.executable, *command], check=True, cwd=folder, **how)
        run("-m", "build", "--wheel", "--outdir", folder, str(ROOT), stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert "jax_linattn/py.typed" in names, names
        assert not any(name.startswith(("tests/", "scripts/", "configs/")) for name in names), names
        target = Path(folder) / "installed"
        run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
        run("-c", USE, str(target), env=os.environ | {"PYTHONPATH": str(target)})
        print(f"{wheel.name}: {len(names)} files, works outside the checkout")


if __name__ == "__main__":
    main()
