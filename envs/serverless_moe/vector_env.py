"""Serverless MoE partitioning as a native vector environment: one kernel call for all systems."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode

from servegym.envs._checks import whole
from servegym.envs._vector import BatchVectorEnv, autoreset
from servegym.envs.serverless_moe import kernel
from servegym.envs.serverless_moe.core import ServerlessBatch, observation_space
from servegym.envs.serverless_moe.env import (
    RENDER_MODES,
    action_space,
    check_render_mode,
    make_problem,
)


class ServerlessMoEVectorEnv(BatchVectorEnv):
    """B systems of `ServerlessMoEEnv` stepped together, equal to `SyncVectorEnv` bit for bit.

    Besides the arguments of the single environment it takes

    - `num_envs`: B;
    - `autoreset_mode`: `"NextStep"` (default), `"SameStep"` (with `final_obs` and `final_info`) or
      `"Disabled"` (with `reset(options={"reset_mask": ...})`);
    - `copy`: False returns the buffers themselves, which the next call overwrites;
    - `max_episode_steps`: truncates.

    With `reset(seed=s)` system i is seeded with s + i. Rewards are float64, the arrays of the
    information carry their `_key` masks.

    >>> from servegym.envs.serverless_moe.vector_env import ServerlessMoEVectorEnv
    >>> envs = ServerlessMoEVectorEnv(4, model="toy")
    >>> observation, info = envs.reset(seed=0)
    >>> observation["activations"].shape, info["action_mask"].shape
    ((4, 4, 8), (4, 30))
    """

    VIEW: ClassVar[int] = kernel.DICT
    batch: ServerlessBatch

    def __init__(
        self,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        validate: bool = False,
        **kwargs: Any,
    ) -> None:
        num_envs, mode = whole("num_envs", num_envs, 1), autoreset(autoreset_mode)
        self.metadata = {
            "render_modes": list(RENDER_MODES),
            "render_fps": 4,
            "autoreset_mode": mode,
        }
        self.render_mode = check_render_mode(render_mode)
        self.problem = make_problem(self.VIEW, kwargs)
        super().__init__(
            ServerlessBatch(self.problem, num_envs),
            observation_space(self.problem),
            action_space(self.problem),
            autoreset_mode=mode,
            copy=copy,
            max_episode_steps=max_episode_steps,
            validate=validate,
        )

    def _check_actions(self, actions: Any) -> np.ndarray:
        actions = np.asarray(actions)
        shape = (self.num_envs, len(self.problem.nvec))
        if actions.shape != shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions must be whole numbers of shape {shape}, got shape {actions.shape} and "
                f"dtype {actions.dtype}."
            )
        return np.ascontiguousarray(actions, dtype=np.int64)

    def _steps_of(self, state: Any) -> int:
        return int(state.env["index"][0])

    def _info(
        self,
        stepped: np.ndarray,
        ended: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> dict[str, Any]:
        info = super()._info(stepped, ended, masks)
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

    def render(self) -> tuple[Any, ...] | None:
        """One frame for each system, see `ServerlessMoEEnv.render`."""
        if self.render_mode is None:
            return None
        from servegym.envs.serverless_moe.render import render

        return tuple(render(self.batch, row, self.render_mode) for row in range(self.num_envs))


class ServerlessMoEFlatVectorEnv(ServerlessMoEVectorEnv):
    """B systems of `ServerlessMoEFlatEnv`."""

    VIEW = kernel.FLAT
