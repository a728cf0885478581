"""A linear contextual bandit: Thompson sampling of a ridge regression an expert.

Agrawal and Goyal (2013), disjoint form. Each decision is treated alone. The posterior starts from a
prior fitted on the train split and goes back to that prior at every episode's start, so that
episodes stay exchangeable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.llm_routing.heuristics import Floats, Mask, RoutingPolicy, pick
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation

_FEATURES = 8
RIDGE = 1.0
"""Strength of the pull to zero."""
PRIOR_STATES = 1024
"""Synthetic states that the prior is fitted on."""


class Thompson(RoutingPolicy):
    """A draw of each expert's reward from its posterior; the largest is taken (never drops).

    An expert's weights are normal around the ridge estimate with covariance ``scale**2`` times the
    inverse Gram matrix. Experts are independent and one context is asked a decision, so that a
    draw of the weights is a draw of the reward, normal with that mean and spread.

    Features: 1, predicted score, predicted length, prompt, running, waiting, "no slot free" and
    memory use, each in [0, 1]. The reward of a decision is the score of the answer if it came
    within the latency requirement, else 0, and comes when the request ends, some 25 decisions
    later. Until then the posterior knows nothing of it.

    The prior is fitted when the latency requirement is first seen.

    Args:
        system: The system; without ``system.train`` the prior is the ridge alone.
        scale: Standard deviation of the reward's noise that the posterior assumes.
        prior_weight: Observations of each expert that the prior counts for.

    Raises:
        ValueError: If a parameter is out of range.
    """

    name = "thompson"
    needs_outcomes = True

    def __init__(
        self, system: RoutingSystem, *, scale: float = 0.1, prior_weight: float = 500.0
    ) -> None:
        super().__init__(system)
        self.scale = real("scale", scale, 0.0)
        self.prior_weight = real("prior_weight", prior_weight, 0.0)
        self._priors: dict[float, tuple[Floats, Floats]] = {}

    def features(self, observation: Observation) -> Floats:
        """(B, N, 8) features, each within [0, 1]."""
        request = np.asarray(observation["request"], dtype=np.float64)
        experts = np.asarray(observation["experts"], dtype=np.float64)
        x = np.empty((*request.shape[:2], _FEATURES))
        x[..., 0] = 1.0
        x[..., 1] = request[..., 1]
        x[..., 2] = request[..., 2] / self.system.max_output_tokens
        x[..., 3] = np.log1p(request[..., 0]) / np.log1p(8192.0)
        x[..., 4] = experts[..., 1] / self.system.running_capacity
        x[..., 5] = experts[..., 2] / max(self.system.waiting_capacity, 1)
        x[..., 6] = experts[..., 1] + experts[..., 2] >= self.system.running_capacity
        x[..., 7] = experts[..., 0]
        return x

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        experts = self.system.num_experts
        self._rows = np.arange(num_envs)
        self._inverse = np.zeros((num_envs, experts, _FEATURES, _FEATURES))
        self._target = np.zeros((num_envs, experts, _FEATURES))
        self._fresh = np.ones(num_envs, dtype=np.bool_)
        self._decisions = np.zeros(num_envs, dtype=np.int64)
        # By row and decision: expert from 0, -1 for none to be credited, and its features.
        self._arm = np.full((num_envs, 64), -1, dtype=np.int64)
        self._context = np.zeros((num_envs, 64, _FEATURES))
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Back to the prior; what was open of the last episode is forgotten."""
        self._fresh |= mask
        self._decisions[mask], self._arm[mask] = 0, -1

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        if self._fresh.any():
            limits = np.asarray(observation["latency_requirement"], dtype=np.float64).reshape(-1)
            for row in np.flatnonzero(self._fresh):
                self._inverse[row], self._target[row] = self.prior(float(limits[row]))
            self._fresh[:] = False
        x = self.features(observation)
        weights = np.einsum("bnij,bnj->bni", self._inverse, self._target)
        spread = np.einsum("bni,bnij,bnj->bn", x, self._inverse, x)
        mean, spread = (weights * x).sum(axis=-1), np.sqrt(np.maximum(spread, 0.0))
        draw = mean + self.scale * spread * self.rng.standard_normal(mean.shape)
        action = pick(-draw, action_mask)
        if self._decisions.max() == self._arm.shape[1]:
            self._arm = np.concatenate([self._arm, np.full_like(self._arm, -1)], axis=1)
            self._context = np.concatenate([self._context, np.zeros_like(self._context)], axis=1)
        at = self._rows, self._decisions
        self._arm[at] = action - 1
        self._context[at] = x[self._rows, np.maximum(action - 1, 0)]
        self._decisions += 1
        return action

    def outcomes(self, ended: NDArray[Any]) -> None:
        """Credit the QoS of every request that has ended to the expert that it was sent to."""
        while ended.size:
            # One of each row at a time, in their order: the posterior goes by one after another.
            rows, first = np.unique(ended["row"], return_index=True)
            now, ended = ended[first], np.delete(ended, first)
            recorded = now["decision"] < self._decisions[rows]
            at = rows[recorded], now["decision"][recorded]
            sent = self._arm[at] >= 0
            at = at[0][sent], at[1][sent]
            self._credit(at[0], self._arm[at], self._context[at], now["qos"][recorded][sent])
            self._arm[at] = -1

    def _credit(
        self, rows: NDArray[np.int64], arm: NDArray[np.int64], context: Floats, reward: Floats
    ) -> None:
        """Add one observation a row to the posterior (Sherman-Morrison).

        The rows (K,) are distinct; arms count from 0, and contexts (K, 8) are the features of the
        arm when it was chosen.
        """
        inverse = self._inverse[rows, arm]
        pull = np.einsum("kij,kj->ki", inverse, context)
        scale = 1.0 + (pull * context).sum(axis=1)
        self._inverse[rows, arm] = (
            inverse - pull[:, :, None] * pull[:, None, :] / scale[:, None, None]
        )
        self._target[rows, arm] += reward[:, None] * context

    def prior(self, latency_requirement_s: float) -> tuple[Floats, Floats]:
        """The posterior before any feedback, (N, 8, 8) inverse and (N, 8) target.

        Train requests are set before synthetic queues of train requests; the reward of each is
        its true score if the latency estimate at its true length keeps the requirement, else 0.
        """
        # To the millisecond: a range of requirements must not mean a fit for every episode.
        key = round(max(latency_requirement_s, 1e-3), 3)
        if key not in self._priors:
            experts = self.system.num_experts
            gram = np.tile(RIDGE * np.eye(_FEATURES), (experts, 1, 1))
            target = np.zeros((experts, _FEATURES))
            if self.system.train is not None and self.prior_weight > 0:
                x, reward = self._synthetic(key)
                weight = self.prior_weight / x.shape[0]
                gram += weight * np.einsum("bni,bnj->nij", x, x)
                target += weight * np.einsum("bni,bn->ni", x, reward)
            self._priors[key] = (np.linalg.inv(gram).astype(np.float64), target)
        return self._priors[key]

    def _synthetic(self, limit: float) -> tuple[Floats, Floats]:
        """Features (K, N, 8) and rewards (K, N) of train requests before synthetic queues."""
        system, train = self.system, self.system.train
        assert train is not None
        rng = np.random.default_rng(0)
        count, experts = PRIOR_STATES, system.num_experts
        slots, places = system.running_capacity, system.waiting_capacity
        columns = np.arange(experts)

        def rows(size: int, started: bool) -> Floats:
            row = rng.integers(train.prompt_tokens.size, size=(count, experts, size))
            length = train.predicted_lengths[row, columns[:, None]]
            out = np.zeros((count, experts, size, 6))
            out[..., 0] = train.prompt_tokens[row]
            out[..., 1] = train.predicted_scores[row, columns[:, None]]
            out[..., 2] = length
            if started:
                out[..., 4] = np.ceil(rng.random(row.shape) * np.maximum(length, 1.0))
                out[..., 5] = limit
            else:
                out[..., 5] = rng.random(row.shape)
            return out

        load = rng.integers(0, slots + places, size=(count, experts))
        running, waiting = np.minimum(load, slots), np.maximum(load - slots, 0)
        row = rng.integers(train.prompt_tokens.size, size=count)
        request = np.stack(
            [
                np.repeat(train.prompt_tokens[row, None], experts, axis=1),
                train.predicted_scores[row],
                train.predicted_lengths[row],
            ],
            axis=-1,
        )
        observation = {
            "request": request,
            "experts": np.stack([0.0 * load, running, waiting], axis=-1),
            "running": rows(slots, True),
            "running_mask": (np.arange(slots) < running[..., None]).astype(np.int8),
            "waiting": rows(places, False),
            "waiting_mask": (np.arange(places) < waiting[..., None]).astype(np.int8),
            "latency_requirement": np.full((count, 1), limit),
        }
        x = self.features(observation)
        observation["request"] = request.copy()
        observation["request"][..., 2] = train.output_tokens[row]
        latency = LatencyModel(system).estimate(observation).with_new[..., -1]
        return x, train.scores[row] * (latency <= limit)
