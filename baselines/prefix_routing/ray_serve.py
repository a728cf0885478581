"""The prefix-aware rule of Ray Serve LLM."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.prefix_routing.view import Rule, View, best_match, least


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
