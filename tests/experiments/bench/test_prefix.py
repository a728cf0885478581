"""The benchmark of the prefix routing family: rows, files, and its yardstick."""

import json

import pytest

from servegym.experiments.bench import prefix
from servegym.experiments.evaluation.output import read_rows


@pytest.mark.slow
def test_the_command_writes_every_figure(tmp_path):
    assert prefix.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench.csv")}
    assert set(rows) == {
        f"a request, {what}, blocks of {size}, {rate}/s"
        for what in ("engine", "replay_prefix")
        for size in (16, 512)
        for rate in (3.4, 10.2)
    } | {f"memory, 4 systems of 8 replicas, blocks of {size}" for size in (16, 64, 512)}
    for row in rows.values():
        assert 0 < row["low"] <= row["value"] * (1 + 1e-9)
    assert json.loads((tmp_path / "bench.json").read_text())["quick"]


def test_the_yardstick_is_a_least_recently_used_cache(monkeypatch):
    monkeypatch.setattr(prefix, "REPLICAS", 1)
    # With room for two, 3 puts out whichever of 1 and 2 was asked for longer ago.
    assert prefix.lru_hits([[1, 2], [1], [2], [3], [1]], 2) == 2
    assert prefix.lru_hits([[1, 2], [1], [3], [1], [2]], 2) == 2
