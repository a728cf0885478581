"""Policies for the expert placement environments; importing this registers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from servegym.baselines.expert_placement import heuristics, policies
from servegym.baselines.expert_placement.eplb import eplb, eplb_global
from servegym.baselines.expert_placement.kernel import compile_kernels
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.policies import (
    CountsPlacement,
    MoeInfinity,
    RandomPlacement,
)
from servegym.baselines.expert_placement.prism import prism, prism_printed
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import register_policy

__all__ = ["PlacementSystem", "compile_kernels"]


_POLICIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "keep": (policies.KeepPlacement, {}),
    "uniform": (RandomPlacement, {"draw": heuristics.uniform}),
    "redundance": (RandomPlacement, {"draw": heuristics.redundance}),
    "smartmoe": (CountsPlacement, {"place": heuristics.smartmoe}),
    "eplb": (CountsPlacement, {"place": eplb}),
    "eplb_global": (CountsPlacement, {"place": eplb_global}),
    "prism": (CountsPlacement, {"place": prism}),
    "prism_printed": (CountsPlacement, {"place": prism_printed}),
    "whole_layer": (CountsPlacement, {"place": heuristics.whole_layer, "static": True}),
    "forward": (
        CountsPlacement,
        {"place": heuristics.layer_chains, "static": True, "execution": "forward"},
    ),
    "proxy_optimum": (CountsPlacement, {"place": proxy_optimum}),
    "best_start": (policies.BestStart, {}),
    "moe_infinity": (MoeInfinity, {}),
    "moe_infinity_lb": (MoeInfinity, {"router": "fewest_requests"}),
    "lfu_caches": (MoeInfinity, {"cache": "lfu", "router": "least_load_per_gpu"}),
    "lru_caches": (MoeInfinity, {"cache": "lru", "router": "least_load_per_gpu"}),
    "random": (RandomPlacement, {"draw": heuristics.redundance, "static": False}),
}
"""Name -> the class, and its options that users do not choose."""
_DESCRIPTIONS = {
    "keep": "keeps the placement of the start",
    "uniform": "every expert once, evenly over the GPUs; never moves",
    "redundance": "uniform, free slots filled at random; never moves",
    "smartmoe": "every expert once, loads balanced over the GPUs",
    "eplb": "replicas of heavy experts, balanced inside each server",
    "eplb_global": "replicas of heavy experts, balanced over all GPUs",
    "prism": "layer budgets by entropy, experts by frequency (Algorithms 1 and 2, corrected)",
    "prism_printed": "prism with the slots lost that the printed algorithm loses",
    "whole_layer": "whole layers on each server, blind to activations; never moves",
    "forward": (
        "whole layers in chains of servers, on which hidden states move on; never moves experts"
    ),
    "proxy_optimum": "fewest remote assignments for the counts seen (exact Eq. 2)",
    "best_start": "one placement for all times: annealed, chosen and refined by simulation",
    "moe_infinity": "no placement: each server caches experts on its GPUs and fetches the others",
    "moe_infinity_lb": "moe_infinity with requests redirected to the server that serves fewest",
    "lfu_caches": (
        "caches that keep the experts most often used; requests go to the least load of a GPU"
    ),
    "lru_caches": (
        "caches that keep the experts most recently used; requests go to the least load of a GPU"
    ),
    "random": "control: another random placement every epoch; must lose",
}


def _register(name: str, policy: Callable[..., Any], options: Mapping[str, Any]) -> None:
    def make(system: PlacementSystem) -> Any:
        made = policy(system, **options)
        made.name = name
        return made

    line = _DESCRIPTIONS[name]
    register_policy(name, make if options else policy, line, family="expert_placement")


for _name, _parts in _POLICIES.items():
    _register(_name, *_parts)
