"""Rollout of LLM routing: every action tried on a copy of the true state. Clairvoyant."""

from __future__ import annotations

from typing import Any

from servegym._checks import whole
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy
from servegym.baselines.llm_routing.heuristics import RoutingPolicy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.rollout import RolloutPolicy
from servegym.envs.llm_routing.config import build_problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.kernel import layout


class Rollout(RolloutPolicy, RoutingPolicy):
    """`RolloutPolicy` by `PricedGreedy`, which it improves on.

    What ranks the actions is the sum of the "paid_forward" rewards: the true score of what was let
    in less that of what ended late.

    Args:
        system: The system.
        horizon: Requests that priced_greedy decides after the first action.

    Raises:
        ValueError: If ``horizon`` is negative.
    """

    batch = RoutingBatch

    def __init__(self, system: RoutingSystem, *, horizon: int = 100) -> None:
        super().__init__(system, whole("horizon", horizon, 0), PricedGreedy(system))

    def problem_of(self, env: Any) -> Any:
        """The same problem with the other reward: the dynamics do not depend on it."""
        arguments = {**env.problem.arguments, "reward": "paid_forward"}
        return build_problem(view=layout.GRAPH, **arguments)
