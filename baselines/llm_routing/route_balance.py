"""RouteBalance's rule: predicted quality, cost and latency in one weighted score.

After AKafakA/route-balance (Apache-2.0, arXiv:2606.17949), ``_score_and_pick_instance`` of
``route_balance_serve.py`` at commit 06030d9, the tiered filter of ``route_balance_cdf_filter.py``
and the default weights of its README.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym._checks import choose, real
from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.heuristics import Floats, Mask, RoutingPolicy
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation

EPSILON = 1e-8  # keeps their quotients finite


class RouteBalance(RoutingPolicy):
    """Highest weighted score among the experts that pass the filters.

    The score of expert n among the candidates C that pass::

        w_q quality_n + w_c (1 - cost_n / max cost) + w_l (1 - latency_n / max latency)
            + w_b (1 - use_n / max use)

    with each maximum over C. Quality is the predicted score, latency the predicted end-to-end
    latency, use the share of KV memory in use with the request's own tokens. Equal scores go to
    the fewest outstanding requests, then to the expert chosen longest ago.

    A candidate's predicted latency per token meets the latency requirement. Where none does, all of
    them are candidates. As in the original, nothing is dropped by choice; ``fallback="drop"`` drops
    here instead.

    What differs from the original: one request at a time, where batches are assigned longest
    first (each request is routed at its arrival here); the estimate of `LatencyModel` for the
    boosted trees' latency; seconds of the expert's time for the cost in USD, as these
    environments have no prices; no budget for a request; the filter compares point predictions, as
    theirs does without residuals of a validation set.

    The default weights are the original's "Balance".

    Args:
        system: The system.
        w_quality: Weight of the predicted score.
        w_cost: Weight of the cost.
        w_latency: Weight of the latency.
        w_balance: Weight of the memory in use.
        latency_filter: Whether candidates must meet the latency requirement.
        fallback: What to do where no expert passes, ``"relax"`` or ``"drop"``.
        overrun: See `LatencyModel`.

    Raises:
        ValueError: If a parameter is out of range, or the weights do not add up to 1.
    """

    name = "route_balance"

    def __init__(
        self,
        system: RoutingSystem,
        *,
        w_quality: float = 1 / 3,
        w_cost: float = 1 / 3,
        w_latency: float = 1 / 3,
        w_balance: float = 0.0,
        latency_filter: bool = True,
        fallback: str = "relax",
        overrun: float = 0.3,
    ) -> None:
        super().__init__(system)
        weights = {
            "w_quality": w_quality,
            "w_cost": w_cost,
            "w_latency": w_latency,
            "w_balance": w_balance,
        }
        for argument, value in weights.items():
            real(argument, value, 0.0)
        if abs(sum(weights.values()) - 1) > 1e-6:
            raise ValueError(f"the weights {', '.join(weights)} must add up to 1, got {weights}")
        self.model = LatencyModel(system, overrun=overrun)
        self.weights = np.array(list(weights.values()), dtype=np.float64)
        self.latency_filter = bool(latency_filter)
        self.fallback = choose("fallback", fallback, ("relax", "drop"))

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._chosen_at = np.zeros((num_envs, self.system.num_experts), dtype=np.int64)
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """No expert has been chosen yet."""
        self._chosen_at[mask] = 0

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        observation = with_mean_scores(observation, self.system)
        request = np.asarray(observation["request"], dtype=np.float64)
        experts = np.asarray(observation["experts"], dtype=np.float64)
        legal = np.asarray(action_mask)[:, 1:] > 0
        estimate = self.model.estimate(observation)
        per_token, cost = estimate.with_new[..., -1], estimate.work_s
        mean = self.system.library.mean_output_tokens[self.system.placed(observation).model]
        length = np.maximum(np.where(request[..., 2] > 0, request[..., 2], mean), 1.0)
        outstanding = experts[..., 1] + experts[..., 2]
        use = experts[..., 0] + (request[..., 0] + length) / self.system.kv_tokens(observation)

        passing = legal
        if self.latency_filter:
            limit = np.asarray(observation["latency_requirement"], dtype=np.float64)
            passing = legal & (per_token <= limit)
        if self.fallback == "relax":
            passing = np.where(passing.any(axis=1, keepdims=True), passing, legal)
        score = weighted_score(
            self.weights, request[..., 1], cost, per_token * length, use, passing
        )
        # The least of (-score, outstanding requests, time of the last choice), in this order.
        for key in (-score, outstanding, self._chosen_at):
            among = np.where(passing, key, np.inf)
            passing &= among <= among.min(axis=1, keepdims=True)
        sent = passing.any(axis=1)
        chosen = passing.argmax(axis=1)
        rows = np.flatnonzero(sent)
        self._chosen_at[rows, chosen[rows]] = 1 + self._chosen_at[rows].max(axis=1)
        return np.where(sent, chosen + 1, 0).astype(np.int64)


def weighted_score(
    weights: Floats,
    quality: Floats,
    cost: Floats,
    latency_s: Floats,
    use: Floats,
    candidates: NDArray[np.bool_],
) -> Floats:
    """The score (B, N) of `RouteBalance`, whose maxima are those of the candidates.

    Weights (4,) are of quality, cost, latency and balance; what others than candidates score means
    nothing.
    """
    score = weights[0] * quality
    for weight, part in zip(weights[1:], (cost, latency_s, use), strict=True):
        most = np.where(candidates, part, 0.0).max(axis=1, keepdims=True)
        score = score + weight * (1.0 - part / (most + EPSILON))
    return score
