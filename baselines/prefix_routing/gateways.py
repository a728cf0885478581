"""Rules of gateways, each with its published constants: AIBrix, production-stack, Ray, SGLang.

Those of llm-d and Dynamo are in files of their own; production-stack's session rule is
`simple.SessionHash`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.simple import SessionHash
from servegym.baselines.prefix_routing.view import Rule, View, best_match, least


class Aibrix(Rule):
    """AIBrix's ``prefix-cache``: the best match whose load is not far above the mean.

    With the load in requests in flight: if max > ``factor`` * (mean + 1) and max - min >=
    ``min_gap``, only the least loaded replicas may match. Replicas with a match are taken by
    falling match, in whole percent, then by rising load, then at random; the first whose load is at
    most mean + ``sigma`` * standard deviation (of the sample, over all replicas) is chosen. Without
    one, the least load of all, random ties.

    Project vllm-project/aibrix, ``pkg/plugins/gateway/algorithms/prefix_cache.go`` @01de8a5 (factor
    2, gap 8, 1 sigma) and ``util.go`` @2ed45e4. Versions before have no factor and ask for a gap of
    more than 8; the Helm chart and the documentation set 16 and 2 sigma, `documented`.
    """

    name = "aibrix"

    def __init__(self, factor: float = 2.0, min_gap: float = 8.0, sigma: float = 1.0) -> None:
        self.factor = real("factor", factor, 0.0)
        self.min_gap = real("min_gap", min_gap, 0.0)
        self.sigma = real("sigma", sigma, 0.0)

    @classmethod
    def documented(cls) -> Aibrix:
        """The rule with the constants of the Helm chart: a gap of more than 16, 2 sigma."""
        return cls(0.0, 17.0, 2.0)

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        load = np.asarray(view.in_flight, dtype=np.float64)[replicas]
        low, high, mean = load.min(), load.max(), load.mean()
        entry = view.index_block or view.block_size
        entries = view.match_tokens[replicas] // entry
        percent = 100 * entries // max(view.prompt_tokens // entry, 1)
        matched = entries > 0
        if high > self.factor * (mean + 1.0) and high - low >= self.min_gap:
            matched &= load == low
        spread = load.std(ddof=1) if len(load) > 1 else 0.0
        fit = np.flatnonzero(matched & (load <= mean + self.sigma * spread))
        if len(fit) == 0:
            return least(view.in_flight, replicas, view.rng)
        chance = view.rng.random(len(fit))
        return int(replicas[fit[np.lexsort((chance, load[fit], -percent[fit]))[0]]])


class ProductionStackPrefix(Rule):
    """production-stack's ``prefixaware``: the longest match, random ties, whatever the load.

    Project vllm-project/production-stack, ``src/vllm_router/routers/routing_logic.py`` @008a23b
    (``PrefixAwareRouter``). Its trie of characters never evicts: give the environment an index
    without a limit to have that too.
    """

    name = "production_stack_prefix"

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        best = best_match(view, replicas)
        return int(best[0] if len(best) == 1 else best[view.rng.integers(len(best))])


class ProductionStackKvAware(SessionHash):
    """production-stack's ``kvaware``: the best match if nearly all of the prompt, else the session.

    The longest match, ties to the lowest index, unless there is none or it is shorter than
    max(L - ``threshold_tokens``, 0); then `SessionHash`.

    Project vllm-project/production-stack, ``src/vllm_router/routers/routing_logic.py`` @008a23b
    (``KvawareRouter``, kv_aware_threshold 2000, with LMCache's index: give the environment a
    precise one).
    """

    name = "production_stack_kv"

    def __init__(
        self, threshold_tokens: float = 2000.0, window_s: float = 60.0, points: int = 160
    ) -> None:
        super().__init__(window_s, points)
        self.threshold_tokens = real("threshold_tokens", threshold_tokens, 0.0)

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        best = int(best_match(view, replicas)[0])
        matched = view.match_tokens[best]
        if matched == 0 or matched < view.prompt_tokens - self.threshold_tokens:
            best = self.owner_of(view, replicas)
        return self.noted(view, best)


class RayPrefixAware(Rule):
    """Ray's ``PrefixCacheAffinityRouter``: the best match, or the smallest tree below 10 %.

    With the load in requests in flight: if max - min > ``imbalanced_threshold``, the less loaded of
    two replicas at random; else if the best m / L < ``match_rate_threshold``, the replicas with the
    smallest tree; else those with the best match. Of several the least load, random ties.

    Project ray-project/ray,
    ``python/ray/llm/_internal/serve/request_router/prefix_aware/prefix_aware_router.py`` (threshold
    infinity, rate 0.1; @1eec25d, an early version, had 10). Its tree of characters does not evict
    by default.
    """

    name = "ray_prefix_aware"

    def __init__(
        self, imbalanced_threshold: float = math.inf, match_rate_threshold: float = 0.1
    ) -> None:
        if not imbalanced_threshold >= 0.0 or not 0.0 <= match_rate_threshold <= 1.0:
            raise ValueError(
                f"imbalanced_threshold={imbalanced_threshold!r} must be at least 0 and "
                f"match_rate_threshold={match_rate_threshold!r} between 0 and 1."
            )
        self.imbalanced_threshold = float(imbalanced_threshold)
        self.match_rate_threshold = float(match_rate_threshold)

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        load = view.in_flight[replicas]
        best = best_match(view, replicas)
        if load.max() - load.min() > self.imbalanced_threshold:
            pair = view.rng.choice(replicas, size=min(2, len(replicas)), replace=False)
            return least(view.in_flight, pair, view.rng)
        if view.match_tokens[best[0]] < self.match_rate_threshold * view.prompt_tokens:
            best = replicas
            if view.index_tokens is not None:
                tree = view.index_tokens[replicas]
                best = replicas[tree == tree.min()]
        return least(view.in_flight, best, view.rng)


class SglangCacheAware(Rule):
    """SGLang's ``cache_aware``: the best match, unless the load is out of balance.

    With the load in requests in flight: if max - min > ``balance_abs`` and max > ``balance_rel`` x
    min, the least load; else if m / L > ``cache_threshold``, the best match; else the least load.
    Ties to the lowest index.

    Project sgl-project/sglang, ``sgl-model-gateway/src/policies/cache_aware.rs`` @053b63f. The
    defaults are those of the Rust configuration; `python_cli` has those of the Python launcher. The
    original matches characters in one radix tree, of which it evicts every 30 s (60 s) down to
    10,000 (2^26) characters; here all rules share the index of the environment. Older versions
    fall back to the replica with the smallest tree.
    """

    name = "sglang_cache_aware"

    def __init__(
        self, cache_threshold: float = 0.5, balance_abs: float = 32.0, balance_rel: float = 1.1
    ) -> None:
        self.cache_threshold = real("cache_threshold", cache_threshold, 0.0, 1.0)
        self.balance_abs = real("balance_abs", balance_abs, 0.0)
        self.balance_rel = real("balance_rel", balance_rel, 0.0)

    @classmethod
    def python_cli(cls) -> SglangCacheAware:
        """The rule with the defaults of ``python -m sglang_router.launch_router``."""
        return cls(0.3, 64.0, 1.5)

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        load = view.in_flight[replicas]
        low, high = load.min(), load.max()
        unbalanced = high - low > self.balance_abs and high > self.balance_rel * low
        if not unbalanced:
            best = best_match(view, replicas)[0]
            if view.match_tokens[best] > self.cache_threshold * view.prompt_tokens:
                return int(best)
        return least(view.in_flight, replicas)


class LMetric(Rule):
    """LMetric: least new prefill x (load + 1).

    argmin (L - m) * (requests in flight + 1), ties by load, then by new prefill, then by index.
    arXiv 2603.15202; project sgl-project/sglang, ``sgl-model-gateway/src/policies/lmetric.rs``
    @acaa759. It has no constant to tune.
    """

    name = "lmetric"

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        new = np.maximum(view.new_tokens(), 0)[replicas]
        load = view.in_flight[replicas]
        return int(replicas[np.lexsort((new, load, new * (load + 1)))[0]])
