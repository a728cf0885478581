"""LLM routing as a native Gymnasium vector environment: one kernel call for all systems."""

from __future__ import annotations

from gymnasium.vector import VectorEnv

from servegym.envs._vector import BatchVectorEnv
from servegym.envs.llm_routing.config import Problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.env import (
    LLMRoutingEnv,
    LLMRoutingExpertsEnv,
    LLMRoutingFlatEnv,
    LLMRoutingSummaryEnv,
)


class LLMRoutingVectorEnv(BatchVectorEnv[Problem, RoutingBatch], VectorEnv):
    """B systems of `LLMRoutingEnv`; `BatchVectorEnv` has the arguments.

    >>> import gymnasium, servegym
    >>> envs = gymnasium.make_vec("servegym/LLMRouting-v1", num_envs=4)
    >>> observation, info = envs.reset(seed=0)
    >>> observation["running"].shape, info["action_mask"].shape
    ((4, 6, 5, 6), (4, 7))
    """

    SINGLE = LLMRoutingEnv


class LLMRoutingFlatVectorEnv(LLMRoutingVectorEnv, VectorEnv):
    """B systems of `LLMRoutingFlatEnv`."""

    SINGLE = LLMRoutingFlatEnv


class LLMRoutingExpertsVectorEnv(LLMRoutingVectorEnv, VectorEnv):
    """B systems of `LLMRoutingExpertsEnv`."""

    SINGLE = LLMRoutingExpertsEnv


class LLMRoutingSummaryVectorEnv(LLMRoutingVectorEnv, VectorEnv):
    """B systems of `LLMRoutingSummaryEnv`."""

    SINGLE = LLMRoutingSummaryEnv
