"""The shipped checkpoints: each better than a plain rule, for any size, and with its card."""

import pytest

from servegym import ENV_IDS
from servegym.agents import load_policy
from servegym.agents.lib.checkpoint import shipped, shipped_for
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.families import FAMILIES, family_named
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.leaderboard import POINTS, read_board
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.papers.study import RESULTS

REFERENCES = {
    "llm_routing": "priced_greedy",
    "serverless_moe": "warm_planner",
    "expert_placement": "whole_layer",
    "prefix_routing": "llm_d",
}
ALL = [(family.name, name) for family in FAMILIES for name in shipped(family.name)]
LEARNED = [(family, name) for family, name in ALL if not name.startswith("baseline")]


@pytest.mark.parametrize(("family", "name"), ALL)
def test_the_head_of_each_card_has_values_of_the_tables(family, name):
    yaml = pytest.importorskip("yaml")
    _, head, text = shipped(family)[name].with_suffix(".md").read_text("utf-8").split("---\n", 2)
    assert "python -m servegym" in text and "95 %" in text and REFERENCES[family] in text
    head = yaml.safe_load(head)
    (model,) = head["model-index"]
    assert head["license"] == "mit" and text.startswith(f"# {name}\n") and model["name"] == name
    board = {(row["point"], row["policy"]): row for row in read_board(RESULTS / "leaderboard.csv")}
    points = {point.name: point for point in POINTS}
    for result in model["results"]:
        data, (metric,) = result["dataset"], result["metrics"]
        assert data["type"] == data["name"] and data["name"] in ENV_IDS
        if (at := data["config"]) in points:
            assert data["name"] == points[at].family.env_id
            assert data.get("args", {}) == points[at].env_kwargs
            row = board[at, name.removesuffix("_paper_testbed")]
            assert metric["type"] == row["measure"]
            value = row["value"]
        else:  # the mean of a table
            rows = read_rows(RESULTS / family_named(family).group / f"{at}.csv")
            own = [row["qos"] for row in rows if row["policy"] == name]
            value = sum(own) / len(own)
        assert metric["value"] == pytest.approx(value, abs=5.1e-4)


def scenario(name):
    return "paper_testbed" if name.endswith("paper_testbed") else "edge_hetero"


@pytest.mark.slow  # the golden hashes say at once whether one acts as it did
@pytest.mark.parametrize(("family", "name"), LEARNED)
def test_each_beats_a_plain_rule_on_prompts_never_trained_on(family, name):
    path = shipped(family)[name]
    rule, key, kwargs, ratio = {
        "llm_routing": ("greedy_qos", "avg_qos", {"episode_requests": 400, "rate": 9.0}, 1.03),
        "serverless_moe": ("keep_alive", "mean_reward", {"model": "deepseek-v2-lite"}, 0.98),
        "expert_placement": (
            "prism",
            "mean_latency_s",
            {"scenario": scenario(name), "epochs": 2},
            0.7 if scenario(name) == "edge_hetero" else 1.0,
        ),
        "prefix_routing": ("random", "return", {"episode_requests": 400, "rate": 60.0}, 1.0),
    }[family]
    rows = evaluate(family_named(family).env_id, [rule, path], 3, env_kwargs=kwargs)
    plain, trained = (sum(row[key] for row in rows[k : k + 3]) for k in (0, 3))
    if family == "expert_placement":
        assert trained < ratio * plain
    else:
        assert trained > ratio * plain, (plain, trained)


def test_the_agents_name_means_its_file_for_the_cluster():
    of_agent = shipped("expert_placement")
    kwargs = {"scenario": "paper_testbed", "split": "eval"}
    described = PlacementSystem.from_problem(build_problem(**kwargs))
    there = of_agent["ppo_placement_paper_testbed"]
    assert shipped_for("expert_placement", "ppo_placement", described) == there
    assert load_policy(there, described).path == there
    other = PlacementSystem.from_problem(build_problem(**(kwargs | {"model": "toy"})))
    for system in (other, None):
        found = shipped_for("expert_placement", "ppo_placement", system)
        assert found == of_agent["ppo_placement"]
    assert shipped_for("expert_placement", "unknown", described) is None
