"""Rollouts of routing: a clairvoyant policy, and the values that ``rpi`` learns from."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from servegym._checks import whole
from servegym.baselines.llm_routing.fleets import per_fleet
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy
from servegym.baselines.llm_routing.heuristics import RoutingPolicy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.rollout import RolloutPolicy, roll_out
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch, RoutingState
from servegym.envs.llm_routing.kernel import layout

Values = Callable[[Mapping[str, NDArray[Any]]], NDArray[np.floating[Any]]]
"""Values (B, N + 1) of the actions for a batch of observations, in scores."""

Runner = Callable[[Callable[..., Any], Sequence[Sequence[Any]]], Iterable[tuple[int, Any]]]
"""Runs a function for the arguments of every job; gives the jobs' indexes and results."""

JOB_STATES = 16
"""States of a job of the rollouts, whatever the number of workers."""


class Rollout(RolloutPolicy, RoutingPolicy):
    """`RolloutPolicy` by `PricedGreedy`, which it improves on.

    What ranks the actions is the sum of the "paid_forward" rewards: the true score of what was let
    in less that of what ended late.

    Args:
        system: The system.
        horizon: Requests that priced_greedy decides after the first action.

    Raises:
        ValueError: If ``horizon`` is negative.
    """

    batch = RoutingBatch

    def __init__(self, system: RoutingSystem, *, horizon: int = 100) -> None:
        rules = (per_fleet(PricedGreedy, system) for _ in range(2))
        super().__init__(system, whole("horizon", horizon, 0), *rules)

    def problem_of(self, env: Any) -> Any:
        """The same problem with the other reward: the dynamics do not depend on it."""
        arguments = {**env.problem.arguments, "reward": "paid_forward"}
        return build_problem(view=layout.GRAPH, **arguments)


def common_actions(values: NDArray[np.floating[Any]], near: float) -> NDArray[np.int64]:
    """Actions (B, copies) of the copies of each state: the same one, where that costs little.

    Copies that differ little would part for good at the first near tie, and the noise of two
    futures would drown the first action's effect. So a copy takes the action that is best on
    average over the copies if that is within ``near``, in scores, of its own best, else its own
    best. Values (B, copies, actions) are NaN everywhere where a copy is at its end.
    """
    finite = np.where(np.isnan(values[..., :1]), 0.0, values)
    common = finite.sum(1).argmax(-1)[:, None]
    best = finite.argmax(-1)
    price = finite.max(-1) - np.take_along_axis(finite, common[..., None], -1)[..., 0]
    return np.where(price <= near, common, best)


