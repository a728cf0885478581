"""Policies for the expert placement environments; importing this registers them."""

from servegym.baselines.expert_placement.policies import (
    Eplb,
    EplbGlobal,
    Keep,
    MoeInfinity,
    MoeInfinityLb,
    Prism,
    PrismPrinted,
    ProxyOptimum,
    RandomPlacement,
    Redundance,
    SmartMoe,
    Uniform,
    WholeLayer,
)
from servegym.baselines.expert_placement.searchers import (
    Annealing,
    BestStart,
    LatencyDp,
    LatencyLocalSearch,
    LocalSearch,
)
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import register_policy

__all__ = ["PlacementSystem"]

_POLICIES = (
    (Keep, "keeps the placement of the start"),
    (Uniform, "every expert once, evenly over the GPUs; never moves"),
    (Redundance, "uniform, free slots filled at random; never moves"),
    (SmartMoe, "every expert once, loads balanced over the GPUs"),
    (Eplb, "replicas of heavy experts, balanced inside each server"),
    (EplbGlobal, "replicas of heavy experts, balanced over all GPUs"),
    (Prism, "layer budgets by entropy, experts by frequency (Algorithms 1 and 2, corrected)"),
    (PrismPrinted, "prism with the slots lost that the printed algorithm loses"),
    (WholeLayer, "whole layers on each server, blind to activations; never moves"),
    (LatencyDp, "layer budgets by exact knapsack over latency estimated from whole tokens"),
    (LocalSearch, "the placement in use improved by few loads, by estimated latency"),
    (Annealing, "latency_dp refined by simulated annealing of the estimated latency"),
    (ProxyOptimum, "fewest remote assignments for the counts seen (exact Eq. 2)"),
    (BestStart, "one placement for all times: annealed, chosen and refined by simulation"),
    (LatencyLocalSearch, "the best of the others improved step by step, measured by the simulator"),
    (MoeInfinity, "no placement: each server caches experts on its GPUs and fetches the others"),
    (MoeInfinityLb, "moe_infinity with requests redirected to the server that serves fewest"),
    (RandomPlacement, "control: another random placement every epoch; must lose"),
)
for _policy, _text in _POLICIES:
    register_policy(_policy.name, _policy, _text, family="expert_placement")
