"""Policies that see the true requests of an episode: references, none of them a bound.

`GridOptimum` takes the best action for one request at a time, `Lookahead` plans the whole episode
but counts reuse between equal actions alone; another policy can get more than either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless_moe.base import Actions, Observed, ServerlessPolicy, best_action
from servegym.envs.serverless_moe.loads import Load

CONFIGURATIONS = 32


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

    def true_load(self, row: int, index: int) -> tuple[Load, Observed]:
        """A request of the row's episode as it is, and what is observed of it (nothing warm)."""
        drawn = self._batch.arrays.requests[row, index]
        request = self._batch.request(row, index)
        observed = Observed(
            self._problem.predicted[int(drawn["prompt"])],
            request.n_in,
            request.n_out,
            float(drawn["ttft_limit"]),
            float(drawn["tpot_limit"]),
            0.0,
            None,
        )
        return Load.known(request), observed


class GridOptimum(Clairvoyant):
    """The best action for the current request as it really is, given what is warm."""

    name = "grid_optimum"

    def decide(self, row: int, observed: Observed, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        load, _ = self.true_load(row, self.position(row))
        return best_action(self.rewards(observed, load, spread=0.0), legal)


class Lookahead(Clairvoyant):
    """Clairvoyant planner: a whole episode as it really is, by dynamic programming.

    The state is the configuration that is warm. At each request it either keeps one of the
    `CONFIGURATIONS` most wanted shared ones (warm if the same was used last and the gap is short)
    or takes the best action for a cold start. Reuse between different actions is not counted, and
    other configurations are not tried: a policy that does either can get more, so that its reward
    is no bound.
    """

    name = "lookahead"

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._plan: dict[int, Actions] = {}
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Plan anew at the next action."""
        for row in np.flatnonzero(mask).tolist():
            self._plan.pop(row, None)

    def decide(self, row: int, observed: Observed, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        if row not in self._plan:
            self._plan[row] = self._search(row)
        action = self._plan[row][self.position(row)].copy()
        if not legal[action[0]]:
            action = np.zeros(5, dtype=np.int64)
        return action

    def _search(self, row: int) -> Actions:
        requests = self._batch.arrays.requests[row]
        count, keep_alive_s = len(requests), self.system.arguments.keep_alive_s
        cold, warm, free, free_at = [], [], np.empty(count), np.empty(count, dtype=np.int64)
        for i in range(count):
            load, observed = self.true_load(row, i)
            started = self.rewards(observed, load, spread=0.0)
            warm_rewards = started
            if keep_alive_s > 0:
                warm_rewards = self.rewards(observed, load, spread=0.0, starts=False)
            free_at[i] = started.argmax()
            free[i] = started.flat[free_at[i]]
            cold.append(started[:, 1].ravel().astype(np.float32))
            warm.append(warm_rewards[:, 1].ravel().astype(np.float32))
        shape = started.shape
        votes = np.bincount([int(w.argmax()) for w in warm], minlength=warm[0].size)
        mean = np.mean(warm, axis=0)
        # Those with the most votes, and the best on average among equals.
        some = np.lexsort((-mean, -votes))[: CONFIGURATIONS - 1]
        some = np.unique(np.append(some, int(mean.argmax())))
        cold_some = np.array(cold)[:, some].astype(np.float64)
        warm_some = np.array(warm)[:, some].astype(np.float64)
        states = some.size + 1  # the last: nothing of use is warm
        value = np.zeros(states)
        choice = np.empty((count, states), dtype=np.int64)
        for i in range(count - 1, -1, -1):
            is_warm = keep_alive_s > 0.0 and i > 0 and float(requests["gap"][i]) <= keep_alive_s
            options = np.empty((states, states))
            options[:, :-1] = cold_some[i] + value[:-1]
            if is_warm:
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
        return plan
