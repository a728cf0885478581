"""What became of requests, told to the router when they end and not before."""

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


class OutcomeReader:
    """Reads from a routing vector environment which requests have ended since it last read.

    Args:
        envs: A native vector environment of the family, wrapped or not.
    """

    def __init__(self, envs: Any) -> None:
        self._batch = envs.unwrapped.batch
        self._decided = self._batch.env["index"].copy()
        self._reported = np.zeros(self._batch.log.shape, dtype=np.bool_)

    def read(self) -> NDArray[Any]:
        """The requests that have ended since the last call, `OUTCOME` (K,), by row and index.

        What was left of a row's last episode when the next one began is left out.
        """
        batch, reported = self._batch, self._reported
        decided = batch.env["index"].copy()
        reported[(decided == 0) | (decided < self._decided)] = False
        self._decided = decided
        # All before `first` have been reported in every row.
        unread = np.where(reported.all(axis=1), decided, reported.argmin(axis=1))
        first, last = int(unread.min()), int(decided.max())
        log = batch.log[:, first:last]
        new = (log["outcome"] != layout.PENDING) & ~reported[:, first:last]
        new &= np.arange(first, last) < decided[:, None]
        reported[:, first:last] |= new
        row, at = np.nonzero(new)
        ended = log[row, at]
        completed = ended["outcome"] == layout.COMPLETED
        out = np.zeros(row.size, dtype=OUTCOME)
        out["row"], out["decision"] = row, first + at
        for name in ("expert", "outcome"):
            out[name] = ended[name]
        out["output_tokens"] = np.where(completed, ended["output_tokens"], 0)
        for name in ("finish_s", "score"):
            out[name] = np.where(completed, ended[name], np.nan)
        e2e = out["finish_s"] - batch.arrivals[row, out["decision"]]
        limit = batch.env["latency_requirement"][row]
        on_time = completed & (e2e / np.maximum(out["output_tokens"], 1) <= limit)
        out["qos"] = out["reward"] = np.where(on_time, out["score"], 0.0)
        return out
