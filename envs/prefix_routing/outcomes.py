"""What became of requests, told to the gateway when they end and not before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.prefix_routing import kernel

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
    ]
)
"""A request that has ended: its system in the batch, how many decisions of the episode came before
its own, its replica (-1 if it was rejected), the index of its outcome in `core.OUTCOMES`, when it
was completed, its output, the time to its first token and the seconds per token after that (NaN for
an output of one token). Who completed no answer has NaN, 0, NaN and NaN."""


class OutcomeReader:
    """Reads from a prefix-routing vector environment which requests have ended since last time.

    Args:
        envs: A native vector environment of the family, wrapped or not.
    """

    def __init__(self, envs: Any) -> None:
        self._batch = envs.unwrapped.batch
        self._decided = self._batch.episodes.row["index"].copy()
        self._told = np.zeros(self._batch.episodes.order.shape, dtype=np.bool_)

    def read(self) -> NDArray[Any]:
        """The requests that have ended and were not told yet, `OUTCOME` (K,), by row and decision.

        What was left of a row's last episode when the next one began is not told.
        """
        batch, told = self._batch, self._told
        decided = batch.episodes.row["index"].copy()
        told[decided < self._decided] = False
        self._decided = decided
        requests = batch.systems.request.reshape(batch.num_rows, -1)
        found = []
        for row in range(batch.num_rows):
            open_ = np.flatnonzero(~told[row, : decided[row]])
            own = requests[row, batch.episodes.order[row, open_]]
            ended = (own["outcome"] != kernel.PENDING) & (own["outcome"] != kernel.QUEUED)
            told[row, open_[ended]] = True
            own = own[ended]
            out = np.zeros(len(own), dtype=OUTCOME)
            completed = own["outcome"] == kernel.COMPLETED
            out["row"], out["decision"] = row, open_[ended]
            out["replica"], out["outcome"] = own["replica"], own["outcome"]
            out["finish_s"] = np.where(completed, own["finish"], np.nan)
            out["output_tokens"] = np.where(completed, own["output"], 0)
            out["ttft_s"] = np.where(completed, own["first"] - own["arrived"], np.nan)
            rest = np.where(completed & (own["output"] > 1), own["output"] - 1, np.nan)
            out["tpot_s"] = (own["finish"] - own["first"]) / rest
            found.append(out)
        return np.concatenate(found)
