"""Policies for the serverless MoE environments; importing this registers them."""

from servegym.baselines.registry import register_policy
from servegym.baselines.serverless_moe import clairvoyant, heuristics
from servegym.baselines.serverless_moe.lpt import compile_kernels
from servegym.baselines.serverless_moe.remoe.policies import Remoe, RemoeCost, RemoeSticky
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.baselines.serverless_moe.warm_planner import WarmPlanner

__all__ = ["ServerlessSystem", "compile_kernels"]

for _policy, _description in {
    heuristics.Random: "uniform over the legal actions",
    Remoe: "the paper's controller: largest worst-case feasible b, P2, replicas by Eq. 15",
    RemoeCost: "remoe with the feasible b of least expected cost",
    RemoeSticky: "remoe_cost in the shared order; keeps a warm configuration while that pays",
    heuristics.Mix: "all experts local on the main function's CPU (b = 0)",
    heuristics.Cpu: "deployment: the whole model on one CPU function; takes no decision",
    heuristics.Gpu: "deployment: the whole model in GPU memory; takes no decision",
    heuristics.Fetch: (
        "deployment: experts in CPU memory, copied to the GPU when needed; takes no decision"
    ),
    heuristics.PerExpert: "deployment: one CPU function for every expert; takes no decision",
    heuristics.KeepAlive: "the one configuration that is best while warm, never changed",
    heuristics.BestConstant: "the best constant action, searched on the train split",
    heuristics.GreedyWarm: (
        "one-step: greatest expected reward now and expected saving of what it leaves warm"
    ),
    WarmPlanner: "value iteration over what is left warm, on statistics of the train split",
    clairvoyant.GridOptimum: (
        "clairvoyant, one request at a time: the best action for its true routing, lengths, "
        "overhead"
    ),
    clairvoyant.Lookahead: (
        "clairvoyant planner of the whole episode over 32 warm configurations; not a bound"
    ),
}.items():
    register_policy(
        _policy.name,
        _policy,
        _description,
        family="serverless_moe",
        clairvoyant=_policy.clairvoyant,
    )
