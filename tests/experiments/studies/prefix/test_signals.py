"""What old metrics, lagging indexes and weights do: a smoke run, and what must not change."""

import pytest

from servegym.baselines.prefix_routing.llm_d import LlmdScorers
from servegym.experiments.output import read_rows
from servegym.experiments.studies.prefix import signals

SMALL = {"scenario": "hot-tenant", "rate": 60.0, "episode_requests": 150, "warmup_requests": 50}


@pytest.fixture
def small(monkeypatch):
    full = signals.play

    def short(make, seeds, **arguments):
        return full(make, seeds, **{**SMALL, **arguments})

    monkeypatch.setattr(signals, "play", short)
    monkeypatch.setattr(signals, "CELLS", (("hot-tenant", 60.0),))
    monkeypatch.setattr(signals, "LOADS", (("hot-tenant", 60.0),))


def test_what_is_not_scraped_cannot_be_old(small, tmp_path):
    assert signals.main(["--episodes", "2", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "signals_staleness.csv")
    assert len(rows) == len(signals.READERS) * len(signals.SCRAPES_S)
    own = [row for row in rows if row["rule"] in ("least_load", "lmetric")]
    assert own and all(row["change"] == 0 for row in own)
    assert any(row["change"] != 0 for row in rows)
    index = read_rows(tmp_path / "signals_index.csv")
    assert [row["index"] for row in index[-2:]] == ["approximate", "none"]
    assert index[-1]["hit_rate"] < index[0]["hit_rate"]
    assert len(read_rows(tmp_path / "signals_weights.csv")) == len(signals.QUEUE_WEIGHTS)


def test_scale_of_the_weights_is_of_no_matter():
    one, two = (
        signals.play(lambda w=w: LlmdScorers(queue=w, kv=w, prefix=2 * w), 2, **SMALL)
        for w in (1.0, 2.0)
    )
    assert one == two
