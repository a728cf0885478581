"""The summary of each expert against one computed from the graph of the same system."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

import servegym  # noqa: F401 - registers the ids
from servegym.envs.llm_routing.core import held
from servegym.envs.llm_routing.kernel import layout

COLUMN = layout.OF_SUMMARY


def expected(graph, n, seen):
    """Columns of expert n, from the rows of the graph and the records of its requests."""
    batch = graph.batch
    e, c = batch.expert[0, n], batch.config_of(0)
    limit = float(seen["latency_requirement"][0])
    # `profiles` and the expert's index among them hold for fixed and for drawn fleets.
    law = graph.problem.profiles[int(e["profile"])]
    now = float(batch.env["now"][0])
    slots = batch.slot[0, n]
    running, waiting = (slots[queue] for queue in held(e, batch.queue[0, n]))
    # The graph clips a latency per token; the times since the arrivals are the records'.
    shown = seen["running"][n][seen["running_mask"][n] > 0]

    def pace(sequences):
        return law.decode_s(float(sequences), 256.0 * sequences)

    def split(records):
        emitted = np.where(records["decoding"], e["emitted"] - records["origin"], 0)
        generated = np.where(records["decoding"], emitted, records["generated"])
        length = np.maximum(records["predicted_output"].astype(float), generated + 1)
        left = length - generated
        spent = now - records["arrived"]
        return generated, left, spent, (limit * length - spent) / left

    cap_r = int(c["running_capacity"])
    generated, left, spent, slack = split(running)
    assert np.array_equal(generated, shown[:, 4])
    under_way = running[running["decoding"] == 0]
    prefill = under_way["prompt"] + under_way["generated"] - under_way["computed"]
    next_s = pace(min(len(running) + 1, cap_r))
    late = slack <= 0
    tight = ~late & (slack < next_s)
    values = {
        "exists": 1,
        "prompt_tokens": seen["request"][n, 0],
        "predicted_score": seen["request"][n, 1],
        "predicted_tokens": seen["request"][n, 2],
        "latency_requirement_s": limit,
        "memory": seen["experts"][n, 0],
        "running": len(running),
        "waiting": seen["experts"][n, 2],
        "running_capacity": cap_r,
        "waiting_capacity": c["waiting_capacity"],
        "kv_capacity_tokens": e["capacity"] * 16,
        "prefill_s_per_token": law.estimator.k1,
        "decode_s_per_context_token": law.estimator.k2,
        "lone_decode_s": pace(1),
        "next_decode_s": next_s,
        "full_decode_s": pace(cap_r),
        "emitted_tokens": generated.sum(),
        "context_tokens": (shown[:, 0] + generated).sum(),
        "prefill_tokens": prefill.sum(),
        "tokens_left": left.sum(),
        "left_16": (left <= 16).sum(),
        "left_64": ((left > 16) & (left <= 64)).sum(),
        "left_128": ((left > 64) & (left <= 128)).sum(),
        "next_finish_tokens": left.min(initial=1e9) if len(left) else 0,
        "scores": shown[:, 1].sum(),
        "behind": (spent / np.maximum(generated, 1) > limit).sum(),
        "late": late.sum(),
        "tight": tight.sum(),
        "tight_scores": shown[tight, 1].sum(),
        "least_slack_s": slack[~late].min(initial=10.0),
    }
    for h, means in zip((8, 32, 128), seen["load"], strict=True):
        names = (f"gap_s_{h}", f"mean_prompt_{h}", f"mean_predicted_{h}")
        values |= dict(zip(names, means, strict=True))
    generated, left, spent, slack = split(waiting)
    values |= {
        "waiting_prefill_tokens": (waiting["prompt"] + generated).sum(),
        "waiting_tokens_left": left.sum(),
        "waiting_scores": waiting["predicted_score"].sum(),
        "waiting_late": (slack <= 0).sum(),
        "longest_wait_s": spent.max(initial=0.0),
    }
    return values


@pytest.mark.parametrize(
    "kwargs",
    [
        {"rate": 14.0, "running_capacity": 12, "waiting_capacity": 9},
        {"fleet": "random", "fleet_kwargs": {"memory_policy": "paged", "load": (1.0, 2.0)}},
        {"fleet": "random", "fleet_kwargs": {"scheduler": "chunked_prefill", "num_experts": 2}},
    ],
)
def test_summary_is_that_of_the_graph(kwargs):
    kwargs = {**kwargs, "episode_requests": 110}
    graph = gymnasium.make("servegym/LLMRouting-v1", **kwargs).unwrapped
    summary = gymnasium.make("servegym/LLMRoutingSummary-v3", **kwargs).unwrapped
    covered = np.zeros(len(COLUMN))
    rng = np.random.default_rng(3)
    for seed in range(2):
        seen, _ = graph.reset(seed=seed)
        mine, _ = summary.reset(seed=seed)
        for step in range(110):
            count = int(graph.batch.config_of(0)["num_experts"])
            assert summary.observation_space.contains(mine)
            assert not mine[count:].any()
            for n in range(count if step % 4 == 0 else 0):
                raw = mine[n] * layout.SUMMARY_SPREADS + layout.SUMMARY_MEANS
                for name, value in expected(graph, n, seen).items():
                    got = raw[COLUMN[name]]
                    assert got == pytest.approx(value, rel=2e-4, abs=2e-4), (name, n)
            covered += (mine != 0).any(axis=0)
            action = int(rng.integers(1, min(count, 2) + 1))
            seen, *_ = graph.step(action)
            mine, *_ = summary.step(action)
    assert covered[COLUMN["left_64"]]
    if "rate" in kwargs:  # far too many requests
        assert covered[[COLUMN[n] for n in ("late", "tight", "waiting_late")]].all()
    else:  # Orca's prefills begin and end with an iteration: chunks are seen under way, too
        assert covered[COLUMN["prefill_tokens"]]
