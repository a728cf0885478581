"""Infinite caches, which bound what a cache can do: hits against their definition."""

from __future__ import annotations

import numpy as np
import pytest

import servegym  # noqa: F401 - registers the ids
from servegym.envs.prefix_routing.config import DICT, build_problem
from servegym.envs.prefix_routing.core import PrefixBatch

from .reference import infinite_hits

SETTING = {
    "num_replicas": 3,
    "kv_tokens": 20_000,
    "rate": 12.0,
    "warmup_requests": 40,
    "episode_requests": 150,
    "workload_kwargs": {
        "groups": 12,
        "prefix_tokens": 3000,
        "question_tokens": [50, 400],
        "output_tokens": [20, 200],
        "questions": "fresh",
        "order": "random",
    },
}


def played(seed=0, **arguments):
    """The batch at the end of an episode routed at random, and its requests."""
    problem = build_problem(view=DICT, **(SETTING | arguments))
    batch = PrefixBatch(problem, 1)
    batch.draw(0, np.random.default_rng(seed))
    requests, _ = problem.draw(np.random.default_rng(seed))
    every, rng = np.ones(1, np.int8), np.random.default_rng(seed)
    batch.begin(every)
    ended = 0
    while not ended:
        ended = batch.step(rng.integers(3, size=1), every)
    return batch, requests


@pytest.mark.parametrize("kind", ["infinite", "pooled"])
def test_hits_are_those_of_the_definition(kind):
    for seed in (0, 1):
        batch, requests = played(seed, prefix_cache=kind)
        found = batch.systems.request
        replica = found["replica"] if kind == "infinite" else None
        hits = requests.block_size * infinite_hits(requests, replica)
        assert (found["outcome"] == 2).all()
        np.testing.assert_array_equal(found["hit"], hits)
        assert hits.sum() > 0
