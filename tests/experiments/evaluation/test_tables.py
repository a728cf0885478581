"""Result tables: provenance as data, rows that are appended and resumed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from servegym._files import MalformedFileError
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import (
    Table,
    note,
    provenance,
    read_record,
    write_result,
)


def test_a_result_is_rows_and_a_record(tmp_path: Path) -> None:
    rows = [{"x": 1, "y": 0.5}, {"x": 2, "y": math.nan}]
    made = provenance("make it", quick=True, packages=("torch",), settings={"data": "mine"})
    write_result(tmp_path / "one", rows, made, ["y falls", note("x rises", slope=np.float64(1.0))])
    assert (tmp_path / "one.csv").read_text() == "x,y\n1,0.5\n2,nan\n"
    record = read_record(tmp_path / "one.csv")
    assert record == json.loads((tmp_path / "one.json").read_text())
    assert (record["command"], record["quick"]) == ("make it", True)
    assert record["settings"] == {"data": "mine"}
    assert set(record["versions"]) == {
        "serve-gym",
        "numpy",
        "numba",
        "gymnasium",
        "torch",
        "python",
    }
    assert set(record["machine"]) == {"cpu", "cores", "system"}
    assert record["notes"] == [{"text": "y falls"}, {"text": "x rises", "slope": 1.0}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.csv", "one.json"]


def test_a_table_without_a_record_has_an_empty_one(tmp_path: Path) -> None:
    assert read_record(tmp_path / "one.csv") == {}
    (tmp_path / "one.json").write_text("[]")
    with pytest.raises(MalformedFileError):
        read_record(tmp_path / "one.csv")
    (tmp_path / "one.json").write_text("{")
    with pytest.raises(MalformedFileError):
        read_record(tmp_path / "one.csv")


def test_a_table_resumes_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.csv"
    table = Table(path, ("policy", "seed"))
    table.update([])
    assert not path.exists()
    wanted = [(policy, seed) for policy in ("a", "b") for seed in (0, 1)]
    assert table.missing(wanted) == wanted
    table.update({"policy": "a", "seed": seed, "value": 0.1 * seed} for seed in (0, 1))
    again = Table(path, ("policy", "seed"))
    assert again.missing(wanted) == [("b", 0), ("b", 1)]
    before = path.read_bytes()
    again.update([])
    assert path.read_bytes() == before


def test_rows_replace_those_of_their_key(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows.csv", ("k",))
    table.update([{"k": "a", "v": 1}, {"k": "b", "v": 2}, {"k": "b", "v": 3}, {"k": "c", "v": 4}])
    table.update([{"k": "d", "v": 5}, {"k": "b", "v": 6}])
    assert [(row["k"], row["v"]) for row in table.rows] == [("a", 1), ("b", 6), ("c", 4), ("d", 5)]
    table.discard(lambda row: row["k"] == "a")
    table.update([], order=lambda row: -row["v"])
    assert [row["v"] for row in read_rows(tmp_path / "rows.csv")] == [6, 5, 4]
    assert Table(tmp_path / "rows.csv", ("k",), load=False).rows == []


def test_a_file_without_its_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x\n1\n")
    with pytest.raises(MalformedFileError, match="policy"):
        Table(tmp_path / "rows.csv", ("policy",))
