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
from servegym.baselines.prefix_routing.llm_d_latency import LlmdPredicted
from servegym.baselines.prefix_routing.papers import Mooncake, Preble
from servegym.baselines.prefix_routing.plugins import (
    AIBRIX,
    GUIDE,
    SCORES,
    GatewayPolicy,
    GatewayRule,
)
from servegym.baselines.prefix_routing.policy import RulePolicy
from servegym.baselines.prefix_routing.rollout import Rollout
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.prefix_routing.view import NOWHERE, Rule, View
from servegym.baselines.registry import register_policy

__all__ = ["NOWHERE", "RULES", "PrefixSystem", "Rule", "RulePolicy", "View"]

SETTINGS: dict[str, tuple[str, dict[str, float]]] = {
    "llm_d": ("llm-d", SCORES),
    "llm_d_affinity": ("llm-d", GUIDE),
    "sglang_cache_aware": (
        "sglang",
        {"cache-threshold": 0.5, "balance-abs-threshold": 32.0, "balance-rel-threshold": 1.1},
    ),
    "sglang_cache_aware_cli": ("sglang", {}),
    "dynamo": ("dynamo", {}),
    "aibrix": ("aibrix", {}),
    "aibrix_documented": (
        "aibrix",
        {
            f"{AIBRIX}LOAD_IMBALANCE_FACTOR": 0.0,
            f"{AIBRIX}LOAD_IMBALANCE_MIN_GAP": 17.0,
            f"{AIBRIX}STANDARD_DEVIATION_FACTOR": 2.0,
        },
    ),
}
"""Published settings of the gateways in `plugins`: name -> gateway and its numbers."""


def _set(name: str) -> Callable[[], Rule]:
    return partial(GatewayRule, *SETTINGS[name])


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
        "llm_d": (
            _set("llm_d"),
            "llm-d's router without a file, its guides until August 2026: queue 2, KV 2, prefix 3",
        ),
        "llm_d_affinity": (
            _set("llm_d_affinity"),
            "llm-d's guides since August 2026: affinity filter, then the least token load",
        ),
        "llm_d_predicted": (
            LlmdPredicted,
            "llm-d's predicted latency: boosted trees that learn while they serve",
        ),
        "sglang_cache_aware": (
            _set("sglang_cache_aware"),
            "SGLang's cache_aware, defaults of the Rust library",
        ),
        "sglang_cache_aware_cli": (
            _set("sglang_cache_aware_cli"),
            "SGLang's cache_aware, defaults of its command lines",
        ),
        "lmetric": (gateways.LMetric, "least new prefill x (load + 1)"),
        "dynamo": (_set("dynamo"), "NVIDIA Dynamo's cost: prefill blocks + decode blocks"),
        "production_stack_prefix": (
            gateways.ProductionStackPrefix,
            "production-stack's prefixaware: the longest match, whatever the load",
        ),
        "production_stack_kv": (
            gateways.ProductionStackKvAware,
            "production-stack's kvaware: nearly the whole prompt matched, else by session",
        ),
        "aibrix": (
            _set("aibrix"),
            "AIBrix's prefix-cache: the best match not far above the mean load",
        ),
        "aibrix_documented": (
            _set("aibrix_documented"),
            "AIBrix's prefix-cache, the chart's constants",
        ),
        "aibrix_load_balance": (
            gateways.AibrixLoadBalance,
            "AIBrix's load-balance (June 2026): least requests in flight over those ended lately",
        ),
        "preble": (Preble, "Preble's E2: exploit mostly cached prompts, else least load"),
        "mooncake": (Mooncake, "least estimated time to first token (Mooncake)"),
        "ray_prefix_aware": (gateways.RayPrefixAware, "Ray's prefix-aware router"),
        "weighted_load": (
            simple.WeightedLoad,
            "least TTFT estimate plus load by the card's weight, for loads below the knee",
        ),
    }
)
"""Name -> (what makes the rule, one line about it)."""


def _policy(
    name: str, make: Callable[..., Rule], system: PrefixSystem, **kwargs: Any
) -> RulePolicy | GatewayPolicy:
    if name in SETTINGS:  # the same choices, for all rows at once
        return GatewayPolicy(system, *SETTINGS[name], name=name)
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
