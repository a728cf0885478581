"""The shipped placement agents: found by name, better than whole layers, each with its card."""

import numpy as np
import pytest

pytest.importorskip("torch")

from servegym.agents.lib.checkpoint import load_policy, shipped, shipped_for  # noqa: E402
from servegym.baselines.expert_placement.system import PlacementSystem  # noqa: E402
from servegym.envs.expert_placement.env import make_problem  # noqa: E402
from servegym.experiments.evaluate import evaluate  # noqa: E402

SHIPPED = shipped("expert_placement")


def scenario(name):
    found = name.partition("placement_")[2]
    return found if found in ("drift", "paper_testbed") else "edge_hetero"


def rival(name):
    """The best heuristic of the scenario and how much of its latency an agent may have."""
    return ("proxy_optimum", 1.03) if name.endswith("paper_testbed") else ("whole_layer", 0.96)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_each_has_a_card_with_command_and_numbers(name):
    card = SHIPPED[name].with_suffix(".md").read_text(encoding="utf-8")
    assert "python -m servegym.agents" in card and "95 %" in card and "whole_layer" in card
    assert SHIPPED[name].stat().st_size < 1_000_000


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_it_is_ahead_of_heuristics_on_prompts_never_trained_on(name):
    kwargs, (heuristic, share) = {"scenario": scenario(name), "epochs": 4}, rival(name)
    rows = evaluate("servegym/ExpertPlacement-v0", [heuristic, name], 3, env_kwargs=kwargs)
    latency = np.array([row["mean_latency_s"] for row in rows]).reshape(2, 3)
    assert latency[1].mean() < share * latency[0].mean()


def test_the_agents_name_means_its_file_for_the_cluster():
    for name in ("drift", "paper_testbed"):
        described = PlacementSystem.from_problem(make_problem({"scenario": name, "split": "eval"}))
        for agent in ("ppo_placement", "mappo_placement"):
            trained_there = SHIPPED[f"{agent}_{name}"]
            assert shipped_for("expert_placement", agent, described) == trained_there
            assert load_policy(trained_there, described).path == trained_there
            assert load_policy(SHIPPED[agent], described).path == SHIPPED[agent]
        assert shipped_for("expert_placement", "ppo_placement_drift", described).stem.endswith(
            "drift"
        )
    other = make_problem({"scenario": "paper_testbed", "model": "toy"})
    described = PlacementSystem.from_problem(other)
    assert shipped_for("expert_placement", "ppo_placement", described) == SHIPPED["ppo_placement"]
    assert shipped_for("expert_placement", "ppo_placement", None) == SHIPPED["ppo_placement"]
    assert shipped_for("expert_placement", "unknown", described) is None


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_it_places_other_models_on_other_clusters(name):
    kwargs = {"scenario": "paper_testbed", "model": "toy", "epochs": 1}
    kwargs["cluster_kwargs"] = {"gpus": [1, 2, 1, 1]}
    (row,) = evaluate("servegym/ExpertPlacement-v0", [SHIPPED[name]], 1, env_kwargs=kwargs)
    assert row["mean_latency_s"] > 0 and row["migrations"] == 1
