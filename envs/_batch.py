"""The part of a single environment that no family over a batch of systems needs to write again."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from servegym._checks import check_render_mode, flag, mapping
from servegym.envs._arguments import Arguments
from servegym.envs._columns import Column, table

_OF_EVERY_ENV = (
    "| | `validate` | `False` | | check every observation against the space (slow) |",
    "| | `render_mode` | `None` | `ansi`, `rgb_array` | what `render` returns |",
)


def need_methods(cls: type, base: type, more: Sequence[str] = ()) -> None:
    """TypeError if a class, at its definition, lacks what its base leaves open, or ``more``."""
    left = [name for name, one in vars(base).items() if getattr(one, "__isabstractmethod__", False)]
    lacking = [
        name
        for name in (*more, *left)
        if getattr(getattr(cls, name, None), "__isabstractmethod__", not hasattr(cls, name))
    ]
    if lacking:
        raise TypeError(f"{cls.__name__} lacks {', '.join(lacking)}, see {base.__name__}.")


class Batch(ABC):
    """B systems of one problem, advanced together.

    A family writes the abstract methods: a class that lacks one fails when it is defined.

    Attributes:
        observation: Buffers with a leading axis of B, an array or a dict of arrays.
        action_mask: int8 ``(B, A)``; with A = 0 nothing is masked, and no information has a mask.
        out: float64 ``(B, T + 1)``: the T parts of the last reward, then whether the episode ended.
        terms: Names of the reward's parts, of the first ones if there are fewer names than parts.
    """

    observation: Any
    action_mask: np.ndarray
    out: np.ndarray
    terms: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        need_methods(cls, Batch)

    @abstractmethod
    def draw(self, row: int, random: np.random.Generator) -> None:
        """Draw the next episode of a row."""

    @abstractmethod
    def begin(self, which: np.ndarray) -> None:
        """Start the drawn episodes of the rows with ``which`` (int8 ``(B,)``) set."""

    @abstractmethod
    def step(self, actions: Any, which: np.ndarray) -> int:
        """Apply an action to each row with ``which`` set, and go on to its next decision.

        Returns:
            How many episodes ended.

        Raises:
            ValueError: an action is out of range; nothing has changed then.
        """

    @abstractmethod
    def kpis(self, row: int) -> dict[str, float]:
        """Key figures of the episode so far."""

    @abstractmethod
    def request_log(self, row: int) -> np.ndarray:
        """One record per request of the current episode."""

    @abstractmethod
    def clone(self, row: int) -> Any:
        """Copy one system; the copy has ``random`` and ``finished``."""

    @abstractmethod
    def restore(self, row: int, state: Any) -> None:
        """Put a copied system back in a row and write its observation.

        Raises:
            ValueError: the state is of a system of other sizes.
        """

    @staticmethod
    def check_state(name: str, current: np.ndarray, copied: np.ndarray, same: bool) -> None:
        """ValueError unless an array of a copied state is the ``same`` in kind as the batch's."""
        if not same:
            raise ValueError(
                f"state.{name} has shape {copied.shape}, this environment needs {current.shape}: "
                "restore a state into an environment made with the same arguments."
            )

    @staticmethod
    def out_of_range(actions: np.ndarray, row: int, words: str) -> ValueError:
        """The error of a row's action that is none of those in ``words``."""
        action = actions[row].tolist()
        return ValueError(f"action {action} of system {row} is out of range: {words}.")

    def row_views(self, row: int) -> Any:
        """Views of a row's observation."""
        obs = self.observation
        return {name: x[row] for name, x in obs.items()} if isinstance(obs, dict) else obs[row]

    def fresh_observation(self) -> Any:
        """A copy of the observation."""
        if isinstance(self.observation, dict):
            return {name: part.copy() for name, part in self.observation.items()}
        return self.observation.copy()


def need_episode(what: str, begun: bool) -> None:
    """ResetNeeded unless an episode was begun."""
    if not begun:
        raise ResetNeeded(f"Cannot {what}: call reset() to begin an episode first.")


