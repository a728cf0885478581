"""Remoe's policies where an action sets each layer by itself."""

import dataclasses

import numpy as np
import pytest

from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.base import observed_row
from servegym.baselines.serverless_moe.remoe import remoe
from servegym.baselines.serverless_moe.system import ServerlessSystem

from ..episodes import FAMILY, make_env, run


@pytest.mark.parametrize("name", ["remoe", "remoe_sticky"])
def test_a_plan_of_the_grid_is_found_again(name):
    """A plan that actions of single layers can make is found again, on any layer's own steps."""
    env = make_env(1, episode_requests=30, granularity="per_layer", payload_mb=0.4)
    problem, system = env.problem, ServerlessSystem.from_env(env)
    policy = make_policy(name, system, family=FAMILY)
    observation, _ = env.reset(seed=0)
    observed, rng, kinds = observed_row(system, observation, 0), np.random.default_rng(0), 0
    prompt = int(env.batch.arrays.requests[0, 0]["prompt"])
    for _ in range(40):
        action = (rng.random(len(problem.nvec)) * problem.nvec).astype(np.int64)
        action[1] = policy.order
        plan = problem.plan(prompt, observed.n_in, action)
        again = problem.plan(prompt, observed.n_in, policy.on_grid(observed, plan))
        assert (again.remote == plan.remote).all() and again.main_mb == plan.main_mb
        assert (again.remote_mb == plan.remote_mb).all()
        assert (again.replicas == plan.replicas).all()
        kinds += len(set(plan.remote_mb)) > 1 and len(set(plan.replicas)) > 1
    assert kinds > 10, "the plans hardly differ between layers"


@pytest.mark.parametrize("name", ["remoe", "remoe_cost", "remoe_sticky"])
def test_layers_differ_where_they_may(name):
    """Layers differ, and what is deployed is no further from Remoe's plan than with equal steps."""
    kwargs = {"model": "deepseek-v2-lite", "episode_requests": 10, "granularity": "per_layer"}
    env = make_env(1, **kwargs)
    _, actions, policy = run(name, env)
    layers = policy.system.model.moe_layers
    assert actions.shape == (10, 1, 3 + 2 * layers)
    steps = actions[:, 0, 3 : 3 + layers]
    assert (steps != steps[:, :1]).any() or (actions[:, 0, -layers:] != actions[:, 0, -1:]).any()
    even = make_policy(
        name,
        ServerlessSystem.from_env(
            make_env(
                1,
                **kwargs,
            )
        ),
        family=FAMILY,
    )
    even.system = dataclasses.replace(even.system, per_layer=False)
    observation, info = env.reset(seed=0)
    observed = observed_row(policy.system, observation, 0)
    legal = info["action_mask"][0, : len(policy.system.levels)] > 0
    for other in (policy, even):
        other.reset(1, seed=0)
    decided = remoe(
        policy.system.model,
        policy.expected(observed),
        ttft_limit_s=observed.ttft_limit_s,
        tpot_limit_s=observed.tpot_limit_s,
        reading=policy.reading,
        max_tokens=400,
        bill_cold_start=True,
        members=policy.system.levels[legal].tolist(),
        candidates=9,
        score=policy.system.shared if policy.order else None,
    ).plan
    prompt = int(env.batch.arrays.requests[0, 0]["prompt"])
    own, same = (
        env.problem.plan(
            prompt, observed.n_in, policy.system.full_action(x.on_grid(observed, decided))
        )
        for x in (policy, even)
    )
    off = [np.abs(p.remote_mb - decided.remote_mb).sum() for p in (own, same)]
    assert off[0] <= off[1]
