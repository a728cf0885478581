"""Policies for the LLM routing environments; importing this registers them."""

from servegym.baselines.llm_routing import greedy_qos, heuristics
from servegym.baselines.llm_routing.latency import compile_kernels
from servegym.baselines.llm_routing.rollout import Rollout
from servegym.baselines.llm_routing.route_balance import RouteBalance
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import register_policy

__all__ = ["RoutingSystem", "compile_kernels"]


for _policy, _line, *_aliases in (
    (heuristics.Random, "uniform over the experts that are not full"),
    (heuristics.RoundRobin, "the next expert in turn, passing over full ones"),
    (
        heuristics.LeastOutstanding,
        "fewest requests, waiting and running; rotating ties",
        "shortest_queue",
    ),
    (heuristics.PowerOfTwo, "of two random experts the one with fewer requests"),
    (heuristics.VllmDp, "least 4 x waiting + running (vLLM's data-parallel score)"),
    (
        heuristics.BertRouter,
        "highest predicted score, blind to load (argmax of the predictions; no trained classifier)",
    ),
    (greedy_qos.LeastLatency, "least predicted latency per token, blind to scores"),
    (
        greedy_qos.GreedyQos,
        "best predicted score among the experts that keep everyone's latency, else drop",
    ),
    (greedy_qos.PricedGreedy, "greedy_qos less a price on busy capacity"),
    (
        greedy_qos.ExpectedQosGreedy,
        "expected QoS less a price that follows the arrival rate; the strongest heuristic",
    ),
    (RouteBalance, "RouteBalance's weighted score of predicted quality, cost and latency"),
    (heuristics.AlwaysBest, "best train mean score, the next best while it is full"),
    (heuristics.DropAll, "control: drops every request"),
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
    )
