"""Routing rules of a few lines each: queue counts, predicted score, controls.

All of them pick among the experts the mask allows and drop only when every expert is full.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import BasePolicy, Observation

Floats = NDArray[np.float64]
Mask = NDArray[np.integer[Any]]


class RoutingPolicy(BasePolicy):
    """A policy of a routing system."""

    env_view = "graph"
    system: RoutingSystem


def pick(cost: Floats, action_mask: Mask) -> NDArray[np.int64]:
    """The legal expert of least cost (B, N), the lowest index among equals; 0 if none is legal."""
    legal = np.asarray(action_mask)[:, 1:] > 0
    chosen = np.where(legal, cost, np.inf).argmin(axis=1)
    return np.where(legal.any(axis=1), chosen + 1, 0).astype(np.int64)


class RotatingPolicy(RoutingPolicy):
    """Least cost, ties to the first expert after the last one chosen (per row, cyclic)."""

    weights = (0.0, 0.0)
    """What a running and a waiting request of an expert cost."""

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._next = np.zeros(num_envs, dtype=np.int64)
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Ties start at expert 1 again."""
        self._next[mask] = 0

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        cost = observation["experts"][..., 1:] @ np.array(self.weights)
        legal = np.asarray(action_mask)[:, 1:] > 0
        experts = cost.shape[1]
        least = np.where(legal, cost, np.inf).min(axis=1, keepdims=True)
        turn = (np.arange(experts) - self._next[:, None]) % experts
        chosen = np.where(legal & (cost <= least), turn, experts).argmin(axis=1)
        any_legal = legal.any(axis=1)
        self._next = np.where(any_legal, (chosen + 1) % experts, self._next)
        return np.where(any_legal, chosen + 1, 0).astype(np.int64)


class RoundRobin(RotatingPolicy):
    """The next expert in turn, passing over full ones: all cost alike."""

    name = "round_robin"


class LeastOutstanding(RotatingPolicy):
    """Fewest requests, waiting and running."""

    name = "least_outstanding"
    weights = (1.0, 1.0)


class VllmDp(RotatingPolicy):
    """vLLM's data-parallel score, 4 x waiting + running."""

    name = "vllm_dp"
    weights = (1.0, 4.0)


class BertRouter(RoutingPolicy):
    """Highest predicted score whatever the load; ties to the better train mean, if it is known.

    The paper's BERT router is a classifier over prompts trained for the best expert. Until such a
    predictor is trained this is the argmax of the predicted scores.
    """

    name = "bert_router"

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        # Scores are bucket centres, so equal ones are common; the mean only orders those.
        score = observation["request"][..., 1].astype(np.float64)
        mean = self.system.library.mean_score[self.system.placed(observation).model]
        return pick(-(score + 1e-6 * mean), action_mask)


class AlwaysBest(RoutingPolicy):
    """The expert of the best train mean score; the next best while it is full."""

    name = "always_best"

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        model = self.system.placed(observation).model
        return pick(-self.system.library.mean_score[model], action_mask)


class DropAll(RoutingPolicy):
    """Drops every request: a control whose QoS is 0."""

    name = "drop_all"

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        return np.zeros(np.asarray(action_mask).shape[0], dtype=np.int64)


class Random(RoutingPolicy):
    """Uniform over the experts that are not full; never drops by choice."""

    name = "random"

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        return pick(self.rng.random(observation["experts"].shape[:2]), action_mask)


class PowerOfTwo(RoutingPolicy):
    """Two distinct legal experts at random, the one with fewer requests of them."""

    name = "power_of_two"

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        experts = observation["experts"]
        legal = np.asarray(action_mask)[:, 1:] > 0
        key = np.where(legal, self.rng.random(legal.shape), 2.0)
        order = key.argsort(axis=1)
        first = order[:, 0]
        second = order[:, min(1, order.shape[1] - 1)]
        rows = np.arange(first.size)
        second = np.where(legal[rows, second], second, first)
        any_legal = legal[rows, first]
        load = experts[..., 1] + experts[..., 2]
        chosen = np.where(load[rows, second] < load[rows, first], second, first)
        return np.where(any_legal, chosen + 1, 0).astype(np.int64)
