"""Policies on the latency estimate: least predicted latency, and greedy predicted QoS."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import choose, real
from servegym.baselines.llm_routing.heuristics import Mask, RoutingPolicy, pick
from servegym.baselines.llm_routing.latency import ExpectedQos, LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation


class LeastLatency(RoutingPolicy):
    """Least predicted latency per token of the new request; blind to scores and to others."""

    name = "least_latency"

    def __init__(self, system: RoutingSystem, *, overrun: float = 0.3) -> None:
        super().__init__(system)
        self.model = LatencyModel(system, overrun=overrun)

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        return pick(self.model.estimate(observation).with_new[..., -1], action_mask)


class GreedyQos(RoutingPolicy):
    """Best predicted score among the experts that meet the latency requirement of every request.

    An expert qualifies if the estimate keeps the new request within the latency requirement and
    pushes none of the requests it would have served in time over it. If none qualifies the
    request is dropped, as it would be late or make another late (``fallback="least_harm"`` sends
    it where the predicted QoS suffers least instead, which collapses near saturation).

    With a ``price`` the value of expert n is::

        s_n - price * load_n**power * work_n,
        load_n = ((1 - share) * outstanding_n + share * mean outstanding) / R

    with the predicted score s_n and the seconds of the expert's time that the request takes,
    work_n (`Estimate.work_s`; long answers and slow cards cost more), and the best value is taken
    if it is positive: see `PricedGreedy`.

    With ``lengths="survival"`` lengths are distributions (`ExpectedQos`): no expert is ruled out,
    and in the place of s_n stands the score times the probability that the answer is in time, less
    the scores of the others times what their probabilities lose.

    Args:
        system: The system.
        price: Score that a second of a full expert's time is worth.
        power: How late the price rises with the load.
        share: Weight of the fleet's mean load against the expert's own.
        margin: Share of the latency requirement that predictions may use.
        overrun: See `LatencyModel`; for predicted lengths alone.
        fallback: What to do where no expert qualifies, or has a positive value,
            ``"drop"`` or ``"least_harm"``.
        lengths: ``"predicted"``, each taken to come true, or ``"survival"``, the distribution
            given the prediction and the tokens so far.

    Raises:
        ValueError: If a parameter is out of range.
    """

    name = "greedy_qos"

    def __init__(
        self,
        system: RoutingSystem,
        *,
        price: float = 0.0,
        power: float = 4.0,
        share: float = 0.5,
        margin: float = 1.0,
        overrun: float = 0.3,
        fallback: str = "drop",
        lengths: str = "predicted",
    ) -> None:
        super().__init__(system)
        self.price = real("price", price, 0.0)
        self.power = real("power", power, 0.0, open_low=True)
        self.share = real("share", share, 0.0, 1.0)
        self.margin = real("margin", margin, 0.0, open_low=True)
        self.fallback = choose("fallback", fallback, ("drop", "least_harm"))
        choose("lengths", lengths, ("predicted", "survival"))
        self.model = LatencyModel(system, overrun=overrun)
        self.expected = ExpectedQos(system) if lengths == "survival" else None

    def charge(self, observation: Observation) -> NDArray[np.float64]:
        """(B, N) price of a second of each expert's time."""
        experts = np.asarray(observation["experts"], dtype=np.float64)
        load = (experts[..., 1] + experts[..., 2]) / self.system.running_capacity
        fleet = load.mean(axis=1, keepdims=True)
        load = (1 - self.share) * load + self.share * fleet
        return self.price * load**self.power

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        observation = with_mean_scores(observation, self.system)
        requirement = np.asarray(observation["latency_requirement"], dtype=np.float64)
        legal = np.asarray(action_mask)[:, 1:] > 0
        if self.expected is not None:
            gain, harm, _, estimate = self.expected(observation, self.margin)
            value = gain - harm - self.charge(observation) * estimate.work_s
        else:
            estimate = self.model.estimate(observation)
            value = estimate.scores[..., -1] - self.charge(observation) * estimate.work_s
        # Scores are bucket centres: among equal ones the fastest is taken.
        fastest = 1e-3 * estimate.with_new[..., -1] / requirement
        value -= fastest
        if self.expected is None:
            limit = self.margin * requirement[:, :, None]
            in_time = estimate.with_new <= limit
            made_late = (estimate.without <= limit) & ~in_time
            value[~in_time[..., -1] | made_late.any(axis=-1)] = -np.inf
            if self.fallback == "least_harm":
                gain = estimate.scores[..., -1] * in_time[..., -1]
                gain = gain - (estimate.scores * made_late).sum(axis=-1)
                value = np.where(np.isfinite(value), value, gain - fastest - 1e3)
        action = pick(-value, action_mask)
        if self.fallback == "least_harm":
            return action
        return np.where(np.where(legal, value, -np.inf).max(axis=1) > 0, action, 0)


class PricedGreedy(GreedyQos):
    """`GreedyQos` that also charges what the capacity is worth to the requests still to come.

    The price stands for the requests that will not fit later: nothing on an idle fleet, a whole
    score for a second of a full expert. Form and numbers were chosen on the val split over three
    fleets at light, medium and heavy load; it is the strongest of the heuristics here.
    """

    name = "priced_greedy"

    def __init__(self, system: RoutingSystem, *, price: float = 1.0, **kwargs: Any) -> None:
        super().__init__(system, price=price, **kwargs)


class ExpectedQosGreedy(GreedyQos):
    """`PricedGreedy` on distributions of the output lengths, ``lengths="survival"``.

    Its numbers were chosen on the val split, over the same rates for two fleets and both kinds of
    predictions (`servegym.experiments.evaluation.tuning`).
    """

    name = "expected_qos"

    def __init__(
        self,
        system: RoutingSystem,
        *,
        price: float = 0.65,
        power: float = 2.5,
        share: float = 0.6,
        lengths: str = "survival",
        **kwargs: Any,
    ) -> None:
        super().__init__(system, price=price, power=power, share=share, lengths=lengths, **kwargs)


def with_mean_scores(observation: Observation, system: RoutingSystem) -> dict[str, NDArray[Any]]:
    """The observation with `RoutingSystem.mean_score` where no expert has a predicted score.

    Under ``score_predictor="zero"`` all scores are 0. The system's means are then one constant,
    with which a score of every expert is as good as any other's.
    """
    changed: dict[str, NDArray[Any]] = dict(observation)
    blank = (observation["request"][..., 1] == 0).all(axis=1)
    if blank.any():
        for key in ("request", "running", "waiting"):
            rows = np.array(observation[key], dtype=np.float64)
            mean = system.mean_score.reshape((1, -1) + (1,) * (rows.ndim - 3))
            where = blank.reshape((-1,) + (1,) * (rows.ndim - 2)) & (rows[..., 1] == 0)
            rows[..., 1] = np.where(where, mean, rows[..., 1])
            changed[key] = rows
    return changed
