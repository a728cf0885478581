"""The shipped routers: found by name, better than greedy_qos, for any N, and each has its card."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents.lib.checkpoint import shipped  # noqa: E402
from servegym.experiments.evaluation.evaluate import evaluate  # noqa: E402

SHIPPED = shipped("llm_routing")
LEARNED = [name for name in SHIPPED if not name.startswith("baseline")]
ANY_EXPERTS = [name for name in LEARNED if name != "direct_search"]


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_each_has_a_card_with_command_and_numbers(name):
    card = SHIPPED[name].with_suffix(".md").read_text(encoding="utf-8")
    assert "python -m servegym" in card and "95 %" in card and "priced_greedy" in card
    assert SHIPPED[name].stat().st_size < 1_000_000


@pytest.mark.parametrize("name", LEARNED)
def test_it_beats_greedy_qos_under_load_on_prompts_never_trained_on(name):
    kwargs = {"episode_requests": 400, "rate": 9.0}
    rows = evaluate("servegym/LLMRouting-v1", ["greedy_qos", name], 4, env_kwargs=kwargs)
    qos = {
        policy: np.array([row["avg_qos"] for row in rows if row["policy"] == policy])
        for policy in ("greedy_qos", name)
    }
    assert (qos[name] > 1.03 * qos["greedy_qos"]).all()


@pytest.mark.parametrize("name", ANY_EXPERTS)
def test_it_serves_another_number_of_experts(name):
    kwargs = {"episode_requests": 50, "rate": 4.0, "num_experts": 3}
    (row,) = evaluate("servegym/LLMRouting-v1", [name], 1, env_kwargs=kwargs)
    assert row["avg_qos"] > 0.4
