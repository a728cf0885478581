"""Late binding: a request is held back until an expert is worth more than waiting."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.greedy_qos import ExpectedQosGreedy, with_mean_scores
from servegym.baselines.llm_routing.heuristics import Mask
from servegym.baselines.llm_routing.lengths import LengthModel
from servegym.baselines.llm_routing.system import Floats, RoutingSystem, interpolate
from servegym.baselines.protocol import Observation


class LateQos(ExpectedQosGreedy):
    """`ExpectedQosGreedy` with late binding [1], [2]: it holds while waiting is worth more.

    A request goes to the best expert among those with fewer than ``fill`` R requests, if its value
    there is at least that of waiting; else it is held. The value of waiting is::

        worth * max_n (s_n P(length > (w + (1 + h) / mu + prefill_n) / (margin L - d_n))
                       - charge_n work_n),
        mu = sum_n running_n / (mean length_n d_n),

    with the predicted score s_n, the seconds w since arrival, the other held requests h, the rate
    mu of completions in the fleet, the decode iteration d_n of the batch at hand, and the price of
    the expert's time, which goes by what is held too: the expected QoS on an expert that swaps a
    request which completes for this one, once the held requests have had theirs. Where nothing may
    be held, or waiting is worth nothing, it decides as `ExpectedQosGreedy` does.

    [1] K. Ousterhout, P. Wendell, M. Zaharia, I. Stoica: "Sparrow: Distributed, Low Latency
    Scheduling", SOSP 2013 (late binding).
    [2] Y. Lu et al.: "Join-Idle-Queue", Performance Evaluation 68(11), 2011.
    """

    name = "late_qos"
    env_kwargs: Mapping[str, Any] = MappingProxyType({"late_binding": True})

    def __init__(
        self, system: RoutingSystem, *, worth: float = 0.2, fill: float = 3.0, **kwargs: Any
    ) -> None:
        """Build it.

        Args:
            system: The system.
            worth: Share of the value of waiting that counts; 0 never holds.
            fill: Requests at an expert, over R, from which on it takes none.
            **kwargs: Parameters of `ExpectedQosGreedy`.

        Raises:
            ValueError: If a parameter is out of range.
        """
        super().__init__(system, **kwargs)
        if self.expected is None:
            raise ValueError("lengths must be 'survival', got 'predicted'")
        for argument, given in (("worth", worth), ("fill", fill)):
            if given < 0:
                raise ValueError(f"{argument} must be >= 0, got {given}")
        self.worth, self.fill = float(worth), float(fill)
        self.lengths: LengthModel = self.expected.lengths

    def act(self, observation: Observation, action_mask: Mask) -> NDArray[np.int64]:
        """See `Policy.act`."""
        if "held" not in observation:
            return super().act(observation, action_mask)
        mask = np.asarray(action_mask)
        early = mask[:, :-1]
        seen = with_mean_scores(observation, self.system)
        value, estimate = self.expected_value(seen)
        bound = self.bind(value, early)
        if self.worth == 0:
            return bound
        later = self.worth * self._value_of_waiting(seen, estimate.work_s)
        experts = np.asarray(seen["experts"])
        free = (early[:, 1:] > 0) & (
            experts[..., 1] + experts[..., 2] < self.fill * self.system.running_capacity
        )
        value = np.where(free, value, -np.inf)
        hold = (mask[:, -1] > 0) & (later > 0)
        best = value.max(axis=1)
        now = np.where(hold & (best >= later), value.argmax(axis=1) + 1, bound)
        return np.where(hold & (best < later), mask.shape[1] - 1, now).astype(np.int64)

    def _value_of_waiting(self, observation: Observation, work_s: Floats) -> Floats:
        """(B,) of holding the request until the next completion."""
        system = self.system
        request = np.asarray(observation["request"], dtype=np.float64)
        running = np.asarray(observation["experts"])[..., 1]
        limit = self.margin * np.asarray(observation["latency_requirement"], dtype=np.float64)
        predicted, none = request[..., 2:], np.zeros_like(request[..., 2:])
        mean = self.lengths.remaining(predicted, none)[..., 0]
        pace, prefill = np.empty_like(mean), np.empty_like(mean)
        batch = np.clip(running, 1, system.running_capacity).astype(np.intp)
        for n in range(system.num_experts):
            context = request[:, n, 0] + 0.5 * mean[:, n]
            paces = interpolate(context, system.context_tokens, system.decode_s[n])
            pace[:, n] = paces[batch[:, n], np.arange(len(mean))]
            prefill[:, n] = interpolate(
                request[:, n, 0], system.prefill_tokens, system.prefill_s[n]
            )
        rate = (running / (system.mean_output_tokens * pace)).sum(axis=1)
        waited_s, ahead = np.asarray(observation["held"], dtype=np.float64).T
        wait_s = waited_s + (1.0 + ahead) / np.maximum(rate, 1e-9)
        slack = limit - pace
        least = (wait_s[:, None] + system.router_delay_s + prefill) / np.where(slack > 0, slack, 1)
        tokens = np.clip(np.ceil(least) - 1, 0, system.max_output_tokens)
        late = self.lengths.finishes_within(predicted, none, tokens[..., None])[..., 0]
        chance = np.where(slack > 0, 1.0 - late, 0.0)
        return (request[..., 1] * chance - self.charge(observation) * work_s).max(axis=1)
