"""LLM routing as a native Gymnasium vector environment: one kernel call for all systems."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from servegym.envs._checks import whole
from servegym.envs._vector import BatchVectorEnv, autoreset
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.core import RoutingBatch, observation_space
from servegym.envs.llm_routing.env import RENDER_MODES, check_render_mode, make_problem


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

    VIEW: ClassVar[int] = kernel.GRAPH
    batch: RoutingBatch

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
            "render_fps": 8,
            "autoreset_mode": mode,
        }
        self.render_mode = check_render_mode(render_mode)
        self.problem = make_problem(self.VIEW, kwargs)
        super().__init__(
            RoutingBatch(self.problem, num_envs),
            observation_space(self.problem),
            spaces.Discrete(self.problem.num_experts + 1),
            autoreset_mode=mode,
            copy=copy,
            max_episode_steps=max_episode_steps,
            validate=validate,
        )

    def _check_actions(self, actions: Any) -> np.ndarray:
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions must be whole numbers of shape ({self.num_envs},), got shape "
                f"{actions.shape} and dtype {actions.dtype}."
            )
        return np.ascontiguousarray(actions, dtype=np.int64)

    def _steps_of(self, state: Any) -> int:
        return int(state.env["index"][0])

    def render(self) -> tuple[Any, ...] | None:
        """One frame for each system, see `LLMRoutingEnv.render`."""
        if self.render_mode is None:
            return None
        from servegym.envs.llm_routing.render import render

        return tuple(render(self.batch, row, self.render_mode) for row in range(self.num_envs))


class LLMRoutingFlatVectorEnv(LLMRoutingVectorEnv):
    """B systems of `LLMRoutingFlatEnv`."""

    VIEW = kernel.FLAT


class LLMRoutingExpertsVectorEnv(LLMRoutingVectorEnv):
    """B systems of `LLMRoutingExpertsEnv`."""

    VIEW = kernel.EXPERTS