def choose_candidates(
    value: NDArray[np.floating[Any]],
    first: NDArray[np.int64],
    mask: NDArray[Any],
    count: int,
    spread: float,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Actions to try and which of them are legal, (B, count) each.

    The first is given, the others are drawn without replacement with probabilities that rise with
    their value (Gumbel top-k, at the temperature ``spread``): what is surely worse is not tried.
    """
    legal = np.asarray(mask) > 0
    key = np.where(legal, value / spread + rng.gumbel(size=value.shape), -np.inf)
    np.put_along_axis(key, first[:, None], np.inf, 1)
    chosen = np.argsort(-key, axis=1, kind="stable")[:, :count]
    return chosen, np.take_along_axis(legal, chosen, 1)


def noise_weights(load: NDArray[np.float64], gain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights of labels (B,), mean 1: the inverse of the variance of ``gain`` at such a load.

    The fates of two actions part the further the busier the fleet is; unweighted, labels from
    busy fleets would drown the small and certain differences on idle ones.
    """
    edges = np.quantile(load, np.linspace(0, 1, 11)[1:-1])
    place = np.searchsorted(edges, load, side="right")
    square = np.nan_to_num(gain).astype(np.float64) ** 2
    total, count = (
        np.bincount(place, x.sum(1), 10) for x in (square, np.isfinite(gain).astype(np.float64))
    )
    weight = 1 / ((total / np.maximum(count, 1))[place] + 0.02)
    return (weight / weight.mean()).astype(np.float32)


class Rollouts:
    """Copies of the environments' states on which actions are tried.

    Args:
        envs: The native vector environment.
        runner: Runs the rollouts, in jobs of `JOB_STATES` states; None: this process does. The
            returns are the same if ``values`` of a state do not go by the others of its batch,
            bit for bit; those of a network may.

    Attributes:
        decisions: Decisions of all copies so far.
    """

    def __init__(self, envs: gym.vector.VectorEnv, runner: Runner | None = None) -> None:
        self.envs: Any = envs.unwrapped
        self.runner, self.decisions = runner, 0
        self._problem = pickle.dumps(self.envs.problem.arguments)

    def returns(
        self,
        actions: NDArray[np.int64],
        legal: NDArray[np.bool_],
        horizon_s: float,
        values: Values,
        near: float = 0.0,
    ) -> NDArray[np.float32]:
        """Sum of the rewards of each action and of the requests after it, on the same future.

        There is no discount: a score is paid when the request is let in and taken back when it ends
        late, and a discounted bill would make late answers look good.

        ``actions`` (B, tries) are the first ones, ``legal`` which of them to try. ``values`` decide
        the later requests, all copies alike where that costs no more than ``near``
        (`common_actions`); with a runner they can be pickled. No request that arrives ``horizon_s``
        later is decided; a rollout also stops where its episode ends. Returns (B, tries), NaN where
        not tried.
        """
        states = [self.envs.clone_state(row) for row in range(len(actions))]
        legal = legal & ~np.array([state.finished for state in states])[:, None]
        size = len(actions) if self.runner is None else JOB_STATES
        parts = [slice(k, k + size) for k in range(0, len(actions), size)]
        common = self._problem, horizon_s, values, near
        jobs = [(states[part], actions[part], legal[part], *common) for part in parts]
        total = np.empty(actions.shape, dtype=np.float32)
        here = ((at, _roll_out(*job)) for at, job in enumerate(jobs))
        done = here if self.runner is None else self.runner(_roll_out, jobs)
        for at, (result, decisions) in done:
            total[parts[at]] = result
            self.decisions += decisions
        return total


@lru_cache(maxsize=32)
def _copies(problem: bytes, rows: int) -> RoutingBatch:
    """Systems to restore states in, by the pickled arguments of their environment."""
    return RoutingBatch(build_problem(view=layout.GRAPH, **pickle.loads(problem)), rows)


def _roll_out(
    states: Sequence[RoutingState],
    actions: NDArray[np.int64],
    legal: NDArray[np.bool_],
    problem: bytes,
    horizon_s: float,
    values: Values,
    near: float,
) -> tuple[NDArray[np.float32], int]:
    """Returns (B, tries) of some states, see `Rollouts.returns`, and the decisions they took."""
    batch, every = _copies(problem, actions.size), np.arange(actions.size)
    last = batch.arrivals.shape[1] - 1
    begun = [state.arrivals[min(int(state.env["index"][0]), last)] for state in states]
    end = np.repeat(begun, actions.shape[1]) + horizon_s

    def follow(live: NDArray[np.int8]) -> NDArray[np.int64]:
        now = batch.arrivals[every, np.minimum(batch.env["index"].astype(int), last)]
        live &= now < end
        left = np.flatnonzero(live)
        obs = {key: value[left] for key, value in batch.observation.items()}
        result = np.full(batch.action_mask.shape, np.nan)
        if left.size:
            result[left] = np.where(batch.action_mask[left] > 0, values(obs), -1e4)
        return common_actions(result.reshape(*legal.shape, -1), near).reshape(-1)

    total, decisions = roll_out(batch, states, actions, legal, follow)
    return np.where(legal, total, np.nan).astype(np.float32), decisions
