"""The table of the recorded prefixes: a share by hand, and a smoke run."""

from servegym.envs.workloads.prefix_traces import load_prefix_trace
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.papers.prefix.workloads import main, per_session


def test_shares_of_sessions_by_hand():
    trace = load_prefix_trace("agents")
    shares = per_session(trace)
    own = trace.session == 3
    assert shares[3] == trace.shared_tokens[own].sum() / (trace.prompt_tokens[own] // 64 * 64).sum()


def test_a_smoke_run_writes_what_it_says(tmp_path):
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    facts = read_rows(tmp_path / "workload_facts.csv")
    assert {row["verdict"] for row in facts} == {"agrees", "differs", "counted here"}
    for row in facts:
        assert (row["verdict"] == "counted here") == (row["published"] == "")
