"""Policies for the expert placement environments; importing this registers them."""

from servegym.baselines.expert_placement.kernel import compile_kernels
from servegym.baselines.expert_placement.policies import (
    Annealing,
    BestStart,
    Eplb,
    EplbGlobal,
    Forward,
    KeepPlacement,
    LatencyDp,
    LatencyLocalSearch,
    LfuCaches,
    LocalSearch,
    LruCaches,
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
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import register_policy

__all__ = ["PlacementSystem", "compile_kernels"]

_FAMILY = "expert_placement"
register_policy("keep", KeepPlacement, "keeps the placement of the start", family=_FAMILY)
register_policy(
    "uniform", Uniform, "every expert once, evenly over the GPUs; never moves", family=_FAMILY
)
register_policy(
    "redundance", Redundance, "uniform, free slots filled at random; never moves", family=_FAMILY
)
register_policy(
    "smartmoe", SmartMoe, "every expert once, loads balanced over the GPUs", family=_FAMILY
)
register_policy(
    "eplb", Eplb, "replicas of heavy experts, balanced inside each server", family=_FAMILY
)
register_policy(
    "eplb_global", EplbGlobal, "replicas of heavy experts, balanced over all GPUs", family=_FAMILY
)
register_policy(
    "prism",
    Prism,
    "layer budgets by entropy, experts by frequency (Algorithms 1 and 2, corrected)",
    family=_FAMILY,
)
register_policy(
    "prism_printed",
    PrismPrinted,
    "prism with the slots lost that the printed algorithm loses",
    family=_FAMILY,
)
register_policy(
    "whole_layer",
    WholeLayer,
    "whole layers on each server, blind to activations; never moves",
    family=_FAMILY,
)
register_policy(
    "forward",
    Forward,
    "whole layers in chains of servers, on which hidden states move on; never moves experts",
    family=_FAMILY,
)
register_policy(
    "latency_dp",
    LatencyDp,
    "layer budgets by exact knapsack over latency estimated from whole tokens",
    family=_FAMILY,
)
register_policy(
    "local_search",
    LocalSearch,
    "the placement in use improved by few loads, by estimated latency",
    family=_FAMILY,
)
register_policy(
    "annealing",
    Annealing,
    "latency_dp refined by simulated annealing of the estimated latency",
    family=_FAMILY,
)
register_policy(
    "proxy_optimum",
    ProxyOptimum,
    "fewest remote assignments for the counts seen (exact Eq. 2)",
    family=_FAMILY,
)
register_policy(
    "best_start",
    BestStart,
    "one placement for all times: annealed, chosen and refined by simulation",
    family=_FAMILY,
)
register_policy(
    "latency_local_search",
    LatencyLocalSearch,
    "the best of the others improved step by step, measured by the simulator",
    family=_FAMILY,
)
register_policy(
    "moe_infinity",
    MoeInfinity,
    "no placement: each server caches experts on its GPUs and fetches the others",
    family=_FAMILY,
)
register_policy(
    "moe_infinity_lb",
    MoeInfinityLb,
    "moe_infinity with requests redirected to the server that serves fewest",
    family=_FAMILY,
)
register_policy(
    "lfu_caches",
    LfuCaches,
    "caches that keep the experts most often used; requests go to the least load of a GPU",
    family=_FAMILY,
)
register_policy(
    "lru_caches",
    LruCaches,
    "caches that keep the experts most recently used; requests go to the least load of a GPU",
    family=_FAMILY,
)
register_policy(
    "random",
    RandomPlacement,
    "control: another random placement every epoch; must lose",
    family=_FAMILY,
)
