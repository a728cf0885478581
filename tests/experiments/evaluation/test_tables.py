"""Result tables: provenance as data."""

import json
import math
from pathlib import Path

import numpy as np

from servegym.experiments.evaluation.tables import (
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
