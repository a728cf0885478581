"""What became of requests, told to the gateway when they end and not before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.prefix_routing import kernel
from servegym.envs.prefix_routing.kernel import steps

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
an output of one token), what the environment's reward counts for it. Who completed no answer has
NaN, 0, NaN, NaN and `steps.LOST` or, with the other rewards, 0."""


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
            out["reward"] = self._reward(out, own["prompt"])
            found.append(out)
        return np.concatenate(found)

    def _reward(self, ended: NDArray[Any], prompt: NDArray[Any]) -> NDArray[np.float64]:
        """What the environment's reward counts for requests that have ended (K,)."""
        p = self._batch.problem.settings[0]
        lost = np.isnan(ended["ttft_s"])
        if p["reward"] == steps.TTFT:
            return np.where(lost, 0.0, -ended["ttft_s"])
        tpot = np.nan_to_num(ended["tpot_s"]) / p["tpot_s"]
        worse = np.maximum(ended["ttft_s"] / self._batch.problem.ttft_slo_s(prompt), tpot)
        met = worse <= 1.0
        if p["reward"] == steps.SLO:
            return met.astype(np.float64)
        rejected = ended["replica"] < 0
        score = met - steps.SCORE_WEIGHT * np.log2(1.0 + worse)
        return np.where(lost, np.where(rejected, 0.0, steps.LOST), score)
