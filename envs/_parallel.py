"""The part of a PettingZoo environment that no family needs to write again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from pettingzoo import ParallelEnv

from servegym._checks import check_render_mode, flag
from servegym.envs._batch import B, BatchEnv, P, need_episode, need_methods, warn_of_no_mode


class BatchParallelEnv(ParallelEnv, Generic[P, B]):
    """Several agents in one system of a `Batch`, the one that a `BatchEnv` has.

    A family sets `possible_agents` and their spaces, writes `step` and `_observations`, and names
    `ParallelEnv` among its bases for skrl, as subclasses of `BatchVectorEnv` do `VectorEnv`.

    Attributes:
        single: The single environment, whose arguments and observation it has.
        state_space: Space of `state`.
    """

    metadata: ClassVar[dict[str, Any]]
    single: type[BatchEnv]
    problem: P
    batch: B

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        need_methods(cls, BatchParallelEnv)

    def __init__(
        self, kwargs: Mapping[str, Any], shared_reward: bool, render_mode: str | None
    ) -> None:
        self.render_mode = check_render_mode(render_mode, self.metadata["render_modes"])
        self.shared_reward = flag("shared_reward", shared_reward)
        self.problem = self.single.make_problem(kwargs)
        self.batch = self.single.make_batch(self.problem, 1)
        self.agents: list[str] = []
        self._inner: Any = self.single.make_observation_space(self.problem)
        self.state_space = spaces.flatten_space(self._inner)
        self._which = np.ones(1, dtype=np.int8)
        self._random: np.random.Generator | None = None

    def observation_space(self, agent: str) -> spaces.Space:
        """The observation space of an agent."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space:
        """The action space of an agent."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw an episode and return everyone's first observation.

        There are no ``options``; those that PettingZoo's own tests give change nothing.
        """
        random = self._random
        if seed is not None or random is None:
            random, _ = seeding.np_random(seed)
            self._random = random
        self._draw(random)
        self.batch.begin(self._which)
        self.agents = list(self.possible_agents)
        # Without keys where no fleet is drawn: TorchRL takes those of the first reset for all there
        # will ever be, and numbers only.
        infos = {agent: self.single.reset_info(self.batch, 0) for agent in self.agents}
        return self._observations(), infos

    def _draw(self, random: np.random.Generator) -> None:
        """Draw the next episode."""
        self.batch.draw(0, random)

    @abstractmethod
    def step(self, actions: dict[str, Any]) -> Any:
        """Apply everyone's actions, see PettingZoo's ``ParallelEnv``."""

    @abstractmethod
    def _observations(self) -> dict[str, Any]:
        """What each agent sees, in fresh arrays."""

    def state(self) -> np.ndarray:
        """What the single environment would see, flattened, for centralised critics."""
        need_episode("tell the state", self._random is not None)
        return np.asarray(spaces.flatten(self._inner, self.batch.row_views(0)))

    def request_log(self) -> np.ndarray:
        """One row per request of the current episode, see ``REQUEST_LOG`` of the family's core."""
        need_episode("tell the log", self._random is not None)
        return self.batch.request_log(0)

    def render(self) -> Any:
        """The whole system, as the single environment renders it."""
        if self.render_mode is None:
            return warn_of_no_mode()
        need_episode("render", self._random is not None)
        return self.single.frame(self.batch, 0, self.render_mode)

    def close(self) -> None:
        """Nothing is held open."""
