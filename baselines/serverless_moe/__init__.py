"""Policies for the serverless MoE environments; importing this registers them."""

from __future__ import annotations

from servegym.baselines.registry import register_policy
from servegym.baselines.serverless_moe import clairvoyant, heuristics
from servegym.baselines.serverless_moe.base import ServerlessPolicy
from servegym.baselines.serverless_moe.lpt import compile_kernels
from servegym.baselines.serverless_moe.remoe.policies import Remoe, RemoeCost, RemoeSticky
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.baselines.serverless_moe.warm_planner import WarmPlanner

__all__ = ["ServerlessSystem", "compile_kernels"]


def _register(policy: type[ServerlessPolicy], line: str) -> None:
    clairvoyant = policy.clairvoyant
    register_policy(policy.name, policy, line, family="serverless_moe", clairvoyant=clairvoyant)


def _register_deployment(name: str, line: str) -> None:
    def make(system: ServerlessSystem) -> heuristics.Deployment:
        return heuristics.Deployment(system, name)

    line = f"deployment: {line}; takes no decision"
    register_policy(name, make, line, family="serverless_moe")


_register(heuristics.Random, "uniform over the legal actions")
_register(Remoe, "the paper's controller: largest worst-case feasible b, P2, replicas by Eq. 15")
_register(RemoeCost, "remoe with the feasible b of least expected cost")
_register(RemoeSticky, "remoe_cost in the shared order; keeps a warm configuration while that pays")
_register(heuristics.Mix, "all experts local on the main function's CPU (b = 0)")
_register_deployment("cpu", "the whole model on one CPU function")
_register_deployment("gpu", "the whole model in GPU memory")
_register_deployment("fetch", "experts in CPU memory, copied to the GPU when needed")
_register_deployment("per_expert", "one CPU function for every expert")
_register(heuristics.KeepAlive, "the one configuration that is best while warm, never changed")
_register(heuristics.BestConstant, "the best constant action, searched on the train split")
_register(
    heuristics.GreedyWarm,
    "one-step: greatest expected reward now and expected saving of what it leaves warm",
)
_register(WarmPlanner, "value iteration over what is left warm, on statistics of the train split")
_register(
    clairvoyant.GridOptimum,
    "clairvoyant, one request at a time: the best action for its true routing, lengths, overhead",
)
_register(
    clairvoyant.Lookahead,
    "clairvoyant planner of the whole episode over 32 warm configurations; not a bound",
)
