"""Policies of the serverless MoE environments: Remoe's readings, rivals and clairvoyant bounds.

With an action a layer, Remoe's readings choose Y and z layer by layer; the others choose among the
global actions (b, order, W, Y, z) and give every layer the same step. A row's decision depends on
its own observation alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import BasePolicy, Observation
from servegym.baselines.serverless_moe.action_values import Warm
from servegym.baselines.serverless_moe.actions import ActionTable
from servegym.baselines.serverless_moe.loads import Load
from servegym.baselines.serverless_moe.remoe import remoe
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe import equations as eq

Mask = NDArray[np.integer[Any]]
Actions = NDArray[np.int64]
TIME_SPREAD = 0.05
"""Relative standard deviation of true times about the expected ones that the policies assume."""


@dataclass(frozen=True, eq=False)
class Seen:
    """One row of an observation.

    Attributes:
        frequency: float32 (L, K) predicted.
        n_in: Prompt tokens.
        n_out: Predicted generated tokens.
        ttft_limit_s: TTFT limit.
        tpot_limit_s: TPOT limit.
        last_trem_s: Mean overhead at the last request.
        warm: What is warm, or None.
    """

    frequency: NDArray[np.float32]
    n_in: int
    n_out: int
    ttft_limit_s: float
    tpot_limit_s: float
    last_trem_s: float
    warm: Warm | None

    @property
    def live(self) -> bool:
        """Whether there is a request (not at an episode's end)."""
        return self.n_in > 0


def see(system: ServerlessSystem, observation: Observation, row: int) -> Seen:
    """Read one row of the Dict observation."""
    model = system.model
    lengths, slo = observation["lengths"][row], observation["slo"][row]
    flag, main, ratio, order, same = (float(x) for x in observation["warm_main"][row])
    warm = None
    if flag > 0.5:
        remote = np.asarray(observation["warm_remote"][row], np.float64)
        warm = Warm(
            main_mb=round(main * float(model.main_specs_mb[-1]), 2),
            level=int(np.argmin(np.abs(system.levels / model.num_experts - ratio))),
            order=int(order > 0.5),
            same=same > 0.5,
            remote_mb=np.round(remote[:, 0] * model.remote_specs_mb[-1], 2),
            replicas=np.rint(remote[:, 1] * model.z_max).astype(np.int64),
        )
    return Seen(
        np.asarray(observation["activations"][row]),
        round(float(lengths[0])),
        max(1, round(float(lengths[1]))),
        float(slo[0]),
        float(slo[1]),
        float(observation["t_rem"][row][0]),
        warm,
    )


class ServerlessPolicy(BasePolicy):
    """A policy of a serverless system that decides row by row."""

    def __init__(self, system: ServerlessSystem) -> None:
        self.system = system
        self.table = ActionTable(system)

    def expected(self, seen: Seen) -> Load:
        """The load that the observation lets expect."""
        mean, worst = self.system.expected_trem_s(seen.last_trem_s)
        return Load.predicted(
            self.system.model,
            seen.frequency,
            seen.n_in,
            seen.n_out,
            mean,
            np.full(self.system.model.moe_layers, worst),
        )

    def rewards(self, seen: Seen, load: Load | None = None, **kwargs: Any) -> NDArray[np.float64]:
        """Expected reward of every global action given what is warm, (levels, 2, W, Y, Z)."""
        load = load or self.expected(seen)
        return self.table.values(load, seen.frequency, **self._given(seen, kwargs)).reward

    def reward(self, seen: Seen, action: Actions) -> float:
        """Expected reward of one action given what is warm."""
        return self.table.reward(
            self.expected(seen), seen.frequency, action, **self._given(seen, {})
        )

    @staticmethod
    def _given(seen: Seen, kwargs: dict[str, Any]) -> dict[str, Any]:
        limits = {"ttft_limit_s": seen.ttft_limit_s, "tpot_limit_s": seen.tpot_limit_s}
        return {"spread": TIME_SPREAD, "warm": seen.warm, **limits, **kwargs}

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """Action (5,) of a row with a request, or (len(nvec),) with an action a layer.

        Args:
            row: The row.
            seen: Its observation.
            legal: (levels,) values of b that the mask allows.
        """
        raise NotImplementedError

    def act(self, observation: Observation, action_mask: Mask) -> Actions:
        """See `Policy.act`; int64 (B, len(nvec))."""
        mask = np.asarray(action_mask)
        actions = np.zeros((mask.shape[0], len(self.system.nvec)), dtype=np.int64)
        for row in range(mask.shape[0]):
            seen = see(self.system, observation, row)
            if seen.live:
                legal = mask[row, : len(self.system.levels)] > 0
                actions[row] = self.system.full_action(self.decide(row, seen, legal))
        return actions


def best(values: NDArray[np.float64], legal: NDArray[np.bool_]) -> Actions:
    """The legal action of greatest value, the first among equals."""
    masked = np.where(legal[:, None, None, None, None], values, -np.inf)
    return np.array(np.unravel_index(int(masked.argmax()), values.shape), dtype=np.int64)


class Random(ServerlessPolicy):
    """Uniform over the legal values of each action."""

    name = "random"

    def act(self, observation: Observation, action_mask: Mask) -> Actions:
        """See `Policy.act`."""
        mask = np.asarray(action_mask) > 0
        ends = np.cumsum(self.system.nvec)
        columns = []
        for part in np.split(mask, ends[:-1], axis=1):
            draw = self.rng.random(part.shape)
            columns.append(np.where(part, draw, -1.0).argmax(axis=1))
        return np.stack(columns, axis=1).astype(np.int64)


class Mix(ServerlessPolicy):
    """Every expert local in the smallest main function (b = 0)."""

    name = "mix"

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        return np.zeros(5, dtype=np.int64)


def mean_request_rewards(
    table: ActionTable, regime: int, *, starts: bool
) -> list[NDArray[np.float64]]:
    """Rewards of all actions for the mean request, one array for each SLO class.

    Args:
        table: The actions.
        regime: Regime of the invocation overhead.
        starts: False if everything is warm.
    """
    system = table.system
    trem = float(system.trem_s[regime]) * float(np.exp(0.5 * system.trem_sigma**2))
    load = Load.predicted(
        system.model,
        system.shared,
        round(system.mean_prompt_tokens),
        round(system.mean_output_tokens),
        trem,
    )
    return [
        table.values(
            load,
            system.shared,
            ttft_limit_s=float(ttft),
            tpot_limit_s=float(tpot),
            spread=TIME_SPREAD,
            starts=starts,
        ).reward
        for ttft, tpot in system.slo
    ]


class GreedyWarm(ServerlessPolicy):
    """Greatest expected reward now, and what the configuration is worth if it stays warm.

    That worth is ``p / (1 - p)`` (the expected number of requests that find it warm) times what
    keeping it saves for the mean request against the best cold start. Only the shared order can be
    kept from prompt to prompt.
    """

    name = "greedy_warm"

    def __init__(self, system: ServerlessSystem) -> None:
        super().__init__(system)
        chance = min(system.reuse_chance(), 0.99)
        self._worth = []
        for regime in range(system.trem_s.size):
            kept = np.mean(mean_request_rewards(self.table, regime, starts=False), axis=0)
            cold = mean_request_rewards(self.table, regime, starts=True)
            saved = np.maximum(kept - np.mean([c.max() for c in cold]), 0.0)
            saved[:, 0] = 0.0
            self._worth.append(chance / (1.0 - chance) * saved)

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        worth = self._worth[self.system.regime(seen.last_trem_s)]
        return best(self.rewards(seen) + worth, legal)


class Remoe(ServerlessPolicy):
    """The paper's controller: Algorithm 2, utility, P2 and Eq. 15, put on the action grid."""

    name = "remoe"
    reading = "remoe"
    order = 0
    """Experts are ordered by the prompt's prediction (0) or by the shared mean (1)."""

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        system = self.system
        decision = remoe(
            system.model,
            self.expected(seen),
            ttft_limit_s=seen.ttft_limit_s,
            tpot_limit_s=seen.tpot_limit_s,
            reading=self.reading,
            max_tokens=system.max_output_tokens,
            decode_invocation=system.decode_invocation,
            bill_cold_start=system.bill_cold_start,
            load_shared=system.load_shared,
            members=system.levels[legal].tolist(),
            candidates=9,
            score=system.shared if self.order else None,
        )
        return self.on_grid(seen, decision.plan)

    def on_grid(self, seen: Seen, plan: eq.Plan) -> Actions:
        """The action whose plan is nearest to this one.

        Falling short counts double: less memory or fewer replicas can make a plan infeasible. With
        an action a layer every layer takes its own nearest steps, else all the same ones.
        """
        table, used = self.table, plan.remote.any(axis=1)
        level = int(np.argmin(np.abs(self.system.levels - plan.remote[0].sum())))
        s = 2 * level + self.order
        w = int(np.argmin(np.abs(table.main_mb[s] - plan.main_mb)))
        sets = table.sets(seen.frequency)
        steps = []
        for have, want in (
            (table.memory_mb(sets, seen.n_in)[s], plan.remote_mb[:, None]),
            (table.replicas(sets, seen.n_in)[s], plan.replicas[:, None]),
        ):
            distance = np.abs(have - want) + np.maximum(want - have, 0)
            distance[~used] = 0.0
            if not self.system.per_layer:
                distance = distance.sum(axis=0, keepdims=True)
            steps.append(distance.argmin(axis=1))
        return np.concatenate([[level, self.order, w], *steps]).astype(np.int64)


class RemoeCost(Remoe):
    """Remoe with the b of least expected cost among those that Algorithm 2 allows."""

    name = "remoe_cost"
    reading = "remoe_cost"


class RemoeSticky(RemoeCost):
    """remoe_cost that keeps a warm configuration while that is expected to be better.

    It uses the shared order, in which other prompts find the functions warm.
    """

    name = "remoe_sticky"
    order = 1

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._last = np.zeros((num_envs, len(self.system.nvec)), dtype=np.int64)
        self._known = np.zeros(num_envs, dtype=np.bool_)
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Forget the last action."""
        self._known[mask] = False

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        action = super().decide(row, seen, legal)
        last = self._last[row]
        if self._known[row] and seen.warm is not None and legal[last[0]]:
            if self.reward(seen, last) >= self.reward(seen, action):
                action = last.copy()
        self._last[row], self._known[row] = action, True
        return action


class Constant(ServerlessPolicy):
    """One action for all requests, the next smaller legal b where its own is not legal."""

    def constant(self) -> Actions:
        """The action (5,)."""
        raise NotImplementedError

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        action = self.constant().copy()
        lower = np.flatnonzero(legal[: action[0] + 1])
        action[0] = lower[-1] if lower.size else np.flatnonzero(legal)[0]
        return action


class KeepAlive(Constant):
    """The configuration that is best while everything stays warm, never changed."""

    name = "keep_alive"

    def __init__(self, system: ServerlessSystem) -> None:
        super().__init__(system)
        regimes = range(system.trem_s.size)
        total = np.sum(
            [mean_request_rewards(self.table, regime, starts=False) for regime in regimes],
            axis=(0, 1),
        )
        total[:, 0] = -np.inf  # only the shared order stays warm from prompt to prompt
        self._action = best(total, np.ones(total.shape[0], dtype=np.bool_))

    def constant(self) -> Actions:
        """See `Constant.constant`."""
        return self._action


_FOUND: dict[str, Actions] = {}


class BestConstant(Constant):
    """The best constant action on the train split, found by a coordinate search; cached."""

    name = "best_constant"

    def __init__(
        self, system: ServerlessSystem, *, rows: int = 8, requests: int = 100, seed: int = 0
    ) -> None:
        super().__init__(system)
        if rows < 1 or requests < 1:
            raise ValueError(f"rows and requests must be at least 1, got {rows} and {requests}")
        key = json.dumps([dict(system.arguments), rows, requests, seed], default=id, sort_keys=True)
        if key not in _FOUND:
            _FOUND[key] = search_constant(system, rows, requests, seed)
        self._action = _FOUND[key]

    def constant(self) -> Actions:
        """See `Constant.constant`."""
        return self._action


def search_constant(system: ServerlessSystem, rows: int, requests: int, seed: int) -> Actions:
    """Rehearse on the train split: from keep_alive's action, one coordinate after the other.

    Args:
        system: The system; its ``arguments`` make the rehearsals' environment.
        rows: Parallel episodes.
        requests: Requests of an episode.
        seed: Seed of the episodes.

    Returns:
        (5,), the action that no change of one coordinate improves.
    """
    from servegym.envs.serverless_moe import kernel
    from servegym.envs.serverless_moe.config import build_problem
    from servegym.envs.serverless_moe.core import ServerlessBatch

    arguments = {**system.arguments, "split": "train", "episode_requests": requests}
    batch = ServerlessBatch(build_problem(view=kernel.DICT, **arguments), rows)
    for row in range(rows):
        batch.draw(row, np.random.default_rng((seed, row)))
    which = np.ones(rows, dtype=np.int8)
    scores: dict[tuple[int, ...], float] = {}

    def score(action: Actions) -> float:
        key = tuple(int(x) for x in action)
        if key not in scores:
            everywhere = np.repeat(system.full_action(action)[None], rows, axis=0)
            batch.begin(which)
            for _ in range(requests):
                batch.step(everywhere, which)
            scores[key] = float(batch.env["total_reward"].sum())
        return scores[key]

    action = KeepAlive(system).constant().copy()
    sizes = [
        len(system.levels),
        2,
        *(int(n) for n in system.nvec[2:3]),
        len(system.y_headroom_mb),
        len(system.z_headroom),
    ]
    while True:
        before = score(action)
        for i, size in enumerate(sizes):
            trials = np.repeat(action[None], size, axis=0)
            trials[:, i] = np.arange(size)
            action = trials[int(np.argmax([score(trial) for trial in trials]))].copy()
        if score(action) <= before:
            return action
