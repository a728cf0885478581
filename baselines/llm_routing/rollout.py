"""Rollout: try every action on a copy of the true state. Clairvoyant, and not an upper bound."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.greedy_qos import GreedyQos
from servegym.baselines.llm_routing.heuristics import Mask, RoutingPolicy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation, Policy


class Rollout(RoutingPolicy):
    """Placeholder."""

    name = "rollout"
    clairvoyant = True
    needs_env = True
