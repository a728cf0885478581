"""Expert placement as a vector environment whose systems share one problem."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from servegym._checks import check_render_mode, flag, whole
from servegym.envs._vector import autoreset
from servegym.envs.expert_placement.core import PlacementState
from servegym.envs.expert_placement.env import ExpertPlacementEnv, check_action, make_problem


class ExpertPlacementVectorEnv(SyncVectorEnv):
    """B systems of `ExpertPlacementEnv` over one cluster and one set of prompts.

    A step of one system is millions of events in one kernel call, so that systems are stepped one
    after the other; what they share is loaded once. Besides the arguments of the single
    environment it takes `num_envs`, `autoreset_mode` (`"NextStep"`, `"SameStep"`, `"Disabled"`),
    `copy` and `max_episode_steps`.

    >>> from servegym.envs.expert_placement.vector_env import ExpertPlacementVectorEnv
    >>> envs = ExpertPlacementVectorEnv(2, model="toy")
    >>> observation, info = envs.reset(seed=0)
    >>> observation["counts"].shape
    (2, 3, 4, 8)
    """

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
        num_envs, autoreset_mode = whole("num_envs", num_envs, 1), autoreset(autoreset_mode)
        copy, validate = flag("copy", copy), flag("validate", validate)
        check_render_mode(render_mode, ExpertPlacementEnv.metadata["render_modes"])
        problem = make_problem(kwargs)
        if max_episode_steps is not None:
            max_episode_steps = whole("max_episode_steps", max_episode_steps, 1)

        def make() -> gym.Env:
            env: gym.Env = ExpertPlacementEnv(
                render_mode=render_mode, validate=validate, problem=problem
            )
            if max_episode_steps is not None:
                env = gym.wrappers.TimeLimit(env, max_episode_steps)
            return env

        super().__init__([make] * num_envs, copy=copy, autoreset_mode=autoreset_mode)
        # The functions that made the systems are not needed again and cannot be pickled.
        self.env_fns = []
        self.problem = problem
        self.max_episode_steps = max_episode_steps

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every system; see `ExpertPlacementEnv.step`.

        Args:
            actions: ``migrate`` (B,) and ``plan`` (B, ...), a row for each system.

        Raises:
            ValueError: a part or row is missing or malformed; no system has moved then.
        """
        if not isinstance(actions, dict) or set(actions) != {"migrate", "plan"}:
            keys = f" with the keys {list(actions)}" if isinstance(actions, dict) else ""
            raise ValueError(
                f"actions is a {type(actions).__name__}{keys}; it must be a dict of 'migrate' and "
                "'plan', arrays with a row for each system."
            )
        parts = {}
        for name, given in actions.items():
            try:
                parts[name] = np.asarray(given)
            except ValueError:  # rows of unlike shapes
                raise ValueError(f"actions[{name!r}] must be an array, got rows unlike.") from None
            if parts[name].shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"actions[{name!r}] has shape {parts[name].shape}; it must have "
                    f"{self.num_envs} rows, one for each system."
                )
        for b in range(self.num_envs):
            row = {name: part[b] for name, part in parts.items()}
            try:
                check_action(row, self.single_action_space)
            except ValueError as error:
                raise ValueError(f"system {b}: {error}") from None
        return super().step(actions)

    def _system(self, index: int) -> ExpertPlacementEnv:
        env = self.envs[index].unwrapped
        assert isinstance(env, ExpertPlacementEnv)
        return env

    def request_log(self, index: int) -> np.ndarray:
        """One row per request that has arrived in the current episode of a system."""
        return self._system(index).request_log()

    def clone_state(self, index: int) -> PlacementState:
        """An exact copy of one system, its generator included."""
        return self._system(index).clone_state()

    def restore_state(self, index: int, state: PlacementState) -> None:
        """Put a cloned state into one system."""
        self._system(index).restore_state(state)
