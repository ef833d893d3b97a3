"""What README and docstrings show runs as shown."""

import doctest
import re
from pathlib import Path

import pytest

import jax_linattn.attention
import jax_linattn.feature_maps

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    namespace = {}
    for block in blocks:  # in order: later examples use earlier names
        exec(compile(block, str(README), "exec"), namespace)


def test_the_example_of_the_limits_prints_what_is_told(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "limits.md").read_text(), flags=re.DOTALL)
    exec(compile(block, "docs/limits.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    expected = {"elu_plus_one": ["0.5", "0.5", "0.5", "0.0"], "exp": ["0.5", "nan", "0.5", "0.0"]}
    table = {name: [float(line.split()[-1].strip("[]")) for line in lines if line.startswith(name)] for name in expected}
    assert {name: [str(value) for value in values] for name, values in table.items()} == expected


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_that_the_docs_name_exist(path):
    text = path.read_text()
    named = re.findall(r"(?<![\w/])(?:docs|configs|scripts|tests|jax_linattn)/[\w/]+\.(?:py|md|png)", text)
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
