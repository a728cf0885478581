"""Policies for the serverless MoE environments; importing this registers them."""

from servegym.baselines.registry import register_policy
from servegym.baselines.serverless_moe.clairvoyant import GridOptimum, Lookahead
from servegym.baselines.serverless_moe.heuristics import (
    BestConstant,
    Cpu,
    Fetch,
    Gpu,
    GreedyWarm,
    KeepAlive,
    Mix,
    PerExpert,
    Random,
)
from servegym.baselines.serverless_moe.lpt import compile_kernels as _compile_lpt
from servegym.baselines.serverless_moe.remoe.policies import Remoe, RemoeCost, RemoeSticky
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.baselines.serverless_moe.warm_planner import WarmPlanner

__all__ = ["ServerlessSystem", "compile_kernels"]

_FAMILY = "serverless_moe"


def compile_kernels() -> None:
    """Compile what the policies and the predictors run, or load it from the cache on disk."""
    from servegym.baselines.serverless_moe.prediction import kernel

    _compile_lpt()
    kernel.compile_kernels()


register_policy("random", Random, "uniform over the legal actions", family=_FAMILY)
register_policy(
    "remoe",
    Remoe,
    "the paper's controller: largest worst-case feasible b, P2, replicas by Eq. 15",
    family=_FAMILY,
)
register_policy(
    "remoe_cost", RemoeCost, "remoe with the feasible b of least expected cost", family=_FAMILY
)
register_policy(
    "remoe_sticky",
    RemoeSticky,
    "remoe_cost in the shared order; keeps a warm configuration while that pays",
    family=_FAMILY,
)
register_policy("mix", Mix, "all experts local on the main function's CPU (b = 0)", family=_FAMILY)
register_policy(
    "cpu",
    Cpu,
    "deployment: the whole model on one CPU function; takes no decision",
    family=_FAMILY,
)
register_policy(
    "gpu", Gpu, "deployment: the whole model in GPU memory; takes no decision", family=_FAMILY
)
register_policy(
    "fetch",
    Fetch,
    "deployment: experts in CPU memory, copied to the GPU when needed; takes no decision",
    family=_FAMILY,
)
register_policy(
    "per_expert",
    PerExpert,
    "deployment: one CPU function for every expert; takes no decision",
    family=_FAMILY,
)
register_policy(
    "keep_alive",
    KeepAlive,
    "the one configuration that is best while warm, never changed",
    family=_FAMILY,
)
register_policy(
    "best_constant",
    BestConstant,
    "the best constant action, searched on the train split",
    family=_FAMILY,
)
register_policy(
    "greedy_warm",
    GreedyWarm,
    "one-step: greatest expected reward now and expected saving of what it leaves warm",
    family=_FAMILY,
)
register_policy(
    "warm_planner",
    WarmPlanner,
    "value iteration over what is left warm, on statistics of the train split",
    family=_FAMILY,
)
register_policy(
    "grid_optimum",
    GridOptimum,
    "clairvoyant, one request at a time: the best action for its true routing, lengths, overhead",
    family=_FAMILY,
    clairvoyant=True,
)
register_policy(
    "lookahead",
    Lookahead,
    "clairvoyant planner of the whole episode over 32 warm configurations; not a bound",
    family=_FAMILY,
    clairvoyant=True,
)
