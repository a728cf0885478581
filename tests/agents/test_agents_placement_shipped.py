"""The shipped placement agents: found by name, better than whole layers, each with its card."""

import numpy as np
import pytest

pytest.importorskip("torch")

from servegym.agents.checkpoint import load_policy, shipped  # noqa: E402
from servegym.experiments.evaluate import evaluate  # noqa: E402

SHIPPED = shipped("expert_placement")


def scenario(name):
    return "drift" if name.endswith("drift") else "edge_hetero"


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_each_has_a_card_with_command_and_numbers(name):
    card = SHIPPED[name].with_suffix(".md").read_text(encoding="utf-8")
    assert "python -m servegym.agents" in card and "95 %" in card and "whole_layer" in card
    assert SHIPPED[name].stat().st_size < 1_000_000


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_it_beats_whole_layers_on_prompts_never_trained_on(name):
    kwargs = {"scenario": scenario(name), "epochs": 4}
    policies = ["whole_layer", load_policy(SHIPPED[name])]
    rows = evaluate("servegym/ExpertPlacement-v0", policies, 3, env_kwargs=kwargs)
    latency = np.array([row["mean_latency_s"] for row in rows]).reshape(2, 3)
    assert (latency[1] < 0.98 * latency[0]).all()


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_it_places_other_models_on_other_clusters(name):
    kwargs = {"scenario": "paper_testbed", "model": "toy", "epochs": 1}
    kwargs["cluster_kwargs"] = {"gpus": [1, 2, 1, 1]}
    (row,) = evaluate("servegym/ExpertPlacement-v0", [SHIPPED[name]], 1, env_kwargs=kwargs)
    assert row["mean_latency_s"] > 0 and row["migrations"] == 1
