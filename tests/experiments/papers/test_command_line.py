"""The command line, tables and pictures that all figure modules share."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from servegym.experiments.evaluation.output import read_rows, write_csv  # noqa: E402
from servegym.experiments.evaluation.tables import read_record  # noqa: E402
from servegym.experiments.papers import run  # noqa: E402
from servegym.experiments.papers.plotting import error_bars, pyplot  # noqa: E402
from servegym.experiments.papers.run import (  # noqa: E402
    FigureOptions,
    Picture,
    command_line,
    figure_parser,
    run_chosen,
    save,
)


def parse(tmp_path: Path, *words: str) -> FigureOptions:
    parser = figure_parser(("a", "b"), "What it shows.\n\nMore.", "pkg.group.module", 20)
    return command_line(parser, ["--out", str(tmp_path / "o"), *words], FigureOptions())


def test_defaults_and_smoke_runs(tmp_path: Path) -> None:
    options = parse(tmp_path)
    assert (options.episodes, options.quick, options.figure) == (20, False, ("a", "b"))
    assert options.out.is_dir()
    assert options.command == f"python -m pkg.group.module --out {tmp_path / 'o'}"
    assert options.group == "group"
    assert parse(tmp_path, "--quick").episodes == 2
    assert parse(tmp_path, "--quick", "--episodes", "5").episodes == 5


def test_no_episode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="episodes is 0; allowed is 1 or more"):
        parse(tmp_path, "--episodes", "0")
    assert not (tmp_path / "o").exists()


def test_only_the_named_figures_run(tmp_path: Path) -> None:
    made = []
    figures = {"a": lambda options: made.append("a"), "b": lambda options: made.append("b")}
    assert run_chosen(figures, {}, parse(tmp_path, "--figure", "b")) == 0
    assert made == ["b"]


def line(rows):
    figure, axis = pyplot().subplots()
    axis.plot([row["x"] for row in rows])
    return figure


def test_a_figure_is_measured_and_its_table_is_drawn(tmp_path: Path) -> None:
    drawn = []
    pictures = {
        "one": lambda rows: drawn.append(rows) or line(rows),
        "both": Picture(lambda one, two: line([*one, *two]), ("one", "two")),
    }
    figures = {
        "a": lambda options: save(options, "one", [{"x": 1, "y": True}], "y", settings={"z": 2}),
        "b": lambda options: save(options, "two", [{"x": 2}]),
    }
    options = parse(tmp_path, "--quick", "--figure", "a")
    assert run_chosen(figures, pictures, options) == 0
    assert drawn == [read_rows(options.out / "one.csv")] == [[{"x": 1, "y": True}]]
    record = read_record(options.out / "one.csv")
    assert record["command"] == options.command and record["quick"]
    assert record["settings"] == {"z": 2} and record["notes"] == [{"text": "y"}]
    names = {path.name for path in options.out.iterdir()}
    assert names == {"one.csv", "one.json", "one.png"}
    assert (options.out / "one.png").read_bytes().startswith(b"\x89PNG")
    assert run_chosen(figures, pictures, parse(tmp_path, "--figure", "b")) == 0
    assert len(drawn) == 1 and (options.out / "both.png").exists()


def test_pictures_are_drawn_without_measuring(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    (tmp_path / "group").mkdir()
    write_csv(tmp_path / "group" / "one.csv", [{"x": 1}])
    options = parse(tmp_path, "--draw")
    assert run_chosen({"a": None}, {"one": line, "two": line}, options) == 0
    assert [path.name for path in options.out.iterdir()] == ["one.png"]


def test_bars_are_never_negative() -> None:
    rows = [
        {"v": 2.0, "v_low": 1.5, "v_high": 2.25},
        {"v": 1.0, "v_low": 1.125, "v_high": 1.25},  # a percentile interval may miss its estimate
    ]
    values, bars = error_bars(rows, "v", 10.0)
    assert values.tolist() == [20.0, 10.0]
    assert bars.tolist() == [[5.0, 0.0], [2.5, 2.5]]
