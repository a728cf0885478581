"""Policies on the latency estimate: least predicted latency, and greedy predicted QoS."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.llm_routing.heuristics import Mask, RoutingPolicy, pick
from servegym.baselines.llm_routing.latency import ExpectedQos, LatencyModel
from servegym.baselines.llm_routing.system import FleetSystem, RoutingSystem
from servegym.baselines.protocol import Observation

RATES = (0.2, 2.0)
"""Arrival rates, over what a fleet serves within L, beyond which prices stay as they are."""
PRICES, POWERS, SHARE = (0.2, 0.35), (2.5, 1.8), 0.45
"""Numbers of `ExpectedQosGreedy`: prices and powers at rho = 1/2 and at rho = 1, share."""


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
    request is dropped, as it would be late or make another late.

    With a ``price`` the value of expert n is::

        s_n - price * load_n**power * work_n,
        load_n = ((1 - share) * outstanding_n + share * mean outstanding) / R

    with the predicted score s_n and the seconds of the expert's time that the request takes,
    work_n (`Estimate.work_s`; long answers and slow cards cost more), and the best value is taken
    if it is positive: see `PricedGreedy`.

    Args:
        system: The system.
        price: Score that a second of a full expert's time is worth.
        power: How late the price rises with the load.
        share: Weight of the fleet's mean load against the expert's own.
        margin: Share of the latency requirement that predictions may use.
        overrun: See `LatencyModel`; for predicted lengths alone.

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
    ) -> None:
        super().__init__(system)
        self.price = real("price", price, 0.0)
        self.power = real("power", power, 0.0, open_low=True)
        self.share = real("share", share, 0.0, 1.0)
        self.margin = real("margin", margin, 0.0, open_low=True)
        self.model = LatencyModel(system, overrun=overrun)

    def charge(self, observation: Observation) -> NDArray[np.float64]:
        """(B, N) price of a second of each expert's time."""
        experts = np.asarray(observation["experts"], dtype=np.float64)
        placed = self.system.placed(observation)
        slots = np.maximum(placed.running_capacity, 1)[:, None]
        load = (experts[..., 1] + experts[..., 2]) / slots
        fleet = load.sum(1, keepdims=True) / (placed.card >= 0).sum(1, keepdims=True).clip(1)
        load = (1 - self.share) * load + self.share * fleet
        return self.price * load**self.power

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        observation = with_mean_scores(observation, self.system)
        requirement = np.asarray(observation["latency_requirement"], dtype=np.float64)
        legal = np.asarray(action_mask)[:, 1:] > 0
        estimate = self.model.estimate(observation)
        value = estimate.scores[..., -1] - self.charge(observation) * estimate.work_s
        # Scores are bucket centres: among equal ones the fastest is taken.
        value -= 1e-3 * estimate.latency / requirement
        limit = self.margin * requirement[:, :, None]
        in_time = estimate.with_new <= limit
        made_late = (estimate.without <= limit) & ~in_time
        value[~in_time[..., -1] | made_late.any(axis=-1)] = -np.inf
        best = np.where(legal, value, -np.inf).max(axis=1)
        return np.where(best > 0, pick(-value, action_mask), 0)


class PricedGreedy(GreedyQos):
    """`GreedyQos` that also charges what the capacity is worth to the requests still to come.

    The price stands for the requests that will not fit later: nothing on an idle fleet, a whole
    score for a second of a full expert. Form and numbers were chosen on the val split over three
    fleets at light, medium and heavy load; it is the strongest of the heuristics here.
    """

    name = "priced_greedy"

    def __init__(self, system: RoutingSystem, *, price: float = 1.0, **kwargs: Any) -> None:
        super().__init__(system, price=price, **kwargs)


