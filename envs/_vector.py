"""The part of a native vector environment that no family needs to write again.

A family's batch advances B systems by one kernel call; this class gives it Gymnasium's three
autoreset modes, seeds, time limits, masked resets, final observations and information layout.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from servegym._checks import check_render_mode, choose, flag, whole
from servegym.envs._batch import B, BatchEnv, P, check_options, need_episode, warn_of_no_mode


class BatchVectorEnv(VectorEnv, Generic[P, B]):
    """B systems of a `BatchEnv` stepped together, equal to `SyncVectorEnv` bit for bit.

    Besides the arguments of the single environment it takes

    - `num_envs`: B;
    - `autoreset_mode`: `"NextStep"` (default), `"SameStep"` (with `final_obs` and `final_info`) or
      `"Disabled"` (with `reset(options={"reset_mask": ...})`);
    - `copy`: False returns the buffers themselves, which the next call overwrites;
    - `max_episode_steps`: truncates, without serving what is in the system.

    With `reset(seed=s)` system i is seeded with s + i. Rewards are float64, the arrays of the
    information carry their `_key` masks.

    Every subclass names `VectorEnv` among its bases itself: skrl's `wrap_env` looks at those alone.

    Attributes:
        SINGLE: The single environment, whose parts and arguments these systems have.
    """

    SINGLE: ClassVar[type[BatchEnv]]
    closed = True  # until it is made: what an argument refused holds nothing to close
    batch: B
    problem: P

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
        single = self.SINGLE
        self.num_envs = whole("num_envs", num_envs, 1)
        if not isinstance(autoreset_mode, AutoresetMode):
            modes = {mode.value: mode for mode in AutoresetMode}
            autoreset_mode = modes[choose("autoreset_mode", autoreset_mode, modes)]
        self.autoreset_mode = autoreset_mode
        self.metadata = {**single.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = check_render_mode(render_mode, single.metadata["render_modes"])
        if max_episode_steps is not None:
            max_episode_steps = whole("max_episode_steps", max_episode_steps, 1)
        self.max_episode_steps = max_episode_steps
        self.copy = flag("copy", copy)
        self.validate = flag("validate", validate)
        self.problem = single.make_problem(kwargs)
        self.batch = single.make_batch(self.problem, self.num_envs)
        self.single_observation_space = single.make_observation_space(self.problem)
        self.single_action_space = single.make_action_space(self.problem)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._generators: list[np.random.Generator | None] = [None] * self.num_envs
        self._seeds: list[int] = [-1] * self.num_envs
        self._steps = np.zeros(self.num_envs, dtype=np.int64)
        self._done = np.ones(self.num_envs, dtype=bool)
        self._any_done = True
        self._begun = np.zeros(self.num_envs, dtype=bool)
        # Shared by every info in which all systems have the key; nobody may write to it.
        self._all = np.ones(self.num_envs, dtype=bool)
        self._all.flags.writeable = False
        self._which = np.ones(self.num_envs, dtype=np.int8)
        self.closed = False

    def _check_actions(self, actions: Any) -> Any:
        """The actions as `Batch.step` takes them; ValueError for a wrong shape or type."""
        actions = np.asarray(actions)
        shape = self.action_space.shape
        if actions.shape != shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions must be whole numbers of shape {shape}, got shape {actions.shape} and "
                f"dtype {actions.dtype}."
            )
        return np.ascontiguousarray(actions, dtype=np.int64)

    def render(self) -> tuple[Any, ...] | None:
        """One frame for each system, as the single environment renders it."""
        if self.render_mode is None:
            return warn_of_no_mode()
        self._need_episodes("render")
        rows = range(self.num_envs)
        return tuple(self.SINGLE.frame(self.batch, row, self.render_mode) for row in rows)

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:
        """The generators of the systems."""
        return tuple(self._generator(row) for row in range(self.num_envs))

    @property
    def np_random_seed(self) -> tuple[int, ...]:
        """The seeds of the systems' generators."""
        self.np_random  # noqa: B018 - those not seeded yet are now
        return tuple(self._seeds)

    def _generator(self, row: int) -> np.random.Generator:
        generator = self._generators[row]
        if generator is None:
            generator, self._seeds[row] = seeding.np_random()
            self._generators[row] = generator
        return generator

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Draw new episodes, in all systems or those of ``options["reset_mask"]``.

        Raises:
            ValueError: seeds or mask have the wrong length or type, or another option is given.
        """
        settings = check_options(options, ("reset_mask",))
        if seed is None:
            seeds: list[int | None] = [None] * self.num_envs
        elif isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + row for row in range(self.num_envs)]
        else:
            seeds = list(seed)
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed lists {len(seeds)} seeds for num_envs={self.num_envs}.")
        which = np.ones(self.num_envs, dtype=bool)
        if "reset_mask" in settings:
            which = np.asarray(settings["reset_mask"])
            if which.shape != (self.num_envs,) or which.dtype != np.bool_ or not which.any():
                raise ValueError(
                    f"options['reset_mask'] must be a boolean array of shape ({self.num_envs},) "
                    f"with at least one True, got {settings['reset_mask']!r}."
                )
        for row in np.flatnonzero(which):
            if seeds[row] is not None:
                self._generators[row], self._seeds[row] = seeding.np_random(seeds[row])
        self._begin(which)
        with_mask = self._all if which.all() else which.copy()
        info = {**self._mask_info(with_mask), **self._reset_info(which)}
        return self._observation(), info

    def _begin(self, which: np.ndarray) -> None:
        for row in np.flatnonzero(which).tolist():
            self.batch.draw(row, self._generator(row))
        self.batch.begin(which.astype(np.int8))
        self._steps[which] = 0
        self._begun[which], self._done[which] = True, False
        self._any_done = bool(self._done.any())

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Apply one action to every system.

        Args:
            actions: A batch of the single environment's actions.

        Raises:
            ResetNeeded: a system was never reset, or it ended and autoreset is disabled.
            ValueError: the actions have the wrong shape, type or range.
        """
        if self._any_done:
            self._need_episodes("step")
        actions = self._check_actions(actions)
        batch = self.batch
        if self._any_done:
            stale = self._done
            if self.autoreset_mode is AutoresetMode.DISABLED:
                raise ResetNeeded(
                    f"Systems {np.flatnonzero(stale).tolist()} have ended: reset them with "
                    "options={'reset_mask': ...} (autoreset_mode is Disabled)."
                )
            live = ~stale
            ended = batch.step(actions, live.astype(np.int8))
            batch.out[stale] = 0.0
            self._begin(stale.copy())
        else:
            live = self._all
            ended = batch.step(actions, self._which)
        rewards = batch.out[:, 0] + 0.0  # as the sum of a single environment, never a minus zero
        for column in range(1, batch.out.shape[1] - 1):
            rewards += batch.out[:, column]
        terminations = batch.out[:, -1] != 0.0
        if self.max_episode_steps is None:
            truncations = np.zeros(self.num_envs, dtype=bool)
            done = terminations
        else:
            self._steps[live] += 1
            truncations = self._steps >= self.max_episode_steps
            done = terminations | truncations
            ended = int(done.sum())
        if ended and self.autoreset_mode is AutoresetMode.SAME_STEP:
            info = {
                "final_obs": self._final_observations(done),
                "final_info": self._info(done, ended=terminations),
                "_final_obs": done.copy(),
                "_final_info": done.copy(),
            }
            self._begin(done)
            info.update(self._info(live & ~done, masks=self._all))
            info.update(self._reset_info(done))
        else:
            if ended:
                self._done, self._any_done = done.copy(), True
            info = self._info(live, ended=terminations if ended else None, masks=self._all)
            if live is not self._all:
                info.update(self._reset_info(~live))
        return self._observation(), rewards, terminations, truncations, info

    def _info(
        self,
        stepped: np.ndarray,
        ended: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Information in the layout of Gymnasium's vector environments.

        ``stepped`` have reward terms, ``ended`` key figures, ``masks`` (default: stepped) an
        action mask.
        """
        info = self._mask_info(stepped if masks is None else masks)
        if stepped is self._all or stepped.any():
            terms: dict[str, Any] = {}
            for column, name in enumerate(self.batch.terms):
                values = self.batch.out[:, column]
                terms[name] = (
                    values.copy() if stepped is self._all else np.where(stepped, values, 0.0)
                )
                terms[f"_{name}"] = stepped
            info["reward_terms"] = terms
            info["_reward_terms"] = stepped
        if ended is not None:
            for row in np.flatnonzero(ended).tolist():
                self._add_info(info, {"episode_kpis": self.batch.kpis(row)}, row)
        return info

    def _mask_info(self, which: np.ndarray) -> dict[str, Any]:
        """The masks of the systems in ``which``."""
        masks: np.ndarray = self.batch.action_mask.copy()
        if not masks.size:
            return {}
        if which is not self._all:
            masks *= which[:, None]
        return {"action_mask": masks, "_action_mask": which}

    def _reset_info(self, which: np.ndarray) -> dict[str, Any]:
        """What the systems in ``which`` that were just reset tell besides the mask."""
        info: dict[str, Any] = {}
        for row in np.flatnonzero(which).tolist():
            self._add_info(info, self.SINGLE.reset_info(self.batch, row), row)
        return info

    def _final_observations(self, done: np.ndarray) -> np.ndarray:
        final = np.full(self.num_envs, None, dtype=object)
        observation = self.batch.observation
        for row in np.flatnonzero(done):
            if isinstance(observation, dict):
                final[row] = {name: part[row].copy() for name, part in observation.items()}
            else:
                final[row] = observation[row].copy()
        return final

    def _observation(self) -> Any:
        """What is handed out: a copy of the batch's, or that itself."""
        observation = self.batch.fresh_observation() if self.copy else self.batch.observation
        if self.validate and not self.observation_space.contains(observation):
            raise AssertionError("an observation is outside its space")
        return observation

    def _need_episodes(self, what: str, rows: int | slice = slice(None)) -> None:
        need_episode(what, bool(self._begun[rows].all()))

    def action_masks(self) -> np.ndarray:
        """Boolean masks ``(B, A)`` of the legal actions."""
        self._need_episodes("tell the masks")
        return self.batch.action_mask.astype(bool)

    def request_log(self, index: int) -> np.ndarray:
        """One row per request of the current episode of a system."""
        self._need_episodes("tell the log", index)
        return self.batch.request_log(index)

    def clone_state(self, index: int) -> Any:
        """An exact copy of one system, its generator included."""
        self._need_episodes("clone", index)
        state = self.batch.clone(index)
        state.random = self._generator(index).bit_generator.state
        state.finished = bool(self._done[index])
        return state

    def restore_state(self, index: int, state: Any) -> None:
        """Put a cloned state into one system."""
        self.batch.restore(index, state)
        if state.random is not None:
            self._generator(index).bit_generator.state = state.random
        self._begun[index], self._done[index] = True, state.finished
        self._any_done = bool(self._done.any())
        self._steps[index] = int(state.env["index"][0])

    def observe(self) -> tuple[Any, np.ndarray]:
        """The current observation and int8 action mask ``(B, A)``, as after ``step``."""
        self._need_episodes("observe")
        return self._observation(), self.batch.action_mask.copy()
