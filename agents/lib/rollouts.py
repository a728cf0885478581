"""Paired rollouts: actions tried on copies of the simulator that share their future."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch

Values = Callable[[Mapping[str, NDArray[Any]]], NDArray[np.floating[Any]]]
"""Values (B, N + 1) of the actions for a batch of observations, in scores."""


def common_actions(values: NDArray[np.floating[Any]], near: float) -> NDArray[np.int64]:
    """Actions of the copies of each state: the same one, where that costs none more than ``near``.

    Copies that differ little would part for good at the first near tie, and the noise of two
    futures would drown the first action's effect. So a copy takes the action that is best on
    average over the copies if that is within ``near`` of its own best, else its own best.

    Args:
        values: Values (B, copies, actions); NaN everywhere where a copy is at its end.
        near: What a decision may cost, in scores.

    Returns:
        (B, copies).
    """
    known = np.where(np.isnan(values[..., :1]), 0.0, values)
    common = known.sum(1).argmax(-1)[:, None]
    own = known.argmax(-1)
    price = known.max(-1) - np.take_along_axis(known, common[..., None], -1)[..., 0]
    return np.where(price <= near, common, own)


class Rollouts:
    """Copies of the environments' states on which actions are tried.

    Attributes:
        decisions: Decisions of all copies so far.
    """

    def __init__(self, envs: gym.vector.VectorEnv, tries: int) -> None:
        """Make room for ``tries`` copies of every environment of a native vector environment."""
        self.envs: Any = envs.unwrapped
        self.tries, self.decisions = tries, 0
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
        """Sum of the rewards of each action and of the requests after it, on the same future.

        There is no discount: a score is paid when the request is let in and taken back when it ends
        late, and a discounted bill would make late answers look good.

        Args:
            actions: First actions (B, tries), of every environment in its present state.
            legal: Which of them to try (B, tries).
            horizon_s: No request that arrives so many seconds later is decided; a rollout also
                stops where its episode ends.
            values: By what the later requests are decided.
            near: See `common_actions`.

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
            self.decisions += int(live.sum())
            total += np.where(live > 0, batch.out[:, 0] + batch.out[:, 1], 0.0)
            live &= (batch.out[:, 2] == 0.0) & (now() < end)
            left = np.flatnonzero(live)
            seen = {key: value[left] for key, value in batch.observation.items()}
            found = np.full(batch.action_mask.shape, np.nan)
            if left.size:
                found[left] = np.where(batch.action_mask[left] > 0, values(seen), -1e4)
            choice = common_actions(found.reshape(*legal.shape, -1), near).reshape(-1)
        return np.where(legal, total.reshape(actions.shape), np.nan).astype(np.float32)
