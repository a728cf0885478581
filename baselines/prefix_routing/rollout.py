"""Rollout of prefix routing: every replica tried on a copy of the true state. Clairvoyant."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import whole
from servegym.baselines.prefix_routing.plugins import GatewayPolicy
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.protocol import Observation
from servegym.baselines.rollout import RolloutPolicy
from servegym.envs.prefix_routing.core import PrefixBatch

CONSTANTS = {
    "prefill_load_scale": 5.4,
    "overlap_score_credit": 2.6,
    "decode_active_request_weight": 0.2,
}
"""Of Dynamo's cost: the best single set of ``experiments/results/prefix/tuned_rules``."""


class _Dynamo(GatewayPolicy):
    """Dynamo's cost with `CONSTANTS`, for any number of rows."""

    def __init__(self, system: PrefixSystem) -> None:
        super().__init__(system, "dynamo", CONSTANTS)

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        if self.num_envs < (rows := max(np.shape(action_mask))):
            self.reset(rows, 0)  # a source of chance for each row
        return super().act(observation, action_mask)


class Rollout(RolloutPolicy):
    """`RolloutPolicy` by Dynamo's cost with tuned constants (`CONSTANTS`).

    What ranks the actions is the number of requests within both objectives.

    Args:
        system: The system.
        horizon: Requests that the rule routes after the action.

    Raises:
        ValueError: If ``horizon`` is below 1.
    """

    batch, alone = PrefixBatch, True

    def __init__(self, system: PrefixSystem, horizon: int = 60) -> None:
        super().__init__(system, whole("horizon", horizon, 1, 1 << 20), _Dynamo(system))

    def problem_of(self, env: Any) -> Any:
        """That of the environment, if its reward is the number that is counted."""
        if env.batch.terms != ("met",):
            raise ValueError("rollout counts the requests within the objectives: reward='slo'")
        return env.problem