class ExpectedQosGreedy(RoutingPolicy):
    """Best expected QoS less a price of the expert's time that follows the arrival rate.

    Lengths are distributions (`ExpectedQos`), so that no expert is ruled out. The value of expert n
    is::

        gain_n - harm_n - price(rho) * load_n**power(rho) * work_n * served_n,
        load_n = (1 - share) * outstanding_n / batch_n + share * sum outstanding / sum batch

    with the expected score in time of the new request, gain_n, the expected scores that it makes
    late, harm_n, and the seconds of the expert's time that it takes, work_n. The requests/s that
    expert n serves within L, served_n, and the batch in which it does, batch_n, make loads, work
    and rates mean the same on any fleet (`LatencyModel.within`): rho is the rate of the last 128
    arrivals over the sum of served_n. Price and power lie on a line in their logarithms through
    their values at rho = 1/2 and at rho = 1. The best value is taken if it is positive, else the
    request is dropped.

    Its numbers were chosen on validation prompts between those that do best on drawn fleets and at
    home; ``servegym tune expected_qos`` finds the ones of another system.

    Args:
        system: The system.
        price_half: Score that a request's worth of a full expert's time costs at rho = 1/2.
        price_full: The same at rho = 1.
        power_half: How late the price rises with the load at rho = 1/2.
        power_full: The same at rho = 1.
        share: Weight of the fleet's load against the expert's own.
        margin: Share of the latency requirement that answers may use.

    Raises:
        ValueError: If a parameter is out of range.
    """

    name = "expected_qos"

    def __init__(
        self,
        system: RoutingSystem,
        *,
        price_half: float = PRICES[0],
        price_full: float = PRICES[1],
        power_half: float = POWERS[0],
        power_full: float = POWERS[1],
        share: float = SHARE,
        margin: float = 1.0,
    ) -> None:
        super().__init__(system)
        self.price = _positive(price_half=price_half, price_full=price_full)
        self.power = _positive(power_half=power_half, power_full=power_full)
        self.share = real("share", share, 0.0, 1.0)
        self.margin = real("margin", margin, 0.0, open_low=True)
        self.expected = ExpectedQos(system)

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        observation = with_mean_scores(observation, self.system)
        limit = np.asarray(observation["latency_requirement"], dtype=np.float64)
        estimate = self.expected.estimate(observation, self.margin, whole=False)
        fleet = self.expected.fleet(observation)
        own = fleet.outstanding / np.maximum(fleet.batch, 1)
        numbers = self.price, self.power, self.share
        price = price_of_time(own, fleet.load, fleet.rate, *numbers)
        value = estimate.gain - estimate.harm - price * estimate.work_s * fleet.served
        # Scores are bucket centres: among equal ones the fastest is taken.
        value -= 1e-3 * estimate.latency / limit
        best = np.where(np.asarray(action_mask)[:, 1:] > 0, value, -np.inf).max(axis=1)
        return np.where(best > 0, pick(-value, action_mask), 0)


def price_of_time(
    own: Any,
    fleet: Any,
    rate: Any,
    prices: Any = PRICES,
    powers: Any = POWERS,
    share: float = SHARE,
) -> Any:
    """Price (B, N) of a request's worth of each expert's time, see `ExpectedQosGreedy`.

    From the requests a place of the expert (B, N) and of the fleet (B, 1), and the arrival rate
    over what the fleet serves (B, 1); arrays or tensors.
    """
    load, near = (1 - share) * own + share * fleet, 2 * rate.clip(*RATES) - 1
    price, power = (half * (full / half) ** near for half, full in (prices, powers))
    return price * load**power


def with_mean_scores(observation: Observation, system: RoutingSystem) -> dict[str, NDArray[Any]]:
    """The observation with `RoutingSystem.mean_score` where no expert has a predicted score.

    Under ``score_predictor="zero"`` all scores are 0. The system's means are then one constant,
    with which a score of every expert is as good as any other's.
    """
    changed: dict[str, NDArray[Any]] = dict(observation)
    blank = (observation["request"][..., 1] == 0).all(axis=1)
    if blank.any() and not isinstance(system, FleetSystem):  # whose predictors tell scores
        for key in ("request", "running", "waiting"):
            rows = np.array(observation[key], dtype=np.float64)
            mean = system.mean_score.reshape((1, -1) + (1,) * (rows.ndim - 3))
            where = blank.reshape((-1,) + (1,) * (rows.ndim - 2)) & (rows[..., 1] == 0)
            rows[..., 1] = np.where(where, mean, rows[..., 1])
            changed[key] = rows
    return changed


def _positive(**numbers: float) -> tuple[float, ...]:
    return tuple(real(name, value, 0.0, open_low=True) for name, value in numbers.items())
