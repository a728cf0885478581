"""The shipped placement agents: found by name, better than their start, each with its card."""

import pytest

pytest.importorskip("torch")

from servegym.agents.lib.checkpoint import load_policy, shipped, shipped_for  # noqa: E402
from servegym.baselines.expert_placement.system import PlacementSystem  # noqa: E402
from servegym.envs.expert_placement.env import ExpertPlacementEnv  # noqa: E402
from servegym.experiments.evaluation.evaluate import evaluate  # noqa: E402
from servegym.experiments.studies.placement.learning import Control  # noqa: E402

SHIPPED = shipped("expert_placement")


def scenario(name):
    return "paper_testbed" if name.endswith("paper_testbed") else "edge_hetero"


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_each_has_a_card_with_command_and_numbers(name):
    card = SHIPPED[name].with_suffix(".md").read_text(encoding="utf-8")
    assert "python -m servegym.agents" in card and "95 %" in card and "whole_layer" in card
    assert SHIPPED[name].stat().st_size < 1_000_000


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_it_is_ahead_of_its_start_on_prompts_never_trained_on(name):
    kwargs = {"scenario": scenario(name), "epochs": 2}
    policies = [Control("own_share"), name]
    rows = evaluate("servegym/ExpertPlacement-v0", policies, 3, 0, kwargs)
    start, trained = (sum(row["mean_latency_s"] for row in rows[k : k + 3]) for k in (0, 3))
    assert trained < start * (0.7 if scenario(name) == "edge_hetero" else 1.0)


def test_the_agents_name_means_its_file_for_the_cluster():
    kwargs = {"scenario": "paper_testbed", "split": "eval"}
    described = PlacementSystem.from_problem(ExpertPlacementEnv.make_problem(kwargs))
    for agent in ("ppo_placement", "mappo_placement"):
        trained_there = SHIPPED.get(f"{agent}_paper_testbed")
        if trained_there is None:
            continue
        assert shipped_for("expert_placement", agent, described) == trained_there
        assert load_policy(trained_there, described).path == trained_there
        assert load_policy(SHIPPED[agent], described).path == SHIPPED[agent]
    other = PlacementSystem.from_problem(ExpertPlacementEnv.make_problem(kwargs | {"model": "toy"}))
    assert shipped_for("expert_placement", "ppo_placement", other) == SHIPPED["ppo_placement"]
    assert shipped_for("expert_placement", "ppo_placement", None) == SHIPPED["ppo_placement"]
    assert shipped_for("expert_placement", "unknown", described) is None


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_it_places_other_models_on_other_clusters(name):
    kwargs = {"scenario": "paper_testbed", "model": "toy", "epochs": 1}
    kwargs["cluster_kwargs"] = {"gpus": [1, 2, 1, 1]}
    (row,) = evaluate("servegym/ExpertPlacement-v0", [SHIPPED[name]], 1, env_kwargs=kwargs)
    assert row["mean_latency_s"] > 0 and row["migrations"] == 1
