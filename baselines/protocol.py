"""What every policy of the project is: a batch-first function of observation and action mask.

A policy is built from a static description of the system that it serves (what an operator knows)
and sees observations, masks and the starts of episodes, nothing else. Rows of a batch are separate
episodes that never influence one another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from servegym._checks import choose, whole
from servegym.envs.families import family_named

Observation = Mapping[str, NDArray[Any]]

VALIDATION = 1_000_000
"""Least number of a drawn fleet or setting for validation; those of a training lie below."""


class SystemDescription:
    """What an operator knows of a system before any request arrives; policies are made from it.

    It holds nothing about the requests of an episode; policies get those by observation only.
    """

    family: ClassVar[str]

    @classmethod
    def from_problem(cls, problem: Any) -> Self:
        """Describe the system of an environment's ``env.unwrapped.problem``."""
        raise NotImplementedError

    @classmethod
    def from_env(cls, env: Any) -> Self:
        """Describe the system of an environment of the family, single or vector, wrapped or not.

        Raises:
            ValueError: If it is none.
        """
        problem = getattr(getattr(env, "unwrapped", env), "problem", None)
        if type(problem).__module__ != f"servegym.envs.{cls.family}.config":
            kind = type(env).__name__
            raise ValueError(f"env must be a {cls.family} environment, got {kind}")
        return cls.from_problem(problem)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """Describe the system that ``gymnasium.make(id, **kwargs)`` would build.

        Arguments that concern episodes alone (rate, split, reward, ...) make no difference.

        Raises:
            ValueError: As the environment does for an unknown or bad argument.
        """
        module = import_module(f"servegym.envs.{cls.family}.env")
        name = family_named(cls.family).views["graph"].partition("-")[0]
        return cls.from_problem(getattr(module, f"{name}Env").make_problem(kwargs))


class Policy:
    """A policy for a batch of B environments; by default without state or learning.

    Args:
        system: Description of the system that it serves, as `registry.make_policy` and
            `policy_file.policy_from_file` pass it. A subclass without ``__init__`` of its own
            finds it as ``self.system``.

    Attributes:
        name: The name shown in tables.
        clairvoyant: True if the policy uses what a router cannot know (true scores, true lengths,
            future arrivals). Such a policy is marked in every table, and so is every policy with
            ``needs_env``.
        env_view: The observation it reads: ``"graph"`` is the Dict id, ``"flat"`` and
            ``"experts"`` and ``"summary"`` are the Box ids (some trained checkpoints), ``""`` is
            that of the id that it is evaluated on.
        observation_shapes: Shape of each part of the observation that it was trained on, ``""`` for
            that of a Box; without an ``env_view`` it gets the view that has them. Empty: any.
        needs_env: True if `bind` must be called with the vector environment before `reset`.
        needs_outcomes: True if `outcomes` is to be told which requests have ended (LLM routing and
            prefix routing only).
        env_kwargs: Environment arguments that the policy asks for, for instance
            ``{"action_mode": "placement"}``. They change the interface, never the world: an
            evaluation refuses others from all but the package's own policies.
    """

    name: str = "policy"
    clairvoyant: bool = False
    env_view: str = ""
    observation_shapes: Mapping[str, list[int]] = MappingProxyType({})
    needs_env: bool = False
    needs_outcomes: bool = False
    env_kwargs: Mapping[str, Any] = MappingProxyType({})

    num_envs: int = 0
    rng: np.random.Generator

    def __init__(self, system: Any = None) -> None:
        self.system = system

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``num_envs`` rows, all at an episode's start."""
        self._size(num_envs, seed)
        self.episode_start(np.ones(self.num_envs, dtype=np.bool_))

    def _size(self, num_envs: int, seed: int | None) -> None:
        self.num_envs = whole("num_envs", num_envs, 1)
        # A stream of its own: environments seeded alike must not draw the same numbers.
        self.rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Reset the state of the rows in ``mask`` (B,), whose next observation is a first one."""

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """Choose one action a row.

        Args:
            observation: Arrays with leading axis B; one array where the id has a Box.
            action_mask: int8, 1 = legal: (B, N + 1) for routing; (B, sum of the values of all
                parts) for serverless, the parts one after another; None for placement, where
                every action is legal.

        Returns:
            What the vector environment takes. Routing (`Discrete`): int64 (B,), 0 drops.
            Serverless (`MultiDiscrete`): int64 (B, 5), the values of b, order, w, y and z (with
            ``granularity="per_layer"`` (B, 3 + 2 L)). Placement (`Dict`): ``{"migrate": int64 (B,),
            "plan": (B, ...)}``, where the plan's shape goes by ``action_mode``.
        """
        raise NotImplementedError

    def feedback(self, reward: NDArray[np.float64]) -> None:
        """Learn from the rewards (B,) of the actions returned by the last `act`; ignored."""

    def outcomes(self, ended: NDArray[Any]) -> None:
        """Learn what became of the requests that ended since the last decision; ignored.

        Args:
            ended: Records (K,), the `OUTCOME` of the family's module ``outcomes`` in
                `servegym.envs`; told before `feedback`, only with ``needs_outcomes``.
        """

    def bind(self, env: Any) -> None:
        """Take the vector environment; only policies with ``needs_env`` have a use for it."""
        if self.needs_env:
            raise NotImplementedError(f"{self.name} needs an environment and must define bind()")


BasePolicy = Policy
"""The name by which policies, those of users' files too, derive from it."""


