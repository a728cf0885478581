"""Policies of the serverless MoE environments: Remoe's readings, rivals and clairvoyant bounds.

All choose among the global actions (b, order, W, Y, z); with an action a layer, every layer gets
the same step. A row's decision depends on its own observation alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import BasePolicy, Observation
from servegym.baselines.serverless.actions import ActionTable, Warm
from servegym.baselines.serverless.loads import Load
from servegym.baselines.serverless.remoe import remoe
from servegym.baselines.serverless.system import ServerlessSystem
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
        """Expected reward of every action given what is warm, (levels, 2, W, Y, Z)."""
        kwargs = {"spread": TIME_SPREAD, "warm": seen.warm, **kwargs}
        return self.table.values(
            load or self.expected(seen),
            seen.frequency,
            ttft_limit_s=seen.ttft_limit_s,
            tpot_limit_s=seen.tpot_limit_s,
            **kwargs,
        ).reward

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """Action (5,) of a row with a request.

        Args:
            row: The row.
            seen: Its observation.
            legal: (levels,) values of b that the mask allows.
        """
        raise NotImplementedError

    def act(self, observation: Observation, action_mask: Mask) -> Actions:
        """See `Policy.act`; int64 (B, len(nvec))."""
        mask = np.asarray(action_mask)
        actions = np.zeros((mask.shape[0], 5), dtype=np.int64)
        for row in range(mask.shape[0]):
            seen = see(self.system, observation, row)
            if seen.live:
                legal = mask[row, : len(self.system.levels)] > 0
                actions[row] = self.decide(row, seen, legal)
        return self.system.full_action(actions)


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
        )
        return self.on_grid(seen, decision.plan)

    def on_grid(self, seen: Seen, plan: eq.Plan) -> Actions:
        """The action whose plan is nearest to this one, in the prompt's own order.

        Falling short counts double: less memory or fewer replicas can make a plan infeasible.
        """

        def distance(have: NDArray[Any], want: NDArray[Any]) -> int:
            return int((np.abs(have - want) + np.maximum(want - have, 0)).sum(axis=0).argmin())

        table, used = self.table, plan.remote.any(axis=1)
        level = int(np.argmin(np.abs(self.system.levels - plan.remote[0].sum())))
        s = 2 * level
        w = int(np.argmin(np.abs(table.main_mb[s] - plan.main_mb)))
        y = z = 0
        if used.any():
            sets = table.sets(seen.frequency)
            memory = table.memory_mb(sets, seen.n_in)[s][used]
            y = distance(memory, plan.remote_mb[used, None])
            count = table.replicas(sets, seen.n_in)[s][used]
            z = distance(count, plan.replicas[used, None])
        return np.array([level, 0, w, y, z], dtype=np.int64)


class RemoeCost(Remoe):
    """Remoe with the b of least expected cost among those that Algorithm 2 allows."""

    name = "remoe_cost"
    reading = "remoe_cost"


class RemoeSticky(RemoeCost):
    """remoe_cost that keeps a warm configuration while that is expected to be better.

    It uses the shared order, in which other prompts find the functions warm.
    """

    name = "remoe_sticky"

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._last = np.zeros((num_envs, 5), dtype=np.int64)
        self._known = np.zeros(num_envs, dtype=np.bool_)
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Forget the last action."""
        self._known[mask] = False

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        action = super().decide(row, seen, legal)
        action[1] = 1
        last = self._last[row]
        if self._known[row] and seen.warm is not None and legal[last[0]]:
            rewards = self.rewards(seen)
            if rewards[tuple(last)] >= rewards[tuple(action)]:
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
    sizes = [len(system.levels), 2, *(int(n) for n in system.nvec[2:3]),
             len(system.y_headroom_mb), len(system.z_headroom)]  # fmt: skip
    while True:
        before = score(action)
        for i, size in enumerate(sizes):
            trials = np.repeat(action[None], size, axis=0)
            trials[:, i] = np.arange(size)
            action = trials[int(np.argmax([score(trial) for trial in trials]))].copy()
        if score(action) <= before:
            return action


