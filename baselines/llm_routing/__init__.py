"""Policies for the LLM routing environments; importing this registers them."""

from servegym.baselines.llm_routing.bandits import DelayedLinUcb, LinUcb, Thompson
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
from servegym.baselines.llm_routing.latency import compile_kernels
from servegym.baselines.llm_routing.rollout import Rollout
from servegym.baselines.llm_routing.route_balance import RouteBalance
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import register_policy

__all__ = ["RoutingSystem", "compile_kernels"]


register_policy("random", Random, "uniform over the experts that are not full")
register_policy("round_robin", RoundRobin, "the next expert in turn, passing over full ones")
register_policy(
    "least_outstanding",
    LeastOutstanding,
    "fewest requests, waiting and running; rotating ties",
    aliases=("shortest_queue",),
)
register_policy("shortest_waiting", ShortestWaiting, "fewest waiting requests; rotating ties")
register_policy("least_memory", LeastMemory, "least share of KV memory in use; rotating ties")
register_policy("power_of_two", PowerOfTwo, "of two random experts the one with fewer requests")
register_policy("vllm_dp", VllmDp, "least 4 x waiting + running (vLLM's data-parallel score)")
register_policy("token_jsq", TokenJsq, "fewest tokens of predicted work left; rotating ties")
register_policy(
    "bert_router",
    BertRouter,
    "highest predicted score, blind to load (argmax of the predictions; no trained classifier)",
)
register_policy("least_latency", LeastLatency, "least predicted latency per token, blind to scores")
register_policy(
    "greedy_qos",
    GreedyQos,
    "best predicted score among the experts that keep everyone's latency, else drop",
)
register_policy(
    "priced_greedy",
    PricedGreedy,
    "greedy_qos less a price on busy capacity",
)
register_policy(
    "expected_qos",
    ExpectedQosGreedy,
    "priced_greedy on expected QoS: lengths as distributions; the strongest heuristic",
)
register_policy(
    "route_balance",
    RouteBalance,
    "RouteBalance's weighted score of predicted quality, cost and latency",
)
register_policy("always_best", AlwaysBest, "best train mean score, the next best while it is full")
register_policy(
    "linucb",
    LinUcb,
    "linear bandit an expert, learns online from a train-split prior; sees scores at acceptance",
    clairvoyant=True,
)
register_policy(
    "linucb_delayed",
    DelayedLinUcb,
    "linucb that learns a request's QoS when the request ends",
)
register_policy(
    "thompson",
    Thompson,
    "Thompson sampling of the same linear bandit, QoS learned when a request ends",
)
register_policy("drop_all", DropAll, "control: drops every request")
register_policy("always_busiest", AlwaysBusiest, "control: most requests; must lose")
register_policy(
    "rollout",
    Rollout,
    "clairvoyant: every action simulated on a copy of the true state, then priced_greedy",
    clairvoyant=True,
)
