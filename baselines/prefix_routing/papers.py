"""Rules of the papers Preble and Mooncake."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.view import Rule, View, best_match, least


class Preble(Rule):
    """Preble's E2: exploit a prompt that is mostly cached, else explore by load and prefill.

    If m > L - m for the best match, the least loaded of the replicas that have it; else
    argmin load + (L - m) / speed, in seconds. The load of a replica is the work routed to it in the
    last ``window_s``: for each request its uncached prompt / speed + its predicted output x seconds
    per output token. Ties to the lowest index.

    arXiv 2407.00023, Algorithm 1; project WukLab/preble,
    ``multi_node/global_scheduler_with_time.py`` @0c962c4 (3 minutes; 0.15 s a token until some are
    measured). Left out as in that file's defaults: the cost of evictions (``enable_eviction`` is
    False) and the moving of hot prefixes (its call is commented out).
    """

    name = "preble"

    def __init__(self, window_s: float = 180.0, seconds_per_token: float = 0.15) -> None:
        self.window_s = real("window_s", window_s, 0.0, open_low=True)
        self.seconds_per_token = real("seconds_per_token", seconds_per_token, 0.0)
        self._recent: deque[tuple[float, int, int, int]] = deque()
        self._tokens = np.zeros((2, 0), np.int64)  # of prefill and of output, by replica

    def reset(self) -> None:
        """See `Rule.reset`."""
        self._recent.clear()
        self._tokens = np.zeros((2, 0), np.int64)

    def loads(self, view: View) -> NDArray[np.float64]:
        """Seconds of work routed to each replica in the window (N,)."""
        if self._tokens.shape[1] == 0:
            self._tokens = np.zeros((2, len(view.up)), np.int64)
        while self._recent and self._recent[0][0] < view.now_s - self.window_s:
            _, replica, new, output = self._recent.popleft()
            self._tokens[:, replica] -= new, output
        tpot = self.seconds_per_token if view.tpot_s is None else view.tpot_s
        return self._tokens[0] / view.speed + self._tokens[1] * tpot

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        load = self.loads(view)
        best = best_match(view, replicas)
        matched = view.match_tokens[best[0]]
        if matched > view.prompt_tokens - matched:
            chosen = least(load, best)
        else:
            chosen = least(load + view.new_tokens() / view.speed, replicas)
        new, output = int(view.new_tokens()[chosen]), round(view.predicted_output)
        self._recent.append((view.now_s, chosen, new, output))
        self._tokens[:, chosen] += new, output
        return chosen


class Mooncake(Rule):
    """Mooncake's rule: least estimated time to first token.

    argmin (prefill tokens in flight + L - m) / speed; ties to the lowest index. arXiv 2407.00079,
    Algorithm 1, without the transfer of a longer match from another instance, which replicas that
    share no memory lack, and without the rejection of requests above the objective.
    """

    name = "mooncake"

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        return least((view.prefill_tokens + view.new_tokens()) / view.speed, replicas)
