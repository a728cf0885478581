"""LLM routing as a native Gymnasium vector environment: one kernel call for all systems."""

from __future__ import annotations

from servegym.envs._vector import BatchVectorEnv
from servegym.envs.llm_routing.config import Problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.env import (
    LLMRoutingEnv,
    LLMRoutingExpertsEnv,
    LLMRoutingFlatEnv,
    LLMRoutingSummaryEnv,
)


class LLMRoutingVectorEnv(BatchVectorEnv):
    """B systems of `LLMRoutingEnv` stepped together, equal to `SyncVectorEnv` bit for bit.

    Besides the arguments of the single environment it takes

    - `num_envs`: B;
    - `autoreset_mode`: `"NextStep"` (default), `"SameStep"` (with `final_obs` and `final_info`) or
      `"Disabled"` (with `reset(options={"reset_mask": ...})`);
    - `copy`: False returns the buffers themselves, which the next call overwrites;
    - `max_episode_steps`: truncates without draining.

    With `reset(seed=s)` system i is seeded with s + i. Rewards are float64, the arrays of the
    information carry their `_key` masks.

    >>> import gymnasium, servegym
    >>> envs = gymnasium.make_vec("servegym/LLMRouting-v0", num_envs=4)
    >>> observation, info = envs.reset(seed=0)
    >>> observation["running"].shape, info["action_mask"].shape
    ((4, 6, 5, 6), (4, 7))
    """

    SINGLE = LLMRoutingEnv
    problem: Problem
    batch: RoutingBatch


class LLMRoutingFlatVectorEnv(LLMRoutingVectorEnv):
    """B systems of `LLMRoutingFlatEnv`."""

    SINGLE = LLMRoutingFlatEnv


class LLMRoutingExpertsVectorEnv(LLMRoutingVectorEnv):
    """B systems of `LLMRoutingExpertsEnv`."""

    SINGLE = LLMRoutingExpertsEnv


class LLMRoutingSummaryVectorEnv(LLMRoutingVectorEnv):
    """B systems of `LLMRoutingSummaryEnv`."""

    SINGLE = LLMRoutingSummaryEnv
