"""Labels from rollouts: actions tried on copies of the routing simulator that share their future.

Which actions to try in a state, what they return, and how much noise that has. Not an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from servegym.agents.han import Layout, impact, prior
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch

Observation = Mapping[str, NDArray[Any]]
Values = Callable[[Observation], NDArray[np.floating[Any]]]
"""Values (B, N + 1) of the actions for a batch of observations, in scores."""


def heuristic_values(obs: Observation, model: LatencyModel) -> NDArray[np.float64]:
    """The values (B, N + 1) that stand behind `PricedGreedy`, see `servegym.agents.han.prior`."""
    expert = np.zeros((*obs["experts"].shape[:2], 10))
    expert[..., 1:3] = obs["experts"][..., 1:3] / 3
    expert[..., 6:] = impact(obs, model)[0]
    return np.pad(prior(expert, model.system.running_capacity), ((0, 0), (1, 0)))


def agree(values: NDArray[np.floating[Any]], near: float) -> NDArray[np.int64]:
    """Actions of the copies of each state: the same one, where that costs none more than ``near``.

    Copies that differ little would part for good at the first near tie, and the noise of two
    futures would drown what the first action did. So a copy takes the action that is best on
    average over the copies if that is within ``near`` of its own best, else its own best.

    Args:
        values: Values (B, copies, actions); NaN everywhere where a copy is at its end.
        near: What a decision may cost, in scores.

    Returns:
        (B, copies).
    """
    there = ~np.isnan(values[..., :1])
    known = np.where(there, values, 0.0)
    common = known.sum(1).argmax(-1)[:, None]
    own = known.argmax(-1)
    price = known.max(-1) - np.take_along_axis(known, common[..., None], -1)[..., 0]
    return np.where(price <= near, common, own)


class Branches:
    """Copies of the environments' states on which actions are tried."""

    def __init__(self, envs: gym.vector.VectorEnv, tries: int) -> None:
        """Make room for ``tries`` copies of every environment of a native vector environment."""
        self.envs: Any = envs.unwrapped
        self.tries = tries
        problem = build_problem(view=kernel.GRAPH, **self.envs.problem.arguments)
        self.batch = RoutingBatch(problem, tries * self.envs.num_envs)

    def returns(
        self,
        actions: NDArray[np.int64],
        legal: NDArray[np.bool_],
        horizon_s: float,
        values: Values,
        near: float = 0.0,
    ) -> NDArray[np.float32]:
        """Sum of the rewards of each action and of what follows it on the same future.

        There is no discount: a score is paid when the request is let in and taken back when it ends
        late, and a discounted bill would make late answers look good.

        Args:
            actions: First actions (B, tries), of every environment in its present state.
            legal: Which of them to try (B, tries).
            horizon_s: No request that arrives so many seconds later is decided; a rollout also
                stops where its episode ends.
            values: By what the later requests are decided.
            near: See `agree`.

        Returns:
            (B, tries), NaN where not tried.
        """
        batch, legal = self.batch, legal.copy()
        for row in range(len(actions)):
            state = self.envs.clone_state(row)
            legal[row] &= not state.finished
            for k in np.flatnonzero(legal[row]):
                batch.restore(row * self.tries + int(k), state)
        live, every = legal.reshape(-1).astype(np.int8), np.arange(legal.size)
        total, choice = np.zeros(live.size), actions.reshape(-1).astype(np.int64)
        last = batch.arrivals.shape[1] - 1

        def now() -> NDArray[np.float64]:
            return batch.arrivals[every, np.minimum(batch.env["index"].astype(int), last)]

        end = now() + horizon_s
        while live.any():
            batch.step(choice, live)
            total += np.where(live > 0, batch.out[:, 0] + batch.out[:, 1], 0.0)
            live &= (batch.out[:, 2] == 0.0) & (now() < end)
            left = np.flatnonzero(live)
            seen = {key: value[left] for key, value in batch.observation.items()}
            found = np.full(batch.action_mask.shape, np.nan)
            if left.size:
                found[left] = np.where(batch.action_mask[left] > 0, values(seen), -1e4)
            choice = agree(found.reshape(*legal.shape, -1), near).reshape(-1)
        return np.where(legal, total.reshape(actions.shape), np.nan).astype(np.float32)


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


def fleet_load(rows: NDArray[np.float16], layout: Layout) -> NDArray[np.float64]:
    """Outstanding requests per running slot of the whole fleet, (B,), from `Layout.rows`."""
    expert = layout.expert(torch.as_tensor(rows, dtype=torch.float32)).double().numpy()
    return 3 * expert[..., 1:3].sum((1, 2)) / (layout.experts * layout.running)


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
