"""Rules of llm-d's router, the former endpoint picker of the Gateway API inference extension."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.view import Rule, View, least


class LlmdScorers(Rule):
    """llm-d's default: the highest weighted sum of three scores in [0, 1], random ties.

    S = queue * (maxW - W) / (maxW - minW) + kv * (1 - usage) + prefix * matched / total blocks,
    where the first score is 1 for all if all queues are equal.

    Project llm-d/llm-d-router, ``pkg/epp/config/loader/defaults.go`` @0b59e4e (weights 2, 2 and 3,
    no filter, the max-score picker), ``scorer/queuedepth/queue.go`` @2342697. The inference
    extension's v1.0 has all weights 1. Scores of LoRA adapters are left out.
    """

    name = "llm_d"

    def __init__(self, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> None:
        self.queue = real("queue", queue, 0.0)
        self.kv = real("kv", kv, 0.0)
        self.prefix = real("prefix", prefix, 0.0)

    def scores(self, view: View, replicas: NDArray[np.intp]) -> NDArray[np.float64]:
        """S of all replicas (N,), the range of queues being that of ``replicas``."""
        waiting = np.asarray(view.waiting, dtype=np.float64)
        low, high = waiting[replicas].min(), waiting[replicas].max()
        queue = (high - waiting) / (high - low) if high > low else np.ones(len(waiting))
        return self.queue * queue + self.kv * (1.0 - view.kv) + self.prefix * view.match_share()

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        return least(-self.scores(view, replicas), replicas, view.rng)


def sticky(
    view: View,
    replicas: NDArray[np.intp],
    ttft_s: NDArray[Any],
    *,
    threshold: float,
    max_penalty_s: float,
    exploration: float,
) -> NDArray[np.intp]:
    """llm-d's prefix-cache affinity filter: the replicas that have the prompt, or all of them.

    All are kept if there is only one, with probability ``exploration``, if none has a share of the
    prompt of at least ``threshold``, and if the best of those that have it is more than
    ``max_penalty_s`` slower to its first token than the best of the others (0: never).

    ``filter/prefixcacheaffinity/plugin.go`` @066c20e.
    """
    if len(replicas) <= 1 or threshold <= 0.0:
        return replicas
    if exploration > 0.0 and view.rng.random() < exploration:
        return replicas
    has = view.match_share()[replicas] >= threshold
    if not has.any():
        return replicas
    if max_penalty_s > 0.0 and not has.all():
        times = ttft_s[replicas]
        if times[has].min() - times[~has].min() > max_penalty_s:
            return replicas
    return replicas[has]


class LlmdAffinity(Rule):
    """llm-d's newer guides: an affinity filter, then the least token load; random ties.

    The filter is `sticky` with a time to first token of in-flight tokens / ``prefill_rate``. The
    score is 1 - min(1, (in-flight + uncached tokens of the request) / ``queue_tokens``). In-flight
    tokens are the uncached prompt tokens of requests without a first token
    (``dataproducer/inflightload/README.md`` @2f1de8c).

    Project llm-d/llm-d-router, ``filter/prefixcacheaffinity/plugin.go`` @066c20e (threshold 0.80,
    exploration 0, 18,000 ms, 15,928 tokens/s: Qwen-32B on two H100) and
    ``scorer/tokenload/token_load.go`` @1b30d10 (4,194,304 tokens).
    """

    name = "llm_d_affinity"

    def __init__(
        self,
        threshold: float = 0.80,
        max_penalty_s: float = 18.0,
        prefill_rate: float = 15928.0,
        queue_tokens: float = 4194304.0,
        exploration: float = 0.0,
    ) -> None:
        self.threshold = real("threshold", threshold, 0.0, 1.0)
        self.max_penalty_s = real("max_penalty_s", max_penalty_s, 0.0)
        self.prefill_rate = real("prefill_rate", prefill_rate, 0.0, open_low=True)
        self.queue_tokens = real("queue_tokens", queue_tokens, 0.0, open_low=True)
        self.exploration = real("exploration", exploration, 0.0, 1.0)

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        passing = sticky(
            view,
            replicas,
            view.prefill_tokens / self.prefill_rate,
            threshold=self.threshold,
            max_penalty_s=self.max_penalty_s,
            exploration=self.exploration,
        )
        load = np.minimum((view.prefill_tokens + view.new_tokens()) / self.queue_tokens, 1.0)
        return least(load, passing, view.rng)
