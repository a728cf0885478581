"""The prefix-cache rule of AIBrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.view import Rule, View, least


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
