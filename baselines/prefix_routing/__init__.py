"""Rules of the published gateways for prefix-cache-aware routing, with their published constants.

Importing this package registers them as policies.
"""

from __future__ import annotations

from servegym.baselines.prefix_routing import rules
from servegym.baselines.prefix_routing.plugins import AIBRIX, GUIDE, SCORES, GatewayPolicy
from servegym.baselines.prefix_routing.policy import Decide, RoundRobin, RulePolicy
from servegym.baselines.prefix_routing.rollout import Rollout
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.registry import register_policy

__all__ = ["SETTINGS", "PrefixSystem", "RulePolicy"]

SETTINGS: dict[str, tuple[str, dict[str, float], str]] = {
    "llm_d": (
        "llm-d",
        SCORES,
        "llm-d's router without a file, its guides until August 2026: queue 2, KV 2, prefix 3",
    ),
    "llm_d_affinity": (
        "llm-d",
        GUIDE,
        "llm-d's guides since August 2026: affinity filter, then the least token load",
    ),
    "sglang_cache_aware": (
        "sglang",
        {"cache-threshold": 0.5, "balance-abs-threshold": 32.0, "balance-rel-threshold": 1.1},
        "SGLang's cache_aware, defaults of the Rust library",
    ),
    "sglang_cache_aware_cli": (
        "sglang",
        {},
        "SGLang's cache_aware, defaults of its command lines",
    ),
    "dynamo": ("dynamo", {}, "NVIDIA Dynamo's cost: prefill blocks + decode blocks"),
    "aibrix": ("aibrix", {}, "AIBrix's prefix-cache: the best match not far above the mean load"),
    "aibrix_documented": (
        "aibrix",
        {
            f"{AIBRIX}LOAD_IMBALANCE_FACTOR": 0.0,
            f"{AIBRIX}LOAD_IMBALANCE_MIN_GAP": 17.0,
            f"{AIBRIX}STANDARD_DEVIATION_FACTOR": 2.0,
        },
        "AIBrix's prefix-cache, the chart's constants",
    ),
}
"""Published settings of the gateways in `plugins`: name -> gateway, its numbers, one line."""

RULES: dict[str, tuple[Decide, bool, str]] = {
    "random": (rules.anywhere, True, "uniform over the replicas that are up"),
    "least_load": (rules.least_load, True, "fewest requests in flight"),
    "lmetric": (rules.lmetric, False, "least new prefill x (load + 1)"),
    "production_stack_prefix": (
        rules.production_stack_prefix,
        True,
        "production-stack's prefixaware: the longest match, whatever the load",
    ),
    "mooncake": (rules.mooncake, False, "least estimated time to first token (Mooncake)"),
    "ray_prefix_aware": (rules.ray_prefix_aware, True, "Ray's prefix-aware router"),
}
"""Name -> rule, whether its ties are broken at random, one line."""


def _register_setting(name: str, gateway: str, setting: dict[str, float], line: str) -> None:
    def make(system: PrefixSystem) -> GatewayPolicy:
        return GatewayPolicy(system, gateway, setting, name=name)

    register_policy(name, make, line, family="prefix_routing")


def _register_rule(name: str, decide: Decide, chance: bool, line: str) -> None:
    def make(system: PrefixSystem) -> RulePolicy:
        return RulePolicy(system, name, decide, chance)

    register_policy(name, make, line, family="prefix_routing")


register_policy(
    "rollout",
    Rollout,
    "clairvoyant: the replica that turns out best on a copy of the true state",
    clairvoyant=True,
    family="prefix_routing",
)
register_policy("round_robin", RoundRobin, "the next replica in turn", family="prefix_routing")
register_policy(
    "preble",
    rules.Preble,
    "Preble's E2: exploit a mostly cached prompt, else explore by load and prefill",
    family="prefix_routing",
)
register_policy(
    "weighted_load",
    rules.weighted_load,
    "least TTFT estimate plus load by the card's weight, for loads below the knee",
    family="prefix_routing",
)
for _name, _rule in RULES.items():
    _register_rule(_name, *_rule)
for _name, _setting in SETTINGS.items():
    _register_setting(_name, *_setting)
