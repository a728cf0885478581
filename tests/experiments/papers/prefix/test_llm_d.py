"""llm-d's benchmark on two small pods: the table, and the order of its two ways of routing."""

import pytest

from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.papers.prefix import llm_d


@pytest.fixture
def small(monkeypatch):
    stages = ((15.0, 6.0), (3.0, 6.0), (60.0, 4.0))
    pauses = tuple(x for stage in stages for x in (stage, (0.0, llm_d.PAUSE_S)))
    monkeypatch.setattr(llm_d, "LLM_D_STAGES", stages)
    monkeypatch.setattr(llm_d, "STAGES", (*pauses, (0.5, 1.0)))
    monkeypatch.setattr(llm_d, "PODS", 2)
    monkeypatch.setattr(llm_d, "KV_TOKENS", 500_000)


def test_four_ways_are_compared_with_the_report(small, tmp_path):
    assert llm_d.main(["--episodes", "2", "--out", str(tmp_path), "--figure", "llm_d"]) == 0
    rows = {(r["routing"], r["rate"]): r for r in read_rows(tmp_path / "llm_d.csv")}
    assert set(rows) == {(way, rate) for way in llm_d.WAYS for rate in (3.0, 60.0)}
    precise, blind = rows["precise", 60.0], rows["random", 60.0]
    assert precise["hit_percent"] > blind["hit_percent"]
    assert precise["ttft_p90_s"] < blind["ttft_p90_s"]
    assert blind["report_ttft_p90_s"] == 105.988
