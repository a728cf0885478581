"""What became of requests, as `servegym.envs._outcomes` tells the router."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.llm_routing.kernel import layout

OUTCOME = np.dtype(
    [
        ("row", "i8"),
        ("decision", "i8"),
        ("expert", "i8"),
        ("outcome", "i8"),
        ("finish_s", "f8"),
        ("output_tokens", "i8"),
        ("score", "f8"),
        ("qos", "f8"),
        ("reward", "f8"),
    ]
)
"""A request that has ended: its system in the batch, how many decisions of the episode came
before its own, its expert (-1 if
it was dropped), the index of its outcome in `core.OUTCOMES`, when it was completed, the tokens and
the score of its answer, the score if the answer came within the latency requirement, else 0, and
the same as the environment's reward counts it. Who completed no answer has NaN, 0, NaN, 0 and 0."""


def outcomes_of(batch: Any, row: NDArray[np.int64], decision: NDArray[np.int64]) -> NDArray[Any]:
    """`OUTCOME` of those of the requests (K,) of a `RoutingBatch` that have ended."""
    ended = batch.log["outcome"][row, decision] != layout.PENDING
    row, decision = row[ended], decision[ended]
    log = batch.log[row, decision]
    completed = log["outcome"] == layout.COMPLETED
    out = np.zeros(row.size, dtype=OUTCOME)
    out["row"], out["decision"] = row, decision
    out["expert"], out["outcome"] = log["expert"], log["outcome"]
    out["output_tokens"] = np.where(completed, log["output_tokens"], 0)
    for name in ("finish_s", "score"):
        out[name] = np.where(completed, log[name], np.nan)
    e2e = out["finish_s"] - batch.arrivals[row, decision]
    limit = batch.env["latency_requirement"][row]
    on_time = completed & (e2e / np.maximum(out["output_tokens"], 1) <= limit)
    out["qos"] = out["reward"] = np.where(on_time, out["score"], 0.0)
    return out
