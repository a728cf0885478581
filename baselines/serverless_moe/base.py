"""What the policies of the serverless MoE environments share: a row of an observation, and rewards.

A policy decides row by row from the row's own observation. The policies that value actions choose
among the global actions (b, order, W, Y, z); with an action a layer every layer takes the same
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import BasePolicy, Observation
from servegym.baselines.serverless_moe.action_table import ActionTable, WarmFunctions
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.loads import Load

Mask = NDArray[np.integer[Any]]
Actions = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Observed:
    """One row of an observation.

    Attributes:
        frequency: float32 (L, K) predicted.
        n_in: Prompt tokens.
        n_out: Predicted generated tokens.
        ttft_limit_s: TTFT limit.
        tpot_limit_s: TPOT limit.
        last_trem_s: Mean overhead at the last request.
        warm: What is warm, or None.
    """

    frequency: NDArray[np.float32]
    n_in: int
    n_out: int
    ttft_limit_s: float
    tpot_limit_s: float
    last_trem_s: float
    warm: WarmFunctions | None

    @property
    def has_request(self) -> bool:
        """Whether there is a request (not at an episode's end)."""
        return self.n_in > 0


def observed_row(system: ServerlessSystem, observation: Observation, row: int) -> Observed:
    """Read one row of the Dict observation."""
    model = system.model
    lengths, slo = observation["lengths"][row], observation["slo"][row]
    is_warm, main, ratio, order, same = (float(x) for x in observation["warm_main"][row])
    warm = None
    if is_warm > 0.5:
        remote = np.asarray(observation["warm_remote"][row], np.float64)
        warm = WarmFunctions(
            main_mb=round(main * float(model.main_specs_mb[-1]), 2),
            level=int(np.argmin(np.abs(system.levels / model.num_experts - ratio))),
            order=int(order > 0.5),
            same=same > 0.5,
            remote_mb=np.round(remote[:, 0] * model.remote_specs_mb[-1], 2),
            replicas=np.rint(remote[:, 1] * model.z_max).astype(np.int64),
        )
    return Observed(
        np.asarray(observation["activations"][row]),
        round(float(lengths[0])),
        max(1, round(float(lengths[1]))),
        float(slo[0]),
        float(slo[1]),
        float(observation["t_rem"][row][0]),
        warm,
    )


class ServerlessPolicy(BasePolicy):
    """A policy of a serverless system that decides row by row."""

    env_view = "graph"

    def __init__(self, system: ServerlessSystem) -> None:
        self.system = system
        self.table = ActionTable(system)

    def expected(self, observed: Observed) -> Load:
        """The load that the observation lets expect."""
        mean, worst = self.system.expected_trem_s(observed.last_trem_s)
        return Load.predicted(
            self.system.model,
            observed.frequency,
            observed.n_in,
            observed.n_out,
            mean,
            np.full(self.system.model.moe_layers, worst),
            self.system.arguments.trem_sigma,
        )

    def rewards(
        self, observed: Observed, load: Load | None = None, **kwargs: Any
    ) -> NDArray[np.float64]:
        """Expected reward of every global action given what is warm, (levels, 2, W, Y, Z)."""
        load = load or self.expected(observed)
        return self.table.values(load, observed.frequency, **self._given(observed, kwargs)).reward

    def reward(self, observed: Observed, action: Actions) -> float:
        """Expected reward of one action given what is warm."""
        return self.table.reward(
            self.expected(observed), observed.frequency, action, **self._given(observed, {})
        )

    def _given(self, observed: Observed, kwargs: dict[str, Any]) -> dict[str, Any]:
        limits = {"ttft_limit_s": observed.ttft_limit_s, "tpot_limit_s": observed.tpot_limit_s}
        return {"spread": self.system.time_spread, "warm": observed.warm, **limits, **kwargs}

    def decide(self, row: int, observed: Observed, legal: NDArray[np.bool_]) -> Actions:
        """Plan (5,) of a row with a request, or (plan_parts,) with an action a layer.

        Args:
            row: The row.
            observed: Its observation.
            legal: (levels,) values of b that the mask allows.
        """
        raise NotImplementedError

    def act(self, observation: Observation, action_mask: Mask) -> Actions:
        """See `Policy.act`; int64 (B, len(nvec)), with ``keep_action`` a last part of 0."""
        mask = np.asarray(action_mask)
        actions = np.zeros((mask.shape[0], len(self.system.nvec)), dtype=np.int64)
        for row in range(mask.shape[0]):
            observed = observed_row(self.system, observation, row)
            if observed.has_request:
                legal = mask[row, : len(self.system.levels)] > 0
                plan = self.system.full_action(self.decide(row, observed, legal))
                actions[row, : len(plan)] = plan
        return actions


def best_action(values: NDArray[np.float64], legal: NDArray[np.bool_]) -> Actions:
    """The legal action of greatest value, the first among equals."""
    masked = np.where(legal[:, None, None, None, None], values, -np.inf)
    return np.array(np.unravel_index(int(masked.argmax()), values.shape), dtype=np.int64)
