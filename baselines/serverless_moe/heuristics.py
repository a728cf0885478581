"""Heuristic policies: random, deployments, constant actions and one step of looking ahead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import servegym.baselines.serverless_moe.base as base
from servegym.baselines.protocol import BasePolicy, Observation
from servegym.baselines.serverless_moe.action_table import ActionTable
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.loads import Load


class Random(base.ServerlessPolicy):
    """Uniform over the legal values of each action."""

    name = "random"

    def act(self, observation: Observation, action_mask: base.Mask) -> base.Actions:
        """See `Policy.act`."""
        mask = np.asarray(action_mask) > 0
        ends = np.cumsum(self.system.nvec)
        columns = []
        for part in np.split(mask, ends[:-1], axis=1):
            draw = self.rng.random(part.shape)
            columns.append(np.where(part, draw, -1.0).argmax(axis=1))
        return np.stack(columns, axis=1).astype(np.int64)


class Mix(base.ServerlessPolicy):
    """Every expert local in the smallest main function (b = 0)."""

    name = "mix"

    def decide(self, row: int, observed: base.Observed, legal: NDArray[np.bool_]) -> base.Actions:
        """See `ServerlessPolicy.decide`."""
        return np.zeros(5, dtype=np.int64)


class Deployment(BasePolicy):
    """A deployment, of the environment's, that takes no decision."""

    env_view = "graph"

    def __init__(self, system: ServerlessSystem, name: str) -> None:
        self.name, self.parts = name, len(system.nvec)
        self.env_kwargs: Mapping[str, Any] = {"deployment": name}

    def act(self, observation: Observation, action_mask: base.Mask) -> base.Actions:
        """See `Policy.act`; zeros, which the environment ignores.

        Raises:
            ValueError: If there is something to decide: the environment serves by plans, and the
                numbers would be MIX's under this name.
        """
        mask = np.asarray(action_mask)
        if (mask.sum(axis=1) != self.parts).any():
            raise ValueError(
                f"policy {self.name!r} needs an environment made with deployment={self.name!r}"
            )
        return np.zeros((len(mask), self.parts), dtype=np.int64)


def mean_request_rewards(
    table: ActionTable, regime: int, *, starts: bool
) -> list[NDArray[np.float64]]:
    """Rewards of all actions for the mean request, one array for each SLO class.

    Without ``starts`` everything is warm.
    """
    system = table.system
    load = Load.predicted(
        system.model,
        system.shared,
        round(system.mean_prompt_tokens),
        round(system.mean_output_tokens),
        float(system.mean_trem_s[regime]),
        trem_sigma=system.arguments.trem_sigma,
    )
    return [
        table.values(
            load,
            system.shared,
            ttft_limit_s=float(ttft),
            tpot_limit_s=float(tpot),
            spread=system.time_spread,
            starts=starts,
        ).reward
        for ttft, tpot in system.slo
    ]


class GreedyWarm(base.ServerlessPolicy):
    """Greatest expected reward now, and what the configuration is worth if it stays warm.

    That worth is ``p / (1 - p)`` (the expected number of requests that find it warm) times what
    keeping it saves for the mean request against the best cold start. Only the shared order can
    stay warm from prompt to prompt.
    """

    name = "greedy_warm"

    def __init__(self, system: ServerlessSystem) -> None:
        super().__init__(system)
        chance = min(system.reuse_chance(), 0.99)
        self._worth = []
        for regime in range(len(system.mean_trem_s)):
            warm = np.mean(mean_request_rewards(self.table, regime, starts=False), axis=0)
            cold = mean_request_rewards(self.table, regime, starts=True)
            saved = np.maximum(warm - np.mean([c.max() for c in cold]), 0.0)
            saved[:, 0] = 0.0
            self._worth.append(chance / (1.0 - chance) * saved)

    def decide(self, row: int, observed: base.Observed, legal: NDArray[np.bool_]) -> base.Actions:
        """See `ServerlessPolicy.decide`."""
        worth = self._worth[self.system.regime(observed.last_trem_s)]
        return base.best_action(self.rewards(observed) + worth, legal)


class Constant(base.ServerlessPolicy):
    """One action (5,) for all requests, the next smaller legal b where its own is not legal."""

    action: base.Actions

    def decide(self, row: int, observed: base.Observed, legal: NDArray[np.bool_]) -> base.Actions:
        """See `ServerlessPolicy.decide`."""
        action = self.action.copy()
        lower = np.flatnonzero(legal[: action[0] + 1])
        action[0] = lower[-1] if lower.size else np.flatnonzero(legal)[0]
        return action


class KeepAlive(Constant):
    """The configuration that is best while everything stays warm, never changed."""

    name = "keep_alive"

    def __init__(self, system: ServerlessSystem) -> None:
        super().__init__(system)
        regimes = range(len(system.mean_trem_s))
        total = np.sum(
            [mean_request_rewards(self.table, regime, starts=False) for regime in regimes],
            axis=(0, 1),
        )
        total[:, 0] = -np.inf  # only the shared order stays warm from prompt to prompt
        self.action = base.best_action(total, np.ones(total.shape[0], dtype=np.bool_))


_FOUND: dict[str, base.Actions] = {}


class BestConstant(Constant):
    """The best constant action on the train split, found by a coordinate search; cached."""

    name = "best_constant"

    def __init__(self, system: ServerlessSystem, *, rows: int = 8, requests: int = 100) -> None:
        super().__init__(system)
        key = json.dumps([dict(system.arguments), rows, requests], default=id, sort_keys=True)
        if key not in _FOUND:
            _FOUND[key] = search_constant(system, rows, requests)
        self.action = _FOUND[key]


def search_constant(system: ServerlessSystem, rows: int, requests: int) -> base.Actions:
    """Rehearse on the train split: from keep_alive's action, one coordinate after the other.

    ``rows`` parallel episodes of ``requests`` requests rehearse in the environment of
    ``system.arguments``. Returns the action (5,) that no change of one coordinate improves.
    """
    from servegym.envs.serverless_moe.config import problem_of
    from servegym.envs.serverless_moe.core import ServerlessBatch
    from servegym.envs.serverless_moe.kernel import layout

    changes = {"split": "train", "episode_requests": requests, "keep_action": False}
    arguments = replace(system.arguments, view=layout.DICT, **changes)
    batch = ServerlessBatch(problem_of(arguments), rows)
    for row in range(rows):
        batch.draw(row, np.random.default_rng((0, row)))
    which = np.ones(rows, dtype=np.int8)
    scores: dict[tuple[int, ...], float] = {}

    def score(action: base.Actions) -> float:
        key = tuple(int(x) for x in action)
        if key not in scores:
            everywhere = np.repeat(system.full_action(action)[None], rows, axis=0)
            batch.begin(which)
            for _ in range(requests):
                batch.step(everywhere, which)
            scores[key] = float(batch.env["total_reward"].sum())
        return scores[key]

    action = KeepAlive(system).action.copy()
    headroom = arguments.w_headroom_mb, arguments.y_headroom_mb, arguments.z_headroom
    sizes = [len(system.levels), 2, *(len(steps) for steps in headroom)]
    while True:
        before = score(action)
        for i, size in enumerate(sizes):
            trials = np.repeat(action[None], size, axis=0)
            trials[:, i] = np.arange(size)
            action = trials[int(np.argmax([score(trial) for trial in trials]))].copy()
        if score(action) <= before:
            return action