def check_options(options: Any, allowed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The ``options`` of a reset, whose keys are all ``allowed``.

    Raises:
        ValueError: Naming the key and those that are allowed.
    """
    result = mapping("options", options)
    for key in result:
        if key not in allowed:
            takes = f"known are {', '.join(allowed)}" if allowed else "a reset takes no options"
            raise ValueError(
                f"options has the key {key!r}, but {takes}; what describes the system is an "
                "argument of gymnasium.make."
            )
    return result


def warn_of_no_mode() -> None:
    """What `render` does in an environment that was made without a mode."""
    gym.logger.warn("render() needs render_mode='ansi' or 'rgb_array' given to make().")


P = TypeVar("P")  # a family's Problem
B = TypeVar("B", bound=Batch)


class BatchEnv(gym.Env, Generic[P, B]):
    """A Gymnasium environment over a `Batch` of one system.

    A family writes the abstract methods: a class that lacks one fails when it is defined. What a
    step tells beside the reward's terms it adds in `_add_info`. An action is a whole number, which
    `action_words` explains, or a family checks its own in `_put_action`. `BatchVectorEnv` calls the
    same methods.

    Before the first reset there is nothing to step, copy, render or report: ResetNeeded. After an
    episode's end all but `step` tells of that episode; `close` holds nothing and ends nothing.

    Attributes:
        view: What the kernel writes as observation, 0 where there is nothing to choose.
        arguments: The record of the arguments; its table takes the place of ``{arguments}`` in the
            docstring.
        problem_of: A record -> problem.
        columns: Parts of the observation by name; their tables take the place of ``{name}``.
    """

    view: ClassVar[int] = 0
    arguments: ClassVar[type[Arguments]]
    problem_of: ClassVar[Callable[..., Any]]
    columns: ClassVar[Mapping[str, Sequence[Column]]] = {}
    problem: P
    batch: B

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        need_methods(cls, BatchEnv, ("arguments", "problem_of"))
        if cls.__doc__ is not None:
            tables = {"arguments": "\n".join((*cls.arguments.table(), *_OF_EVERY_ENV))}
            tables |= {name: table(columns) for name, columns in cls.columns.items()}
            cls.__doc__ = inspect.cleandoc(cls.__doc__)
            for name, lines in tables.items():
                cls.__doc__ = cls.__doc__.replace(f"{{{name}}}", lines)

    @staticmethod
    @abstractmethod
    def make_batch(problem: Any, num_rows: int) -> Any:
        """A `Batch` of systems of a problem."""

    @staticmethod
    @abstractmethod
    def make_observation_space(problem: Any) -> spaces.Space:
        """The observation space of one system."""

    @staticmethod
    @abstractmethod
    def make_action_space(problem: Any) -> spaces.Space:
        """The action space of one system."""

    @staticmethod
    @abstractmethod
    def frame(batch: Any, row: int, mode: str) -> Any:
        """A system as text or pixels."""

    @staticmethod
    def action_words(problem: Any) -> str:
        """What the whole numbers of a Discrete action space mean, for messages."""
        return "a whole number"

    def __init__(
        self, *, render_mode: str | None = None, validate: bool = False, **kwargs: Any
    ) -> None:
        self.render_mode = check_render_mode(render_mode, self.metadata["render_modes"])
        self.validate = flag("validate", validate)
        self.problem = self.make_problem(kwargs)
        self.batch = self.make_batch(self.problem, 1)
        self.observation_space = self.make_observation_space(self.problem)
        self.action_space = self.make_action_space(self.problem)
        self._which = np.ones(1, dtype=np.int8)
        self._action: Any = np.zeros((1, *(self.action_space.shape or ())), dtype=np.int64)
        self._begun = False
        self._finished = True
        self._make_views()

    @classmethod
    def make_problem(cls, kwargs: Mapping[str, Any]) -> Any:
        """The checked arguments and what they describe.

        Raises:
            ValueError: an argument is unknown or has a bad value.
        """
        return cls.problem_of(cls.arguments.fill(kwargs, cls.view))

    @staticmethod
    def reset_info(batch: Any, row: int) -> dict[str, Any]:
        """What a family tells at a reset of a system, besides the mask."""
        return {}

    def _put_action(self, action: Any) -> None:
        """Write the action into ``_action``; ValueError for a wrong shape, type or range."""
        if not isinstance(action, (int, np.integer)):
            array = np.asarray(action)
            if array.shape != () or array.dtype.kind not in "iu":
                raise ValueError(
                    f"action={action!r} must be one whole number "
                    f"({self.action_words(self.problem)}), not {type(action).__name__} of "
                    f"shape {array.shape} and dtype {array.dtype}."
                )
            action = int(array)
        try:
            self._action[0] = action
        except OverflowError:
            words = self.action_words(self.problem)
            raise ValueError(f"action={action!r} is out of range: {words}.") from None

    def _add_info(self, info: dict[str, Any]) -> None:
        """Add what a family tells of the last step."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Draw an episode and return its first observation.

        Raises:
            ValueError: There are options; none are known.
        """
        check_options(options)
        super().reset(seed=seed)
        self.batch.draw(0, self.np_random)
        self.batch.begin(self._which)
        self._begun, self._finished = True, False
        return self._observation(), {**self._mask_info(), **self.reset_info(self.batch, 0)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply the action and go on to the next decision.

        Raises:
            ResetNeeded: the episode has ended, or none was begun.
            ValueError: the action has a wrong shape, type or range.
        """
        if self._finished:
            need_episode("step", False)
        self._put_action(action)
        self.batch.step(self._action, self._which)
        parts = self._out.tolist()
        terminated = parts.pop() != 0.0
        info = self._mask_info()
        info["reward_terms"] = dict(zip(self.batch.terms, parts, strict=False))
        self._add_info(info)
        if terminated:
            self._finished = True
            info["episode_kpis"] = self.batch.kpis(0)
        reward = 0.0
        for part in parts:  # in turn, as the vector environment; Python 3.12's sum of floats is not
            reward += part
        return self._observation(), reward, terminated, False, info

    def _mask_info(self) -> dict[str, Any]:
        return {"action_mask": self._mask.copy()} if self._mask.size else {}

    def _observation(self) -> Any:
        views = self._views
        if isinstance(views, dict):
            observation: Any = {name: part.copy() for name, part in views.items()}
        else:
            observation = views.copy()
        if self.validate and not self.observation_space.contains(observation):
            raise AssertionError(f"observation outside its space: {observation}")
        return observation

    def action_masks(self) -> np.ndarray:
        """Boolean ``(A,)`` mask of the present choice, as sb3-contrib asks for it."""
        need_episode("tell the masks", self._begun)
        return self._mask.astype(bool)

    def request_log(self) -> np.ndarray:
        """One row per request of the current episode, see ``REQUEST_LOG`` of the family's core."""
        need_episode("tell the log", self._begun)
        return self.batch.request_log(0)

    def episode_kpis(self) -> dict[str, float]:
        """Key figures of the current episode so far."""
        need_episode("tell the key figures", self._begun)
        return self.batch.kpis(0)

    def clone_state(self) -> Any:
        """An exact copy of the whole state, the random generator's included."""
        need_episode("clone", self._begun)
        state = self.batch.clone(0)
        state.random = self.np_random.bit_generator.state
        state.finished = self._finished
        return state

    def restore_state(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """Go back to a cloned state; returns its observation and info like ``reset``."""
        self.batch.restore(0, state)
        if state.random is not None:
            self.np_random.bit_generator.state = state.random
        self._begun, self._finished = True, state.finished
        return self._observation(), self._mask_info()

    def render(self) -> Any:
        """The system now: text (ansi) or uint8 (H, W, 3) pixels (rgb_array)."""
        if self.render_mode is None:
            return warn_of_no_mode()
        need_episode("render", self._begun)
        return self.frame(self.batch, 0, self.render_mode)

    def _make_views(self) -> None:
        self._out = self.batch.out[0]
        self._mask = self.batch.action_mask[0]
        self._views = self.batch.row_views(0)

    def __getstate__(self) -> dict[str, Any]:
        # Views of the batch's buffers are made anew: pickled, they would become copies.
        names = ("_out", "_mask", "_views")
        return {name: value for name, value in self.__dict__.items() if name not in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_views()
