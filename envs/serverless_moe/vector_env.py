"""Serverless MoE partitioning as a native vector environment: one kernel call for all systems."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from servegym.envs._vector import BatchVectorEnv
from servegym.envs.serverless_moe.config import Problem
from servegym.envs.serverless_moe.core import ServerlessBatch
from servegym.envs.serverless_moe.env import ServerlessMoEEnv, ServerlessMoEFlatEnv


class ServerlessMoEVectorEnv(BatchVectorEnv[Problem, ServerlessBatch], VectorEnv):
    """B systems of `ServerlessMoEEnv`; `BatchVectorEnv` has the arguments.

    >>> from servegym.envs.serverless_moe.vector_env import ServerlessMoEVectorEnv
    >>> envs = ServerlessMoEVectorEnv(4, model="toy")
    >>> observation, info = envs.reset(seed=0)
    >>> observation["activations"].shape, info["action_mask"].shape
    ((4, 4, 8), (4, 30))
    """

    SINGLE = ServerlessMoEEnv

    def _info(self, stepped: np.ndarray, *args: Any, **kwargs: Any) -> dict[str, Any]:
        info = super()._info(stepped, *args, **kwargs)
        if stepped is self._all or stepped.any():
            values, flags = self.batch.values()
            for name, value in values.items():
                info[name] = np.where(stepped, value, 0.0)
                info[f"_{name}"] = stepped
            info["violations"] = {}
            for name, flag in flags.items():
                info["violations"][name] = flag & stepped
                info["violations"][f"_{name}"] = stepped
            info["_violations"] = stepped
        return info


class ServerlessMoEFlatVectorEnv(ServerlessMoEVectorEnv, VectorEnv):
    """B systems of `ServerlessMoEFlatEnv`."""

    SINGLE = ServerlessMoEFlatEnv
