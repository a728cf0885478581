"""Rules of vLLM's production-stack; its session rule is `simple.SessionHash`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.simple import SessionHash
from servegym.baselines.prefix_routing.view import Rule, View, best_match


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
