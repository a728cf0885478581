"""The command line and the saved results that all figure scripts share."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from servegym.experiments.figures.script import (  # noqa: E402
    FigureOptions,
    command_line,
    errors,
    figure_parser,
    pyplot,
    run_chosen,
    save,
)
from servegym.experiments.output import read_rows  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402


def parse(tmp_path: Path, *words: str) -> FigureOptions:
    parser = figure_parser(("a", "b"), "What it shows.\n\nMore.", "pkg.script", 20, tmp_path / "o")
    return command_line(parser, list(words), FigureOptions())


def test_defaults_and_smoke_runs(tmp_path: Path) -> None:
    options = parse(tmp_path)
    assert (options.episodes, options.quick, options.figure) == (20, False, ("a", "b"))
    assert options.out.is_dir()
    assert options.command == "python -m pkg.script"
    assert parse(tmp_path, "--quick").episodes == 2
    assert parse(tmp_path, "--quick", "--episodes", "5").episodes == 5


def test_no_episode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="episodes is 0; allowed is 1 or more"):
        parse(tmp_path, "--episodes", "0")
    assert not (tmp_path / "o").exists()


def test_only_the_named_figures_run(tmp_path: Path) -> None:
    made = []
    figures = {"a": lambda options: made.append("a"), "b": lambda options: made.append("b")}
    assert run_chosen(figures, parse(tmp_path, "--figure", "b")) == 0
    assert made == ["b"]


def test_a_result_is_a_table_a_picture_and_its_record(tmp_path: Path) -> None:
    options = parse(tmp_path, "--quick", "--figure", "a")
    figure, axis = pyplot().subplots()
    axis.plot([1, 2])
    rows = [{"x": 1, "y": 0.5}, {"x": 2, "y": 0.25}]
    save(options, "one", rows, figure, "y falls", settings={"data": "mine"})
    assert [row["y"] for row in read_rows(options.out / "one.csv")] == [0.5, 0.25]
    assert (options.out / "one.png").read_bytes().startswith(b"\x89PNG")
    record = read_record(options.out / "one.csv")
    assert record["command"] == "python -m pkg.script --quick --figure a"
    assert record["quick"] and record["settings"] == {"data": "mine"}
    assert record["notes"] == [{"text": "y falls"}]
    save(options, "two", rows, None)
    assert not (options.out / "two.png").exists()


def test_bars_are_never_negative() -> None:
    rows = [
        {"v": 2.0, "v_low": 1.5, "v_high": 2.25},
        {"v": 1.0, "v_low": 1.125, "v_high": 1.25},  # a percentile interval may miss its estimate
    ]
    values, bars = errors(rows, "v", 10.0)
    assert values.tolist() == [20.0, 10.0]
    assert bars.tolist() == [[5.0, 0.0], [2.5, 2.5]]
