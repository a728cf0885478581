"""Features and index of prefix routing against slow references; settings."""

import numpy as np
import pytest

from servegym.baselines.prefix_routing import features
from servegym.baselines.prefix_routing.drawn_settings import (
    KINDS,
    draw_setting,
    problem_of,
)
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.envs.prefix_routing.kernel.observation import OF_REPLICA, OF_REQUEST

SMALL = {
    "workload": "tenants",
    "workload_kwargs": {
        "groups": 20,
        "prefix_tokens": 2000,
        "question_tokens": [100, 600],
        "output_tokens": [20, 100],
        "questions": "fresh",
        "order": "random",
    },
    "profiles": [{"card": card, "model": "llama-3.1-8b"} for card in ("h100", "l40s", "l40s")],
    "kv_tokens": 60_000,
    "max_num_seqs": 16,
    "scrape_s": 1.0,
    "rate": 30.0,
    "warmup_requests": 40,
    "episode_requests": 60,
}


def batch_of(rows=3, **changes):
    batch = PrefixBatch(problem_of(SMALL | changes), rows)
    for row in range(rows):
        batch.draw(row, np.random.default_rng(row))
    batch.begin(np.ones(rows, np.int8))
    return batch


def slow_features(seen, row, n, block_size):
    """The features of a replica one by one, from their descriptions."""
    of = dict(zip(OF_REPLICA, seen["replicas"][row, n].astype(float), strict=True))
    asked = dict(zip(OF_REQUEST, seen["request"][row].astype(float), strict=True))
    objective = asked["ttft_slo_s"]
    per_s = of["prefill_tokens_per_s"]
    prefill = min((asked["prompt_tokens"] - of["match_tokens"]) / per_s / objective, 8)
    backlog = min(of["prefill_tokens"] / per_s / objective, 8)
    blocks = min(of["decode_blocks"] * block_size / of["kv_tokens"], 8)
    share = of["match_share"]
    return {
        "prefill": prefill,
        "matched": min(of["match_tokens"] / per_s / objective, 8),
        "backlog": backlog,
        "late": max(prefill + backlog - 1, 0),
        "context": min(of["context_tokens"] / of["kv_tokens"], 8),
        "blocks": blocks,
        "full": min(max(blocks + asked["prompt_tokens"] / of["kv_tokens"] - 1, 0), 8),
        "in_flight": of["in_flight"] / 32,
        "queue": max(of["in_flight"] - of["max_num_seqs"], 0) / 32,
        "waiting": min(of["waiting"] / 8, 8),
        "kv_usage": of["kv_usage"],
        "session": of["session_replica"],
        "share": share,
        "old_match": share * np.log1p(of["match_age_s"]),
        "full_match": share * blocks,
        "hot_match": share * asked["tenant_heat"],
        "index_fill": of["index_fill"],
        "ttft": min(of["ttft_s"] / objective, 8),
        "ttft_error": np.clip(of["ttft_error_s"] / objective, -8, 8),
        "tpot": min(of["tpot_s"] / asked["tpot_slo_s"], 8),
        "lmetric": prefill * of["in_flight"] / 32,
        "log_prefill": np.log(prefill + 0.01),
        "log_in_flight": np.log1p(of["in_flight"]),
    }


def test_features_are_what_they_say():
    batch, every = batch_of(rate=200.0, scrape_s=0.05, kv_tokens=12_000), np.ones(3, np.int8)
    rng, met = np.random.default_rng(0), np.zeros(features.F)
    for _ in range(50):
        seen = batch.observation
        found, load = features.features(seen, batch.problem.arguments.block_size)
        row, n = rng.integers(3, size=2)
        slow = slow_features(seen, row, n, batch.problem.arguments.block_size)
        assert tuple(slow) == features.FEATURES
        np.testing.assert_allclose(found[row, n], list(slow.values()), rtol=2e-5, atol=2e-6)
        up = [slow_features(seen, row, k, batch.problem.arguments.block_size) for k in range(3)]
        mean = np.mean([one["backlog"] + one["blocks"] for one in up])
        assert load[row] == pytest.approx(min(mean, 2.0), rel=1e-4)
        met += found[row, n] != 0
        batch.step(rng.integers(3, size=3), every)
    assert (met > 0).all(), dict(zip(features.FEATURES, met, strict=True))


def test_cells_are_drawn_of_every_kind_and_are_environments():
    for kind in KINDS:
        first, again, other = (
            draw_setting(kind, np.random.default_rng(seed)) for seed in (1, 1, 2)
        )
        assert first == again != other
        problem_of(first | {"rate": 1.0, "episode_requests": 5, "warmup_requests": 0})
