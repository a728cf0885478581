"""Policies on the latency estimate: least predicted latency, and greedy predicted QoS."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.heuristics import Floats, Mask, RoutingPolicy, pick
from servegym.baselines.llm_routing.latency import Estimate, LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation


class LeastLatency(RoutingPolicy):
    """Least predicted latency per token of the new request; blind to scores and to others."""

    name = "least_latency"

    def __init__(self, system: RoutingSystem, *, overrun: float = 0.1) -> None:
        super().__init__(system)
        self.model = LatencyModel(system, overrun=overrun)

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        return pick(self.model.estimate(observation).with_new[..., -1], action_mask)


def imputed_scores(observation: Observation, system: RoutingSystem) -> dict[str, NDArray]:
    """The observation with train means where a request has no predicted score at all.

    Under ``score_predictor="zero"`` all scores are 0, and an operator then knows only the means.
    """
    request = observation["request"]
    blank = (request[..., 1] == 0).all(axis=1)
    if not blank.any():
        return dict(observation)
    changed = dict(observation)
    mean = system.mean_score
    for key, shape in (("request", (1, -1)), ("running", (1, -1, 1)), ("waiting", (1, -1, 1))):
        rows = np.array(observation[key], dtype=np.float64)
        where = blank.reshape((-1,) + (1,) * (rows.ndim - 2)) & (rows[..., 1] == 0)
        rows[..., 1] = np.where(where, mean.reshape(shape), rows[..., 1])
        changed[key] = rows
    return changed


class GreedyQos(RoutingPolicy):
    """To be tuned."""

    name = "greedy_qos"

    def __init__(
        self,
        system: RoutingSystem,
        *,
        form: str = "soft",
        margin: float = 1.0,
        width: float = 0.15,
        price: float = 0.0,
        overrun: float = 0.1,
        fallback: str = "harm",
        drop: bool = False,
    ) -> None:
        super().__init__(system)
        self.model = LatencyModel(system, overrun=overrun)
        self.form, self.margin, self.width, self.price = form, margin, width, price
        self.fallback, self.drop = fallback, drop

    def value(self, observation: Observation) -> Floats:
        obs = imputed_scores(observation, self.system)
        est = self.model.estimate(obs)
        limit = np.asarray(obs["latency_requirement"], float).reshape(-1, 1, 1)
        s = est.scores
        if self.form == "soft":

            def ok(l):
                z = (l / limit - self.margin) / self.width
                return np.where(np.isnan(l), 0.0, 1 / (1 + np.exp(np.clip(z, -40, 40))))

            v = (s * (ok(est.with_new) - ok(est.without))).sum(-1)
        else:
            ok_w = est.with_new <= self.margin * limit
            ok_o = est.without <= self.margin * limit
            broken = ok_o & ~ok_w
            qualifies = ok_w[..., -1] & ~broken.any(-1)
            if self.fallback == "harm":
                alt = (s * (ok_w.astype(float) - ok_o)).sum(-1) - 10 - 1e-3 * est.with_new[..., -1]
            elif self.fallback == "latency":
                alt = -10 - est.with_new[..., -1]
            v = np.where(qualifies, s[..., -1] - 1e-3 * est.with_new[..., -1], alt)
        return v - self.price * est.added_s

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        v = self.value(observation)
        a = pick(-v, action_mask)
        if self.drop:
            best = np.where(np.asarray(action_mask)[:, 1:] > 0, v, -np.inf).max(1)
            a = np.where(best < 0, 0, a)
        return a
