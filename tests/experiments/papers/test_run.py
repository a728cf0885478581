"""The figure modules of a family are found, chosen by name and run with the given words."""

import sys
import types

import pytest

from servegym.experiments.papers import run as figures


@pytest.fixture
def two(monkeypatch):
    """Two figures of a family and the record of their runs."""
    calls = []
    found = []
    for name, status in (("good", 0), ("bad", 3)):
        module = types.ModuleType(f"made_up_{name}")
        module.main = lambda argv, name=name, status=status: calls.append((name, argv)) or status
        monkeypatch.setitem(sys.modules, module.__name__, module)
        found.append(figures.Figure(name, module.__name__, f"shows {name}"))
    monkeypatch.setattr(figures, "list_figures", lambda family: found)
    return calls


def test_all_run_in_order_and_failures_are_counted(two):
    lines = []
    assert figures.run_figures("routing", arguments=["--quick"], echo=lines.append) == 1
    assert two == [("good", ["--quick"]), ("bad", ["--quick"])]
    assert "status 3" in lines[-1]


def test_only_the_named_one_runs(two):
    assert figures.run_figures("routing", ["good"], echo=lambda line: None) == 0
    assert two == [("good", [])]


def test_a_wrong_name_stops_before_anything_runs(two):
    with pytest.raises(ValueError, match="Did you mean 'good'"):
        figures.run_figures("routing", ["good", "godo"])
    assert two == []


def test_unknown_family():
    with pytest.raises(ValueError, match="family='rooting'.*'routing'"):
        figures.list_figures("rooting")


def test_every_figure_says_what_it_shows():
    for family in figures.GROUPS:
        for figure in figures.list_figures(family):
            assert figure.description.endswith("."), figure.module
