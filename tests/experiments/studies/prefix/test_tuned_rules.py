"""The searches of the rules' constants, in a small system: what is tried, kept and compared."""

import json

import pytest

from servegym.baselines.prefix_routing import RULES
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.studies.prefix import tuned_rules


@pytest.mark.parametrize("rule", tuned_rules.SPACES)
def test_points_are_the_published_constants_and_others_within_the_space(rule):
    tried = tuned_rules.points(rule)
    assert tried[0] == {} and len({json.dumps(own) for own in tried}) == tuned_rules.TRIALS
    for own in tried[1:]:
        assert set(own) == set(tuned_rules.SPACES[rule])
        for name, (low, high, _) in tuned_rules.SPACES[rule].items():
            assert low <= own[name] <= high
        RULES[rule][0](**own)


@pytest.fixture
def small(monkeypatch):
    cell = {"workload": "tenants", "num_replicas": 2, "rate": 80.0}
    cell["workload_kwargs"] = {"groups": 8, "users": 2, "questions": "fresh", "order": "random"}
    monkeypatch.setattr(tuned_rules, "CELLS", {"one": cell, "two": cell | {"rate": 60.0}})
    monkeypatch.setattr(tuned_rules, "SIZE", {"episode_requests": 60, "warmup_requests": 10})
    monkeypatch.setattr(tuned_rules, "STAGES", ((60, 1), (4, 2), (2, 1)))
    spaces = {name: tuned_rules.SPACES[name] for name in ("llm_d", "preble")}
    monkeypatch.setattr(tuned_rules, "SPACES", spaces)
    monkeypatch.setattr(tuned_rules, "PLAIN", ("lmetric",))


def test_play_is_the_same_for_the_same_rule_and_not_for_another(small):
    rules = [RULES[name][0]() for name in ("lmetric", "lmetric", "session_hash")]
    reached = tuned_rules.play("one", rules, [1, 2], "val")
    assert reached.shape == (3, 2) and ((reached >= 0) & (reached <= 1)).all()
    assert (reached[0] == reached[1]).all() and (reached[0] != reached[2]).any()


@pytest.mark.slow
def test_the_search_keeps_the_best_and_all_play_the_same_episodes(small, tmp_path):
    assert tuned_rules.main(["--episodes", "3", "--out", str(tmp_path)]) == 0
    trials = read_rows(tmp_path / "tuned_rules_trials.csv")
    for cell in ("one", "two"):
        for rule in ("llm_d", "preble"):
            own = [row for row in trials if (row["cell"], row["rule"]) == (cell, rule)]
            assert sorted(row["episodes"] for row in own) == [1] * 56 + [3] * 2 + [4] * 2
            least = min(row["first"] for row in own if row["episodes"] > 1)
            assert least >= max(row["first"] for row in own if row["episodes"] == 1)
    rows = read_rows(tmp_path / "tuned_rules.csv")
    kinds = ("published", "tuned", "joint")
    expected = {("lmetric", "published")}
    expected |= {(rule, kind) for rule in ("llm_d", "preble") for kind in kinds}
    for cell in ("one", "two"):
        assert {(r["rule"], r["constants"]) for r in rows if r["cell"] == cell} == expected
    for row in rows:
        assert row["low"] <= row["attainment"] <= row["high"]
        same = next(
            r
            for r in rows
            if (r["cell"], r["rule"], r["constants"]) == (row["cell"], row["rule"], "published")
        )
        if row["constants"] == "tuned":
            assert row["gain"] == pytest.approx(row["attainment"] - same["attainment"], abs=0.011)
