"""Rules of the published gateways for prefix-cache-aware routing, with their published constants.

A `Rule` chooses a replica from a `View`; it needs no environment. `RULES` names them all, and
importing this package registers them as policies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from servegym.baselines.prefix_routing import gateways, simple
from servegym.baselines.prefix_routing.dynamo import Dynamo
from servegym.baselines.prefix_routing.llm_d import LlmdAffinity, LlmdScorers
from servegym.baselines.prefix_routing.llm_d_latency import LlmdPredicted
from servegym.baselines.prefix_routing.papers import Mooncake, Preble
from servegym.baselines.prefix_routing.policy import RulePolicy
from servegym.baselines.prefix_routing.rollout import Rollout
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.prefix_routing.view import NOWHERE, Rule, View
from servegym.baselines.registry import register_policy

__all__ = ["NOWHERE", "RULES", "PrefixSystem", "Rule", "RulePolicy", "View"]

RULES: MappingProxyType[str, tuple[Callable[..., Rule], str]] = MappingProxyType(
    {
        "random": (simple.Random, "uniform over the replicas that are up"),
        "round_robin": (simple.RoundRobin, "the next replica in turn"),
        "least_load": (simple.LeastLoad, "fewest requests in flight"),
        "vllm_dp": (simple.VllmDp, "least 4 x waiting + running (vLLM's data-parallel score)"),
        "session_hash": (
            simple.SessionHash,
            "hash ring over sessions (production-stack's session)",
        ),
        "llm_d": (LlmdScorers, "llm-d's default scorers: queue 2, KV 2, prefix 3"),
        "llm_d_affinity": (LlmdAffinity, "llm-d's affinity filter, then the least token load"),
        "llm_d_predicted": (
            LlmdPredicted,
            "llm-d's predicted latency: boosted trees that learn while they serve",
        ),
        "sglang_cache_aware": (gateways.SglangCacheAware, "SGLang's cache_aware, Rust defaults"),
        "sglang_cache_aware_cli": (
            gateways.SglangCacheAware.python_cli,
            "SGLang's cache_aware, defaults of the Python launcher",
        ),
        "lmetric": (gateways.LMetric, "least new prefill x (load + 1)"),
        "dynamo": (Dynamo, "NVIDIA Dynamo's cost: prefill blocks + decode blocks"),
        "production_stack_prefix": (
            gateways.ProductionStackPrefix,
            "production-stack's prefixaware: the longest match, whatever the load",
        ),
        "production_stack_kv": (
            gateways.ProductionStackKvAware,
            "production-stack's kvaware: nearly the whole prompt matched, else by session",
        ),
        "aibrix": (
            gateways.Aibrix,
            "AIBrix's prefix-cache: the best match not far above the mean load",
        ),
        "aibrix_documented": (
            gateways.Aibrix.documented,
            "AIBrix's prefix-cache, the chart's constants",
        ),
        "preble": (Preble, "Preble's E2: exploit mostly cached prompts, else least load"),
        "mooncake": (Mooncake, "least estimated time to first token (Mooncake)"),
        "ray_prefix_aware": (gateways.RayPrefixAware, "Ray's prefix-aware router"),
        "weighted_load": (
            simple.WeightedLoad,
            "least TTFT estimate plus load by the card's weight",
        ),
    }
)
"""Name -> (what makes the rule, one line about it)."""


def _policy(
    name: str, make: Callable[..., Rule], system: PrefixSystem, **kwargs: Any
) -> RulePolicy:
    return RulePolicy(system, partial(make, **kwargs), name)


register_policy(
    "rollout",
    Rollout,
    "clairvoyant: the replica that turns out best on a copy of the true state",
    clairvoyant=True,
    family="prefix_routing",
)

for _name, (_make, _line) in RULES.items():
    register_policy(_name, _make, _line, family="prefix_routing", wrapper=partial(_policy, _name))
