"""Rules of SGLang's model gateway."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.view import Rule, View, best_match, least


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
