"""Rollout: try every replica on a copy of the true state. Clairvoyant, and not an upper bound."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import whole
from servegym.baselines.prefix_routing.plugins import GatewayPolicy
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.protocol import BasePolicy, Observation

CONSTANTS = {
    "prefill_load_scale": 5.4,
    "overlap_score_credit": 2.6,
    "decode_active_request_weight": 0.2,
}
"""Of Dynamo's cost: the best single set of ``experiments/results/prefix/tuned_rules``."""


class Rollout(BasePolicy):
    """The replica that turns out best on a copy of the environment.

    Every legal action of every row is taken on a clone of the environment's state: the true caches,
    lengths and arrivals to come. Dynamo's cost with tuned constants (`CONSTANTS`) routes the next
    ``horizon`` requests. The action with most requests within both objectives by then is taken;
    equal ones go to what Dynamo's cost would take if it is among them. That is one step of policy
    iteration with a perfect model: it looks no further than its horizon and is no bound.

    Args:
        system: The system.
        horizon: Requests that the rule routes after the action.

    Raises:
        ValueError: If ``horizon`` is below 1.
    """

    name = "rollout"
    env_view = "graph"
    clairvoyant = True
    needs_env = True

    def __init__(self, system: PrefixSystem, horizon: int = 60) -> None:
        super().__init__(system)
        self.horizon = whole("horizon", horizon, 1, 1 << 20)
        self._rule = GatewayPolicy(system, "dynamo", CONSTANTS)
        self._rule.reset(1, 0)
        self._env: Any = None
        self._scratch: Any = None

    def bind(self, env: Any) -> None:
        """Take the native vector environment whose observations `act` will get.

        Raises:
            ValueError: If it has no `clone_state` by row, or pays by the time to first token.
        """
        env = env.unwrapped
        if not hasattr(env, "clone_state") or not hasattr(env, "num_envs"):
            raise ValueError(f"rollout needs the native vector environment, got {type(env)}")
        if env.batch.terms != ("met",):
            raise ValueError("rollout counts the requests within the objectives: reward='slo'")
        self._env, self._scratch = env, None

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`; row i must be the present state of the environment's system i.

        Raises:
            ValueError: If `bind` was not called, or the batch is not that environment's.
        """
        from servegym.envs.prefix_routing.core import PrefixBatch

        tried = np.asarray(action_mask) > 0
        batch, actions = tried.shape
        if self._env is None:
            raise ValueError("rollout needs bind(env) before act")
        if batch != self._env.num_envs:
            raise ValueError(f"rollout is bound to {self._env.num_envs} systems, got {batch} rows")
        if self._rule.num_envs < max(batch, actions):
            self._rule.reset(max(batch, actions), 0)  # a source of chance for each row
        usual = self._rule.act(observation, action_mask)
        if self._scratch is None or self._scratch.num_rows != actions:
            self._scratch = PrefixBatch(self._env.problem, actions)
        chosen = np.zeros(batch, np.int64)
        for row in range(batch):
            state = self._env.clone_state(row)
            if state.finished or not tried[row].any():
                continue
            met = self._ahead(state, tried[row])
            same = met[usual[row]] == met.max()
            chosen[row] = usual[row] if same else met.argmax()
        return chosen

    def _ahead(self, state: Any, tried: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Requests within both objectives (A,) after each action; -inf for those not allowed."""
        scratch = self._scratch
        for action in np.flatnonzero(tried):
            scratch.restore(int(action), state)
        live = tried.astype(np.int8)
        choice = np.arange(len(tried), dtype=np.int64)
        met = np.zeros(len(tried))
        for _ in range(1 + self.horizon):
            scratch.step(choice, live)
            met += np.where(live > 0, scratch.out[:, 0], 0.0)
            live &= (scratch.out[:, 1] == 0.0).astype(np.int8)
            if not live.any():
                break
            choice = self._rule.act(scratch.observation, scratch.action_mask)
        return np.where(tried, met, -np.inf)
