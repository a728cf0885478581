"""Prefix routing as a native Gymnasium vector environment: one kernel call for all systems."""

from __future__ import annotations

from gymnasium.vector import VectorEnv

from servegym.envs._vector import BatchVectorEnv
from servegym.envs.prefix_routing.config import Problem
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.envs.prefix_routing.env import (
    PrefixRoutingEnv,
    PrefixRoutingFlatEnv,
    PrefixRoutingSummaryEnv,
)


class PrefixRoutingVectorEnv(BatchVectorEnv[Problem, PrefixBatch], VectorEnv):
    """B systems of `PrefixRoutingEnv`; `BatchVectorEnv` has the arguments.

    >>> import gymnasium, servegym
    >>> envs = gymnasium.make_vec("servegym/PrefixRouting-v1", num_envs=2, warmup_requests=0)
    >>> observation, info = envs.reset(seed=0)
    >>> observation["replicas"].shape, info["action_mask"].shape
    ((2, 8, 22), (2, 8))
    """

    SINGLE = PrefixRoutingEnv


class PrefixRoutingFlatVectorEnv(PrefixRoutingVectorEnv, VectorEnv):
    """B systems of `PrefixRoutingFlatEnv`."""

    SINGLE = PrefixRoutingFlatEnv


class PrefixRoutingSummaryVectorEnv(PrefixRoutingVectorEnv, VectorEnv):
    """B systems of `PrefixRoutingSummaryEnv`."""

    SINGLE = PrefixRoutingSummaryEnv
