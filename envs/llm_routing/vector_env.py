"""LLM routing as a native Gymnasium vector environment: one kernel call for all systems."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv

from servegym._checks import whole
from servegym.envs._threads import MAX_THREADS
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
    """B systems of `LLMRoutingEnv`; `BatchVectorEnv` has the arguments but for one.

    `num_threads`: 1 (default) to 256 threads of the process that share the systems out; the numbers
    do not depend on it. Threads pay with many hundreds of systems and cost with fewer than 256.

    >>> import gymnasium, servegym
    >>> envs = gymnasium.make_vec("servegym/LLMRouting-v1", num_envs=4)
    >>> observation, info = envs.reset(seed=0)
    >>> observation["running"].shape, info["action_mask"].shape
    ((4, 6, 5, 6), (4, 7))
    """

    SINGLE = LLMRoutingEnv

    def __init__(self, num_envs: int = 1, *, num_threads: int = 1, **kwargs: Any) -> None:
        self.num_threads = whole("num_threads", num_threads, 1, MAX_THREADS)
        super().__init__(num_envs, **kwargs)

    def _make_batch(self) -> RoutingBatch:
        return RoutingBatch(self.problem, self.num_envs, self.num_threads)

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads."""
        self.batch.close()


class LLMRoutingFlatVectorEnv(LLMRoutingVectorEnv, VectorEnv):
    """B systems of `LLMRoutingFlatEnv`."""

    SINGLE = LLMRoutingFlatEnv


class LLMRoutingExpertsVectorEnv(LLMRoutingVectorEnv, VectorEnv):
    """B systems of `LLMRoutingExpertsEnv`."""

    SINGLE = LLMRoutingExpertsEnv


class LLMRoutingSummaryVectorEnv(LLMRoutingVectorEnv, VectorEnv):
    """B systems of `LLMRoutingSummaryEnv`."""

    SINGLE = LLMRoutingSummaryEnv
