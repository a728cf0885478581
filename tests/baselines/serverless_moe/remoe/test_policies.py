"""Remoe's policies where an action sets each layer by itself."""

import numpy as np
import pytest

from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.base import observed_row
from servegym.baselines.serverless_moe.system import ServerlessSystem

from ....envs.serverless_moe.reference import plan_of
from ..episodes import FAMILY, make_env


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
        plan = plan_of(problem, prompt, observed.n_in, action)
        again = plan_of(problem, prompt, observed.n_in, policy.on_grid(observed, plan))
        assert (again.remote == plan.remote).all() and again.main_mb == plan.main_mb
        assert (again.remote_mb == plan.remote_mb).all()
        assert (again.replicas == plan.replicas).all()
        kinds += len(set(plan.remote_mb)) > 1 and len(set(plan.replicas)) > 1
    assert kinds > 10, "the plans hardly differ between layers"
