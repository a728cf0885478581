"""What became of requests, as `servegym.envs._outcomes` tells the gateway."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.prefix_routing.kernel import layout

OUTCOME = np.dtype(
    [
        ("row", "i8"),
        ("decision", "i8"),
        ("replica", "i8"),
        ("outcome", "i8"),
        ("finish_s", "f8"),
        ("output_tokens", "i8"),
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("reward", "f8"),
    ]
)
"""A request that has ended: its system in the batch, how many decisions of the episode came before
its own, its replica (-1 if it was rejected), the index of its outcome in `core.OUTCOMES`, when it
was completed, its output, the time to its first token and the seconds per token after that (NaN for
an output of one token), what the environment's reward counts for it (of `"dense"`
what `"score"` counts). Who completed no answer has NaN, 0, NaN, NaN and
`steps.LOST` or, with the other rewards, 0."""


def outcomes_of(batch: Any, row: NDArray[np.int64], decision: NDArray[np.int64]) -> NDArray[Any]:
    """`OUTCOME` of those of the requests (K,) of a `PrefixBatch` that have ended."""
    requests = batch.systems.request.reshape(batch.num_rows, -1)
    at = batch.episodes.order[row, decision]
    outcome = requests["outcome"][row, at]
    ended = (outcome != layout.PENDING) & (outcome != layout.QUEUED)
    row, decision, requests = row[ended], decision[ended], requests[row, at][ended]
    out = np.zeros(row.size, dtype=OUTCOME)
    completed = requests["outcome"] == layout.COMPLETED
    out["row"], out["decision"] = row, decision
    out["replica"], out["outcome"] = requests["replica"], requests["outcome"]
    out["finish_s"] = np.where(completed, requests["finish"], np.nan)
    out["output_tokens"] = np.where(completed, requests["output"], 0)
    out["ttft_s"] = np.where(completed, requests["first"] - requests["arrived"], np.nan)
    rest = np.where(completed & (requests["output"] > 1), requests["output"] - 1, np.nan)
    out["tpot_s"] = (requests["finish"] - requests["first"]) / rest
    rewards = np.zeros(row.size)
    batch.rewards_of(batch.problem.settings, requests, rewards)
    out["reward"] = rewards
    return out
