"""Policies for the expert placement environments; importing this registers them."""

from servegym.baselines.expert_placement import policies
from servegym.baselines.expert_placement.kernel import compile_kernels
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import register_policy

__all__ = ["PlacementSystem", "compile_kernels"]

for _policy, _description in {
    policies.KeepPlacement: "keeps the placement of the start",
    policies.Uniform: "every expert once, evenly over the GPUs; never moves",
    policies.Redundance: "uniform, free slots filled at random; never moves",
    policies.SmartMoe: "every expert once, loads balanced over the GPUs",
    policies.Eplb: "replicas of heavy experts, balanced inside each server",
    policies.EplbGlobal: "replicas of heavy experts, balanced over all GPUs",
    policies.Prism: (
        "layer budgets by entropy, experts by frequency (Algorithms 1 and 2, corrected)"
    ),
    policies.PrismPrinted: "prism with the slots lost that the printed algorithm loses",
    policies.WholeLayer: "whole layers on each server, blind to activations; never moves",
    policies.Forward: (
        "whole layers in chains of servers, on which hidden states move on; never moves experts"
    ),
    policies.LatencyDp: "layer budgets by exact knapsack over latency estimated from whole tokens",
    policies.ProxyOptimum: "fewest remote assignments for the counts seen (exact Eq. 2)",
    policies.BestStart: "one placement for all times: annealed, chosen and refined by simulation",
    policies.LatencyLocalSearch: (
        "the best of the others improved step by step, measured by the simulator"
    ),
    policies.MoeInfinity: (
        "no placement: each server caches experts on its GPUs and fetches the others"
    ),
    policies.MoeInfinityLb: (
        "moe_infinity with requests redirected to the server that serves fewest"
    ),
    policies.LfuCaches: (
        "caches that keep the experts most often used; requests go to the least load of a GPU"
    ),
    policies.LruCaches: (
        "caches that keep the experts most recently used; requests go to the least load of a GPU"
    ),
    policies.RandomPlacement: "control: another random placement every epoch; must lose",
}.items():
    register_policy(_policy.name, _policy, _description, family="expert_placement")
