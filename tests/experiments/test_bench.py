"""The benchmark: rates with references, and what is refused."""

import json

import pytest

from servegym.experiments import bench
from servegym.experiments.evaluation.output import read_rows


@pytest.mark.slow
def test_a_smoke_run_writes_rates_with_references(tmp_path, capsys):
    out = tmp_path / "new" / "bench"
    assert bench.main(["--quick", "--repeats", "1", "--out", str(out)]) == 0
    rows = read_rows(out.with_suffix(".csv"))
    assert {"one servegym/ExpertPlacement-v0, steps", "replay, orca, requests"} <= {
        row["what"] for row in rows
    }
    for one in rows:
        assert 0 < one["low"] <= one["value"] * (1 + 1e-9) <= one["high"] * (1 + 2e-9)
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["command"].startswith("servegym bench --quick") and record["quick"]
    assert "SyncVectorEnv of PrefixRouting-v1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"), [(["--repeats", "0"], "repeats"), (["rooting"], "family.*routing")]
)
def test_bad_arguments_are_refused_before_any_work(words, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        bench.main([*words, "--out", str(tmp_path / "bench")])
    assert not list(tmp_path.iterdir())
