"""The tables of the prefix workloads: the LRU cache against a literal one, and a smoke run."""

import numpy as np
import pytest

from servegym.envs.prefix_routing.requests import infinite_cache_hits
from servegym.envs.prefix_routing.workloads import make_prefix_workload
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.papers.prefix.workloads import lru_hits, main, per_session


@pytest.fixture(scope="module")
def requests():
    workload = make_prefix_workload("sessions", max_context=8_000)
    return workload.draw(np.random.default_rng(0), 250, 3.0, 512, "trace")


def test_a_cache_that_never_fills_holds_what_an_infinite_one_does(requests):
    hits = lru_hits(requests, 10**9)
    assert hits == pytest.approx(infinite_cache_hits(requests).token_rate)
    assert hits > 0.05


@pytest.mark.parametrize("capacity", [1, 40, 300])
def test_lru_equals_a_list_in_order_of_use(requests, capacity):
    held: list[int] = []
    hits = 0
    for j in range(requests.num_requests):
        ids = requests.block_ids(j).tolist()
        lookup = (int(requests.prompt_tokens[j]) - 1) // 512
        for name in ids[:lookup]:
            if name not in held:
                break
            hits += 1
        held = [name for name in held if name not in ids] + ids[::-1]
        held = held[-capacity:]
    assert lru_hits(requests, capacity) == pytest.approx(512 * hits / requests.prompt_tokens.sum())


def test_shares_of_sessions_by_hand():
    from servegym.envs.workloads.prefix_traces import load_prefix_trace

    trace = load_prefix_trace("agents")
    shares = per_session(trace)
    own = trace.session == 3
    assert shares[3] == trace.shared_tokens[own].sum() / (trace.prompt_tokens[own] // 64 * 64).sum()


def test_a_smoke_run_writes_what_it_says(tmp_path):
    options = ["--quick", "--out", str(tmp_path), "--figure", "facts", "sessions"]
    assert main(options) == 0
    facts = read_rows(tmp_path / "workload_facts.csv")
    assert {row["verdict"] for row in facts} == {"agrees", "differs", "counted here"}
    for row in facts:
        assert (row["verdict"] == "counted here") == (row["published"] == "")
    rows = read_rows(tmp_path / "workload_sessions.csv")
    assert all(row["low"] <= row["drawn"] <= row["high"] for row in rows)
