"""Remoe as a policy: its plans put on the environment's grid of actions, in three readings.

With an action a layer, memory and replicas are chosen layer by layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless_moe.base import Actions, Observed, ServerlessPolicy
from servegym.baselines.serverless_moe.remoe.controller import remoe
from servegym.baselines.serverless_moe.remoe.mmp import worst_cases
from servegym.envs.serverless_moe.records import Plan


class Remoe(ServerlessPolicy):
    """The paper's controller: Algorithm 2, utility, P2 and Eq. 15, put on the action grid."""

    name = "remoe"
    reading = "remoe"
    order = 0
    """Experts are ordered by the prompt's prediction (0) or by the shared mean (1)."""

    def decide(self, row: int, observed: Observed, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        system, load = self.system, self.expected(observed)
        limits = {"ttft_limit_s": observed.ttft_limit_s, "tpot_limit_s": observed.tpot_limit_s}
        cases = worst_cases(system.model, load, **limits, max_tokens=system.max_output_tokens)
        decision = remoe(
            system.model,
            load,
            **limits,
            reading=self.reading,
            candidates=9,
            cases=cases.only(system.levels[legal]),
            score=system.shared if self.order else None,
        )
        return self.on_grid(observed, decision.plan)

    def on_grid(self, observed: Observed, plan: Plan) -> Actions:
        """The action whose plan is nearest to this one.

        Falling short counts double: less memory or fewer replicas can make a plan infeasible. With
        an action a layer every layer takes its own nearest steps, else all the same ones.
        """
        used = plan.remote.any(axis=1)
        choices = self.table.choices(observed.frequency, observed.n_in)
        level = int(np.argmin(np.abs(self.system.levels - plan.remote[0].sum())))
        s = 2 * level + self.order
        w = int(np.argmin(np.abs(choices.main_mb[s] - plan.main_mb)))
        steps = []
        for have, want in (
            (choices.memory_mb[s], plan.remote_mb[:, None]),
            (choices.replicas[s], plan.replicas[:, None]),
        ):
            distance = np.abs(have - want) + np.maximum(want - have, 0)
            distance[~used] = 0.0
            if self.system.arguments.granularity == "global":
                distance = distance.sum(axis=0, keepdims=True)
            steps.append(distance.argmin(axis=1))
        return np.concatenate([[level, self.order, w], *steps]).astype(np.int64)


class RemoeCost(Remoe):
    """Remoe with the b of least expected cost among those that Algorithm 2 allows."""

    name = "remoe_cost"
    reading = "remoe_cost"


class RemoeSticky(RemoeCost):
    """remoe_cost that keeps a warm configuration while that is expected to be better.

    It uses the shared order, in which other prompts find the functions warm.
    """

    name = "remoe_sticky"
    order = 1

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._last = np.zeros((num_envs, self.system.plan_parts), dtype=np.int64)
        self._known = np.zeros(num_envs, dtype=np.bool_)
        super().reset(num_envs, seed)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Forget the last action."""
        self._known[mask] = False

    def decide(self, row: int, observed: Observed, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        action = super().decide(row, observed, legal)
        last = self._last[row]
        if self._known[row] and observed.warm is not None and legal[last[0]]:
            if self.reward(observed, last) >= self.reward(observed, action):
                action = last.copy()
        self._last[row], self._known[row] = action, True
        return action
