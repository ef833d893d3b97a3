"""The frame of `scripts/reproduce`: a figure outside its tolerance is seen, and fails the command."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts" / "reproduce"


@pytest.fixture
def report(monkeypatch):
    spec = importlib.util.spec_from_file_location("report", SCRIPTS / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["reproduce", "--quick", "--seed=3"])
    return module


def status_of(report, reproduce) -> int:
    with pytest.raises(SystemExit) as exit_:
        report.run(reproduce, "A title.\n\nMore.")
    return int(exit_.value.code)


def test_figures_within_their_tolerance_pass(report, capsys):
    def reproduce(options, out):
        assert (options.quick, options.seed) == (True, 3)
        out.section("some figures")
        out.compare("a length", 1.05, 1.0, within=0.051)
        out.expect("an order", "a > b", "a > b", True)
        out.note("for the record")

    assert status_of(report, reproduce) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A title.\njax ")
    assert "0 outside their tolerance: none" in printed
    assert "OUTSIDE" not in printed


@pytest.mark.parametrize("ours", [1.06, 0.94, float("nan"), float("inf")])
def test_a_figure_outside_fails(report, capsys, ours):
    assert status_of(report, lambda options, out: out.compare("a length", ours, 1.0, within=0.051)) == 1
    assert "1 outside their tolerance: a length" in capsys.readouterr().out


def test_an_order_that_does_not_hold_fails(report, capsys):
    assert status_of(report, lambda options, out: out.expect("an order", "b > a", "a > b", False)) == 1
    assert "OUTSIDE" in capsys.readouterr().out
