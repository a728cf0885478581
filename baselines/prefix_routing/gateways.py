"""Rules of gateways that have no file of numbers here: production-stack, Ray, LMetric, AIBrix.

The others are in `plugins`; production-stack's session rule is `simple.SessionHash`.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.simple import SessionHash
from servegym.baselines.prefix_routing.view import Rule, View, best_match, least


class AibrixLoadBalance(Rule):
    """AIBrix's ``load-balance``: least requests in flight over requests/s that ended lately.

    A replica of which none ended in the last ``window_s`` counts as one a second. Random ties.

    Project vllm-project/aibrix, ``pkg/plugins/gateway/algorithms/load_balance.go`` @01de8a5 (#2365,
    June 2026). Later versions divide by output tokens/s and weigh the KV memory.
    """

    name = "aibrix_load_balance"
    learns = True

    def __init__(self, window_s: float = 60.0) -> None:
        self.window_s = real("window_s", window_s, 0.0, open_low=True)
        self.reset()

    def reset(self) -> None:
        """See `Rule.reset`."""
        self._chosen: list[int] = []
        self._ended: list[int] = []
        self._recent: deque[tuple[float, int]] = deque()

    def outcome(self, decision: int, ttft_s: float, tpot_s: float) -> None:
        """See `Rule.outcome`."""
        self._ended.append(self._chosen[decision])

    def choose(self, view: View) -> int:
        """See `Rule.choose`."""
        self._chosen.append(super().choose(view))
        return self._chosen[-1]

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        self._recent.extend((view.now_s, replica) for replica in self._ended)
        self._ended.clear()
        while self._recent and self._recent[0][0] < view.now_s - self.window_s:
            self._recent.popleft()
        drain = np.bincount([n for _, n in self._recent], minlength=len(view.up)) / self.window_s
        return least(view.in_flight / np.where(drain > 0.0, drain, 1.0), replicas, view.rng)


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
