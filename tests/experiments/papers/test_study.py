"""Studies: their command line, tables and pictures, and how a family's modules are run."""

import types
from pathlib import Path

import pytest

from servegym.envs.families import FAMILIES
from servegym.experiments.evaluation.output import read_rows, write_csv
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers import study
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.study import Study, command

PNG = b"\x89PNG\r\n\x1a\n"


def squares(options, at, policies):
    return [{**at, "policy": name, "y": at["x"] ** 2, "_twice": 2 * at["x"]} for name in policies]


ONE = Study(
    "one",
    "a",
    squares,
    lambda options: [{"x": x} for x in study.ends(options, (1, 2, 3))],
    lambda options, at: ("p", "q"),
    lambda options, rows: [f"{sum(row['_twice'] for row in rows)} in all"],
    Lines(x="x", y="y", line="policy"),
    beside={"rest": lambda rows: [{"z": row["_twice"]} for row in rows[:1]]},
    facts=lambda options: {"episodes": options.episodes},
)
TWO = Study("two", "b", squares, lambda options: [{"x": 4}], ("p",))
BOTH = Study(
    "both",
    "c",
    lambda *given: [],
    picture=lambda one, two: Bars(x="x", y="y")([*one, *two]),
    drawn=("one", "two"),
)


def run(tmp_path, *words, studies=(ONE, TWO, BOTH), **more):
    main = command("pkg.group.module", "What it shows.\n\nMore.", studies, 20, **more)
    assert main(["--out", str(tmp_path / "o"), *words]) == 0
    return tmp_path / "o"


def test_a_study_is_measured_written_and_drawn(tmp_path: Path) -> None:
    out = run(tmp_path, "--quick", "--figure", "a")
    assert read_rows(out / "one.csv") == [
        {"x": x, "policy": name, "y": x * x} for x in (1, 3) for name in ("p", "q")
    ]
    assert read_rows(out / "rest.csv") == [{"z": 2}]
    record = read_record(out / "one.csv")
    assert record["command"] == f"python -m pkg.group.module --out {out} --quick --figure a"
    assert record["quick"] and record["settings"] == {"episodes": 2}
    assert record["notes"] == [{"text": "16 in all"}]
    names = {f"{stem}.{end}" for stem in ("one", "rest") for end in ("csv", "json")}
    assert {path.name for path in out.iterdir()} == names | {"one.png"}
    assert (out / "one.png").read_bytes().startswith(PNG)


def test_a_picture_of_two_tables_waits_for_both_and_no_rows_are_no_table(tmp_path: Path) -> None:
    out = run(tmp_path, "--quick")
    assert (out / "both.png").exists() and not (out / "both.csv").exists()


def test_pictures_are_drawn_without_measuring(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    (tmp_path / "group").mkdir()
    write_csv(tmp_path / "group" / "one.csv", [{"x": 1, "policy": "p", "y": 2}])
    prepared = []
    out = run(tmp_path, "--draw", prepare=prepared.append)
    assert [path.name for path in out.iterdir()] == ["one.png"] and not prepared


@pytest.fixture
def two(monkeypatch):
    """Two modules of a family and the record of their runs."""
    calls = []
    found = {name: types.ModuleType(name, f"shows {name}") for name in ("good", "bad")}
    found["good"].main = lambda argv: calls.append(("good", argv))
    found["bad"].main = lambda argv: calls.append(("bad", argv))
    monkeypatch.setattr(study, "list_modules", lambda family: found)
    return calls


def test_all_modules_run_in_order(two):
    study.run_modules("routing", arguments=["--quick"])
    assert two == [("good", ["--quick"]), ("bad", ["--quick"])]
    study.run_modules("routing", ["good"])
    assert two[2:] == [("good", [])]


def test_every_module_says_what_it_shows_and_every_table_is_made_once():
    with pytest.raises(ValueError, match="family='rooting'.*'routing'"):
        study.list_modules("rooting")
    for family in FAMILIES:
        modules = study.list_modules(family.name).values()
        assert modules and all(module.__doc__.partition("\n")[0][-1] == "." for module in modules)
        studies = [one for module in modules for one in module.STUDIES]
        tables = [name for one in studies for name in (one.name, *one.beside)]
        assert len(tables) == len(set(tables))
