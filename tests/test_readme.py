"""What README and docstrings show runs as shown."""

import doctest
import re
from pathlib import Path

import jax
import pytest

import jax_linattn.attention
import jax_linattn.feature_maps
import jax_linattn.layers

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def quick():
    """Compilation is nearly all of what the examples take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("path", [README, ROOT / "docs" / "layers.md"], ids=lambda path: path.name)
def test_examples_run(path):
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    namespace = {"__name__": path.name}  # Linen looks for the module of a class
    for block in blocks:  # in order: later examples use earlier names
        exec(compile(block, str(path), "exec"), namespace)


def test_every_layer_is_in_the_docs():
    for path in (README, ROOT / "docs" / "layers.md"):
        rows = [line for line in path.read_text().splitlines() if line.startswith("|")]
        layers = set(jax_linattn.layers.__all__) - {"ShortConvolution"}
        assert {name for name in layers if not any(f"`{name}`" in row for row in rows)} == set(), path.name


def test_the_example_of_the_limits_prints_what_is_told(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "limits.md").read_text(), flags=re.DOTALL)
    exec(compile(block, "docs/limits.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    expected = {"elu_plus_one": ["0.5", "0.5", "0.5", "0.0"], "exp": ["0.5", "0.5", "0.5", "0.5"]}
    table = {name: [float(line.split()[-1].strip("[]")) for line in lines if line.startswith(name)] for name in expected}
    assert {name: [str(value) for value in values] for name, values in table.items()} == expected


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_that_the_docs_name_exist(path):
    text = path.read_text()
    named = re.findall(r"(?<![\w/])(?:docs|configs|scripts|tests|tests_interop|jax_linattn)/[\w/]+\.(?:py|md|png)", text)
    linked = [str(path.parent.relative_to(ROOT) / link) for link in re.findall(r"\]\(([\w./]+)\)", text)]
    assert [name for name in named + linked if not (ROOT / name).exists()] == []


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
