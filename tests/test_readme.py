"""What README and docstrings show runs as shown."""

import doctest
import re
from pathlib import Path

import pytest

import jax_linattn.attention
import jax_linattn.feature_maps

README = Path(__file__).parent.parent / "README.md"


def test_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    namespace = {}
    for block in blocks:  # in order: later examples use earlier names
        exec(compile(block, str(README), "exec"), namespace)


def test_first_example_is_ten_lines():
    first = re.search(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL).group(1)
    assert len(first.splitlines()) == 10


@pytest.mark.parametrize("module", [jax_linattn.attention, jax_linattn.feature_maps], ids=lambda m: m.__name__)
def test_docstring_examples(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_contributing_names_files_that_exist():
    text = (README.parent / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:forms|tests)/\w+\.py|\w+\.py)`", text):
        assert (README.parent / name).exists() or (README.parent / "jax_linattn" / name).exists(), name
