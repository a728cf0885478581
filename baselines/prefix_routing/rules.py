"""Rules of load balancers, papers and gateways that have no file of numbers here."""

from __future__ import annotations

from functools import partial

import numpy as np

from servegym._checks import real
from servegym.baselines.prefix_routing.policy import (
    Keep,
    Numbers,
    RulePolicy,
    View,
    extremes,
    least,
)
from servegym.baselines.prefix_routing.system import PrefixSystem


def anywhere(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """All alike."""
    return np.zeros(keep.shape), keep


def least_load(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """Fewest requests in flight."""
    return view.in_flight, keep


def mooncake(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """Mooncake's rule: least estimated time to first token.

    argmin (prefill tokens in flight + L - m) / speed. arXiv 2407.00079, Algorithm 1, without the
    transfer of a longer match from another instance, which replicas that share no memory lack, and
    without the rejection of requests above the objective.
    """
    return (view.prefill_tokens + view.new_tokens()) / view.prefill_tokens_per_s, keep


def weighted_load(system: PrefixSystem, load_s: float = 0.005, power: float = 1.0) -> RulePolicy:
    """Least estimated time to first token plus requests in flight by the card's weight.

    argmin (prefill tokens in flight + L - m) / speed + load_s x (requests in flight + 1) / weight,
    the weight being how fast the replica decodes beside the fastest one, by its hardware profile,
    to the power of ``power``. A slow card's requests lose their TPOT before their TTFT shows it.
    Below the knee it keeps the TPOT of all cards; beyond it all cards lose theirs together.

    Args:
        system: The system.
        load_s: Seconds that a request in flight counts at the fastest card.
        power: Exponent of the weights; 0 counts requests alike.
    """
    load_s, power = real("load_s", load_s, 0.0), real("power", power, 0.0, 10.0)
    weight = (system.decode_speed / system.decode_speed.max()) ** power
    decide = partial(_weighted_load, load_s=load_s, weight=weight)
    return RulePolicy(system, "weighted_load", decide, chance=False)


def _weighted_load(view: View, keep: Keep, load_s: float, weight: Numbers) -> tuple[Numbers, Keep]:
    ttft_s, _ = mooncake(view, keep)
    return ttft_s + load_s * (view.in_flight + 1) / weight, keep


def lmetric(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """LMetric: least new prefill x (load + 1).

    argmin (L - m) * (requests in flight + 1), ties by load, then by new prefill, then by index.
    arXiv 2603.15202; project sgl-project/sglang, ``sgl-model-gateway/src/policies/lmetric.rs``
    @acaa759. It has no constant to tune.
    """
    new, load = view.new_tokens(), view.in_flight
    return new, least(load, least(new * (load + 1), keep))


def production_stack_prefix(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """production-stack's ``prefixaware``: the longest match, random ties, whatever the load.

    Project vllm-project/production-stack, ``src/vllm_router/routers/routing_logic.py`` @008a23b
    (``PrefixAwareRouter``). Its trie of characters never evicts: give the environment an index
    without a limit to have that too.
    """
    return -view.match_tokens, keep


def ray_prefix_aware(view: View, keep: Keep) -> tuple[Numbers, Keep]:
    """Ray's ``PrefixCacheAffinityRouter``: the best match, or the smallest tree below 10 %.

    If the best m / L < .1, the replicas with the smallest tree, else those with the best match; of
    several the least load in requests in flight, random ties.

    Project ray-project/ray,
    ``python/ray/llm/_internal/serve/request_router/prefix_aware/prefix_aware_router.py``, with its
    threshold of imbalance, infinity (@1eec25d, an early version, had 10). Its tree of characters
    does not evict by default.
    """
    match = view.match_tokens
    matched = extremes(match, keep)[1] >= 0.1 * view.prompt_tokens
    return view.in_flight, np.where(matched, least(-match, keep), least(view.index_tokens, keep))
