"""Policies for the LLM routing environments; importing this registers them."""

from servegym.baselines.llm_routing import fleet_features, latency
from servegym.baselines.llm_routing.bandits import DelayedLinUcb, LinUcb, Thompson
from servegym.baselines.llm_routing.fleets import per_fleet
from servegym.baselines.llm_routing.greedy_qos import (
    ExpectedQosGreedy,
    GreedyQos,
    LeastLatency,
    PricedGreedy,
)
from servegym.baselines.llm_routing.heuristics import (
    AlwaysBest,
    AlwaysBusiest,
    BertRouter,
    DropAll,
    LeastMemory,
    LeastOutstanding,
    PowerOfTwo,
    Random,
    RoundRobin,
    ShortestWaiting,
    TokenJsq,
    VllmDp,
)
from servegym.baselines.llm_routing.rollout import Rollout
from servegym.baselines.llm_routing.route_balance import RouteBalance
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import register_policy

__all__ = ["RoutingSystem", "compile_kernels"]


def compile_kernels() -> None:
    """Compile what the policies compile, or load it from the cache on disk."""
    latency.compile_kernels()
    fleet_features.compile_kernels()


for _policy, _line, *_aliases in (
    (Random, "uniform over the experts that are not full"),
    (RoundRobin, "the next expert in turn, passing over full ones"),
    (LeastOutstanding, "fewest requests, waiting and running; rotating ties", "shortest_queue"),
    (ShortestWaiting, "fewest waiting requests; rotating ties"),
    (LeastMemory, "least share of KV memory in use; rotating ties"),
    (PowerOfTwo, "of two random experts the one with fewer requests"),
    (VllmDp, "least 4 x waiting + running (vLLM's data-parallel score)"),
    (TokenJsq, "fewest tokens of predicted work left; rotating ties"),
    (
        BertRouter,
        "highest predicted score, blind to load (argmax of the predictions; no trained classifier)",
    ),
    (LeastLatency, "least predicted latency per token, blind to scores"),
    (GreedyQos, "best predicted score among the experts that keep everyone's latency, else drop"),
    (PricedGreedy, "greedy_qos less a price on busy capacity"),
    (
        ExpectedQosGreedy,
        "priced_greedy on expected QoS: lengths as distributions; the strongest heuristic",
    ),
    (RouteBalance, "RouteBalance's weighted score of predicted quality, cost and latency"),
    (AlwaysBest, "best train mean score, the next best while it is full"),
    (
        LinUcb,
        "linear bandit an expert, learns online from a train-split prior; sees scores at "
        "acceptance",
    ),
    (DelayedLinUcb, "linucb that learns a request's QoS when the request ends"),
    (Thompson, "Thompson sampling of the same linear bandit, QoS learned when a request ends"),
    (DropAll, "control: drops every request"),
    (AlwaysBusiest, "control: most requests; must lose"),
    (
        Rollout,
        "clairvoyant: every action simulated on a copy of the true state, then priced_greedy",
    ),
):
    register_policy(
        _policy.name,
        _policy,
        _line,
        clairvoyant=_policy.clairvoyant,
        aliases=tuple(_aliases),
        # A policy that takes the environment meets all of its fleets there.
        wrapper=None if _policy.needs_env else per_fleet,
    )