class Clairvoyant(ServerlessPolicy):
    """A policy that reads the true requests of the bound environment."""

    clairvoyant = True
    needs_env = True

    def bind(self, env: Any) -> None:
        """Take the vector environment, for the true routing, lengths and overheads."""
        inner = getattr(env, "unwrapped", env)
        if not hasattr(getattr(inner, "batch", None), "arrays"):
            raise ValueError(
                f"{self.name} needs the native serverless environment, got {type(env).__name__}"
            )
        self._batch = inner.batch
        self._problem = inner.problem

    def position(self, row: int) -> int:
        """Index of the row's current request."""
        return int(self._batch.env["index"][row])

    def true_load(self, row: int, index: int) -> tuple[Load, Seen]:
        """A request of the row's episode as it is, and what is seen of it (nothing warm)."""
        problem, arrays = self._problem, self._batch.arrays
        asked = arrays.requests[row, index]
        prompt, n_in, n_out = (int(asked[k]) for k in ("prompt", "n_in", "n_out"))
        start, end = problem.activations.bank_start[prompt : prompt + 2]
        places = (int(asked["offset"]) + np.arange(n_in + n_out)) % int(end - start)
        bank = problem.activations.bank[start:end]
        members = eq.set_bits(bank, self.system.model.num_experts)
        times = np.bincount(places[:n_in], minlength=len(bank))
        counts = np.tensordot(times, members, axes=(0, 0))
        request = eq.Request(
            counts.astype(np.int64), bank[places[n_in:]], arrays.trem[row, index + 1].copy(), n_in
        )
        seen = Seen(
            problem.predicted[prompt],
            n_in,
            n_out,
            float(asked["ttft_limit"]),
            float(asked["tpot_limit"]),
            0.0,
            None,
        )
        return Load.known(request), seen


class GridOptimum(Clairvoyant):
    """The best action for the current request as it really is, given what is warm."""

    name = "grid_optimum"

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        load, _ = self.true_load(row, self.position(row))
        return best(self.rewards(seen, load, spread=0.0), legal)


class Lookahead(Clairvoyant):
    """Plans a whole episode as it really is by dynamic programming over kept configurations.

    The state is the configuration that is warm. At each request it either keeps one of the
    ``configurations`` most wanted shared ones (warm if the same was used last and the gap is short)
    or takes the best action for a cold start. Reuse between different actions is not counted, so
    the plan is one that can be had, not a bound; `reward_bound` is one.
    """

    name = "lookahead"

    def __init__(self, system: ServerlessSystem, *, configurations: int = 32) -> None:
        super().__init__(system)
        if configurations < 1:
            raise ValueError(f"configurations must be at least 1, got {configurations}")
        self.configurations = configurations

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._plan: dict[int, Actions] = {}
        self._bound: dict[int, float] = {}
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Plan anew at the next action."""
        for row in np.flatnonzero(mask).tolist():
            self._plan.pop(row, None)
            self._bound.pop(row, None)

    def reward_bound(self, row: int) -> float:
        """Sum of rewards that no policy exceeds in the row's planned episode: nothing is cold."""
        return self._bound[row]

    def decide(self, row: int, seen: Seen, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        if row not in self._plan:
            self._plan[row], self._bound[row] = self._search(row)
        action = self._plan[row][self.position(row)].copy()
        if not legal[action[0]]:
            action = np.zeros(5, dtype=np.int64)
        return action

    def _search(self, row: int) -> tuple[Actions, float]:
        requests = self._batch.arrays.requests[row]
        count, keep = len(requests), self.system.keep_alive_s
        cold, warm, free, free_at = [], [], np.empty(count), np.empty(count, dtype=np.int64)
        bound = 0.0
        for i in range(count):
            load, seen = self.true_load(row, i)
            started = self.rewards(seen, load, spread=0.0)
            kept = self.rewards(seen, load, spread=0.0, starts=False) if keep > 0 else started
            free_at[i] = started.argmax()
            free[i] = started.flat[free_at[i]]
            cold.append(started[:, 1].ravel().astype(np.float32))
            warm.append(kept[:, 1].ravel().astype(np.float32))
            bound += float(kept.max())
        shape = started.shape
        wanted = np.bincount([int(w.argmax()) for w in warm], minlength=warm[0].size)
        mean = np.mean(warm, axis=0)
        # The most wanted ones, and the best on average among equals.
        some = np.lexsort((-mean, -wanted))[: self.configurations - 1]
        some = np.unique(np.append(some, int(mean.argmax())))
        cold_some = np.array(cold)[:, some].astype(np.float64)
        warm_some = np.array(warm)[:, some].astype(np.float64)
        states = some.size + 1  # the last: nothing of use is warm
        value = np.zeros(states)
        choice = np.empty((count, states), dtype=np.int64)
        for i in range(count - 1, -1, -1):
            reach = keep > 0.0 and i > 0 and float(requests["gap"][i]) <= keep
            options = np.empty((states, states))
            options[:, :-1] = cold_some[i] + value[:-1]
            if reach:
                same = np.arange(states - 1)
                options[same, same] = warm_some[i] + value[:-1]
            options[:, -1] = free[i] + value[-1]
            choice[i] = options.argmax(axis=1)
            value = options.max(axis=1)
        plan, state = np.zeros((count, 5), dtype=np.int64), states - 1
        inner = (shape[0], *shape[2:])
        for i in range(count):
            state = int(choice[i, state])
            if state == states - 1:
                plan[i] = np.unravel_index(int(free_at[i]), shape)
            else:
                level, w, y, z = np.unravel_index(int(some[state]), inner)
                plan[i] = level, 1, w, y, z
        return plan, bound
