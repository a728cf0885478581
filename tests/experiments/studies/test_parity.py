"""Parity: the constant law of the rivals."""

import pytest

from servegym.envs.llm_routing import replay
from servegym.experiments.studies.fidelity import parity


def test_the_constant_law_counts_a_mixed_iteration_twice():
    # The rivals' own answer: recorded from ai-dynamo 1.6.1 and aisimulate 0.13 with 10 ms.
    result = replay(
        [0.0, 0.025],
        [100, 5000],
        [8, 4],
        profile=parity.constant_profile(0.01),
        max_num_batched_tokens=2048,
        kv_tokens=41_408,
        async_scheduling=False,
    )
    assert result["ttft_s"] == pytest.approx([0.010, 0.065])
    assert result["e2e_s"] == pytest.approx([0.110, 0.095])
