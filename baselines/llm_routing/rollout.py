"""Rollout: try every action on a copy of the true state. Clairvoyant, and not an upper bound."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import whole
from servegym.baselines.llm_routing.fleets import per_fleet
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy
from servegym.baselines.llm_routing.heuristics import Mask, RoutingPolicy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation


class Rollout(RoutingPolicy):
    """The action that turns out best on a copy of the environment.

    Every legal action of every row is taken on a clone of the environment's state: true scores
    and lengths, and the arrivals that are really to come. `PricedGreedy` decides the next
    ``horizon`` requests. The sum of the "paid_forward" rewards, the true score of what was let in
    less that of what ended late, ranks the actions; equal ones go to the greedy action if it is
    among them. It improves on priced_greedy by one step of policy iteration with a perfect model
    and is no bound.

    `bind` has to be called before `act`.

    Args:
        system: The system.
        horizon: Requests that priced_greedy decides after the first action.

    Raises:
        ValueError: If ``horizon`` is negative.
    """

    name = "rollout"
    clairvoyant = True
    needs_env = True

    def __init__(self, system: RoutingSystem, *, horizon: int = 100) -> None:
        super().__init__(system)
        self.horizon = whole("horizon", horizon, 0)
        self.greedy = per_fleet(PricedGreedy, system)
        self._ahead = per_fleet(PricedGreedy, system)
        self._env: Any = None
        self._scratch: Any = None

    def bind(self, env: Any) -> None:
        """Take the native vector environment whose observations `act` will get.

        Raises:
            ValueError: If it has no `clone_state` by row.
        """
        from servegym.envs.llm_routing.config import build_problem
        from servegym.envs.llm_routing.kernel import layout

        env = env.unwrapped
        if not hasattr(env, "clone_state") or not hasattr(env, "num_envs"):
            raise ValueError(f"rollout needs the native vector environment, got {type(env)}")
        self._env = env
        # The same problem with another reward: the dynamics do not depend on it.
        arguments = {**env.problem.arguments, "reward": "paid_forward"}
        self._problem = build_problem(view=layout.GRAPH, **arguments)
        self._scratch = None

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`; row i must be the present state of the environment's system i.

        Raises:
            ValueError: If `bind` was not called, or the batch is not that environment's.
        """
        from servegym.envs.llm_routing.core import RoutingBatch

        batch, actions = np.asarray(action_mask).shape
        if self._env is None:
            raise ValueError("rollout needs bind(env) before act")
        if batch != self._env.num_envs:
            raise ValueError(f"rollout is bound to {self._env.num_envs} systems, got {batch} rows")
        if self._scratch is None or self._scratch.num_rows != batch * actions:
            self._scratch = RoutingBatch(self._problem, batch * actions)
        scratch = self._scratch
        tried = np.asarray(action_mask) > 0
        for row in range(batch):
            state = self._env.clone_state(row)
            tried[row] &= not state.finished
            for action in np.flatnonzero(tried[row]):
                scratch.restore(row * actions + int(action), state)
        greedy = self.greedy.act(observation, action_mask)
        live = tried.reshape(-1).astype(np.int8)
        total = np.zeros(live.size)
        choice = np.tile(np.arange(actions, dtype=np.int64), batch)
        decided = scratch.env["index"]
        last = decided + 1 + self.horizon
        while live.any():
            scratch.step(choice, live)
            total += np.where(live > 0, scratch.out[:, 0] + scratch.out[:, 1], 0.0)
            live &= (scratch.out[:, 2] == 0.0) & (decided < last)
            choice = self._ahead.act(scratch.observation, scratch.action_mask)
        value = np.where(tried, total.reshape(batch, actions), -np.inf)
        rows = np.arange(batch)
        best = value.argmax(axis=1)
        # Differences are sums of scores: below 1e-9 they are rounding.
        same = value[rows, greedy] >= value[rows, best] - 1e-9
        return np.where(tried.any(axis=1), np.where(same, greedy, best), 0).astype(np.int64)
