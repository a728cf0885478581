"""Expert placement as a native Gymnasium vector environment, whose systems share one problem."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from servegym.envs._vector import BatchVectorEnv
from servegym.envs.expert_placement.config import Problem
from servegym.envs.expert_placement.core import PlacementBatch, check_action
from servegym.envs.expert_placement.env import ExpertPlacementEnv


class ExpertPlacementVectorEnv(BatchVectorEnv[Problem, PlacementBatch], VectorEnv):
    """B systems of `ExpertPlacementEnv` over one cluster and one set of prompts.

    A step of one system is millions of events in one kernel call, so that systems are stepped one
    after the other; what they share is loaded once. `BatchVectorEnv` has the arguments.

    >>> from servegym.envs.expert_placement.vector_env import ExpertPlacementVectorEnv
    >>> envs = ExpertPlacementVectorEnv(2, model="toy")
    >>> observation, info = envs.reset(seed=0)
    >>> observation["counts"].shape
    (2, 3, 4, 8)
    """

    SINGLE = ExpertPlacementEnv

    def _check_actions(self, actions: Any) -> list[tuple[bool, np.ndarray]]:
        """Each system's action, of ``migrate`` ``(B,)`` and ``plan`` ``(B, ...)``."""
        if not isinstance(actions, dict) or set(actions) != {"migrate", "plan"}:
            keys = f" with the keys {list(actions)}" if isinstance(actions, dict) else ""
            raise ValueError(
                f"actions is a {type(actions).__name__}{keys}; it must be a dict of 'migrate' and "
                "'plan', arrays with a row for each system."
            )
        parts = {}
        for name, value in actions.items():
            try:
                parts[name] = np.asarray(value)
            except ValueError:  # rows of unlike shapes
                raise ValueError(f"actions[{name!r}] must be an array, got rows unlike.") from None
            if parts[name].shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"actions[{name!r}] has shape {parts[name].shape}; it must have "
                    f"{self.num_envs} rows, one for each system."
                )
        checked = []
        for row in range(self.num_envs):
            action = {name: part[row] for name, part in parts.items()}
            try:
                checked.append(check_action(action, self.single_action_space))
            except ValueError as error:
                raise ValueError(f"system {row}: {error}") from None
        return checked

    def _info(self, stepped: np.ndarray, *args: Any, **kwargs: Any) -> dict[str, Any]:
        info = super()._info(stepped, *args, **kwargs)
        if stepped.any():
            info["adopted"], info["_adopted"] = self.batch.adopted & stepped, stepped
        return info