class CallablePolicy(BasePolicy):
    """A policy around ``fn(observation, action_mask) -> actions``.

    Args:
        fn: Gets arrays with a leading axis of B and returns B actions; without ``batched`` it gets
            one decision's arrays and returns one action.
        name: Name in tables.
        batched: Whether ``fn`` takes a batch.
        clairvoyant: Whether it uses what a controller cannot know.
        env_view: Observation that it reads, see `Policy`.
        env_kwargs: Environment arguments that it asks for, as in ``{"action_mode": "placement"}``.
    """

    def __init__(
        self,
        fn: Callable[[Observation, Any], Any],
        name: str = "callable",
        *,
        batched: bool = True,
        clairvoyant: bool = False,
        env_view: str = "",
        env_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if not callable(fn):
            raise ValueError(f"fn must be callable as fn(observation, action_mask), got {fn!r}")
        self._fn = fn
        self.name = name
        self.batched = batched
        self.clairvoyant = clairvoyant
        self.env_view = choose("env_view", env_view, ("", "graph", "flat", "experts", "summary"))
        self.env_kwargs: Mapping[str, Any] = dict(env_kwargs)

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """Call the function; whole numbers, one a row, are checked against the mask's width."""
        if self.batched:
            chosen = self._fn(observation, action_mask)
        else:
            chosen = _stacked(
                [self._fn(*_row(observation, action_mask, row)) for row in range(self.num_envs)]
            )
        return self._checked(chosen, action_mask)

    def _checked(self, chosen: Any, action_mask: Any) -> Any:
        if isinstance(chosen, Mapping) or action_mask is None:
            return chosen
        chosen = np.asarray(chosen)
        batch, actions = action_mask.shape
        if chosen.shape[:1] != (batch,) or not np.issubdtype(chosen.dtype, np.integer):
            raise ValueError(
                f"policy {self.name!r} must return integers of shape ({batch},), "
                f"got {chosen.dtype} of shape {chosen.shape}"
            )
        if chosen.ndim == 1 and ((chosen < 0) | (chosen >= actions)).any():
            raise ValueError(
                f"policy {self.name!r} must return actions in 0..{actions - 1}, "
                f"got {chosen.min()}..{chosen.max()}"
            )
        return chosen.astype(np.int64)


class PredictPolicy(CallablePolicy):
    """A policy around ``predict(observation, ...) -> (actions, state)``, as of Stable-Baselines3.

    It gets batches, and by their names what it takes of ``state`` (what it returned before),
    ``episode_start`` (bool (B,)), ``deterministic`` (True) and ``action_masks`` (bool). It may
    return the actions alone.

    Args:
        predict: The function; an ``observation_space`` of its object tells what it reads.
        name: Name in tables.
        env_view: Observation that it reads, see `Policy`.
    """

    def __init__(self, predict: Callable[..., Any], name: str, env_view: str = "") -> None:
        super().__init__(predict, name, env_view=env_view)
        self._takes = set(inspect.signature(predict).parameters)
        space = getattr(getattr(predict, "__self__", None), "observation_space", None)
        self.observation_shapes = {} if space is None else shapes_of(space)

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._state = None
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """See `Policy.episode_start`."""
        self._starts = np.array(mask, dtype=np.bool_)

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """Call ``predict`` and check its whole numbers as `CallablePolicy` does."""
        known = {"state": self._state, "episode_start": self._starts, "deterministic": True}
        if action_mask is not None:
            known["action_masks"] = action_mask.astype(np.bool_)
        told = {name: value for name, value in known.items() if name in self._takes}
        predict: Any = self._fn
        answer = predict(observation, **told)
        chosen, self._state = answer if isinstance(answer, tuple) else (answer, None)
        self._starts = np.zeros_like(self._starts)
        return self._checked(chosen, action_mask)


def shapes_of(space: spaces.Space) -> dict[str, list[int]]:
    """The shape of each part of a Dict space, that of another one as ``""``."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    return {name: list(part.shape or ()) for name, part in parts.items()}


def _row(observation: Any, action_mask: Any, row: int) -> tuple[Any, Any]:
    """One row of a batch of observations and masks."""
    if isinstance(observation, Mapping):
        observation = {key: part[row] for key, part in observation.items()}
    else:
        observation = observation[row]
    return observation, None if action_mask is None else action_mask[row]


def _stacked(actions: list[Any]) -> Any:
    """Actions of single rows as a batch, part by part where they are dicts."""
    if isinstance(actions[0], Mapping):
        return {key: np.stack([np.asarray(a[key]) for a in actions]) for key in actions[0]}
    return np.stack([np.asarray(action) for action in actions])
