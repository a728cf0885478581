"""Rollout: actions tried on copies of a native vector environment's systems, on their true future.

A policy that ranks actions so improves on the rule that follows them by one step of policy
iteration with a perfect model. It is clairvoyant, looks no further than its horizon and is no
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import BasePolicy, Observation, Policy


class RolloutPolicy(BasePolicy):
    """The action that turns out best on a copy of the environment.

    Every legal action of every row is taken on a clone of the environment's state: the true
    requests, and the arrivals that are really to come. A rule decides the next ``horizon``
    requests. Equal actions go to the rule's if it is among them.

    `bind` has to be called before `act`.

    Args:
        system: The system.
        horizon: Requests that the rule decides after the first action.
        rule: What decides in the environment and on the copies.
    """

    name = "rollout"
    env_view = "graph"
    clairvoyant = True
    needs_env = True
    batch: Callable[[Any, int], Any]
    """Makes so many copies of a problem."""
    alone = False
    """Whether the copies of each row play without those of other rows."""

    def __init__(self, system: Any, horizon: int, rule: Policy) -> None:
        super().__init__(system)
        self.horizon, self._rule = horizon, rule
        self._env: Any = None
        self._problem: Any = None
        self._copies: Any = None

    def problem_of(self, env: Any) -> Any:
        """The problem of the copies, from the native vector environment."""
        return env.problem

    def bind(self, env: Any) -> None:
        """Take the native vector environment whose observations `act` will get.

        Raises:
            ValueError: If it has no `clone_state` by row, or another reward than what is counted.
        """
        env = env.unwrapped
        if not hasattr(env, "clone_state") or not hasattr(env, "num_envs"):
            raise ValueError(f"rollout needs the native vector environment, got {type(env)}")
        self._problem = self.problem_of(env)
        self._env, self._copies = env, None

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`; row i must be the present state of the environment's system i.

        Raises:
            ValueError: If `bind` was not called, or the batch is not that environment's.
        """
        tried = np.asarray(action_mask) > 0
        batch, actions = tried.shape
        if self._env is None:
            raise ValueError("rollout needs bind(env) before act")
        if batch != self._env.num_envs:
            raise ValueError(f"rollout is bound to {self._env.num_envs} systems, got {batch} rows")
        usual = self._rule.act(observation, action_mask)
        size = 1 if self.alone else batch
        if self._copies is None or self._copies.num_rows != size * actions:
            self._copies = self.batch(self._problem, size * actions)
        states = [self._env.clone_state(row) for row in range(batch)]
        tried &= ~np.array([state.finished for state in states])[:, None]
        value = np.full(tried.shape, -np.inf)
        for row in range(0, batch, size):
            some = slice(row, row + size)
            total = self._play(states[some], tried[some])
            value[some] = np.where(tried[some], total, -np.inf)
        rows, best = np.arange(batch), value.argmax(axis=1)
        # Differences are sums of rewards: below 1e-9 they are rounding.
        same = value[rows, usual] >= value[rows, best] - 1e-9
        return np.where(tried.any(axis=1), np.where(same, usual, best), 0).astype(np.int64)

    def _play(self, states: Sequence[Any], tried: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Undiscounted rewards (B, A) of each action and of those that follow it."""
        copies, actions = self._copies, tried.shape[1]
        for row, action in np.argwhere(tried):
            copies.restore(int(row) * actions + int(action), states[row])
        live = tried.reshape(-1).astype(np.int8)
        choice = np.tile(np.arange(actions, dtype=np.int64), len(states))
        total = np.zeros(live.size)
        for _ in range(1 + self.horizon):
            copies.step(choice, live)
            *rewards, ended = copies.out.T
            total += np.where(live > 0, sum(rewards), 0.0)
            live &= ended == 0.0
            if not live.any():
                break
            choice = self._rule.act(copies.observation, copies.action_mask)
        return total.reshape(tried.shape)
