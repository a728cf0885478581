"""What became of requests, told to the gateway when they end and not before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._jit import compile_kernels
from servegym.envs.prefix_routing.kernel import layout, steps

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


class OutcomeReader:
    """Reads from a prefix-routing vector environment which requests have ended since last time.

    Args:
        envs: A native vector environment of the family, wrapped or not.
    """

    def __init__(self, envs: Any) -> None:
        self._batch = envs.unwrapped.batch
        none = self._batch.systems.request[:0]
        arguments = (self._batch.problem.settings, none, np.zeros(0))
        [self._rewards] = compile_kernels("rewards of requests", [(steps.rewards_of, arguments)])
        self._decided = self._batch.episodes.row["index"].copy()
        self._reported = np.zeros(self._batch.episodes.order.shape, dtype=np.bool_)

    def read(self) -> NDArray[Any]:
        """The requests that have ended since the last call, `OUTCOME` (K,), by row and decision.

        What was left of a row's last episode when the next one began is left out.
        """
        batch, reported = self._batch, self._reported
        decided = batch.episodes.row["index"].copy()
        reported[decided < self._decided] = False
        self._decided = decided
        requests = batch.systems.request.reshape(batch.num_rows, -1)
        outcomes = []
        for row in range(batch.num_rows):
            open_ = np.flatnonzero(~reported[row, : decided[row]])
            ended = requests[row, batch.episodes.order[row, open_]]
            new = (ended["outcome"] != layout.PENDING) & (ended["outcome"] != layout.QUEUED)
            reported[row, open_[new]] = True
            ended = ended[new]
            out = np.zeros(len(ended), dtype=OUTCOME)
            completed = ended["outcome"] == layout.COMPLETED
            out["row"], out["decision"] = row, open_[new]
            out["replica"], out["outcome"] = ended["replica"], ended["outcome"]
            out["finish_s"] = np.where(completed, ended["finish"], np.nan)
            out["output_tokens"] = np.where(completed, ended["output"], 0)
            out["ttft_s"] = np.where(completed, ended["first"] - ended["arrived"], np.nan)
            rest = np.where(completed & (ended["output"] > 1), ended["output"] - 1, np.nan)
            out["tpot_s"] = (ended["finish"] - ended["first"]) / rest
            rewards = np.zeros(len(ended))
            self._rewards(batch.problem.settings, ended, rewards)
            out["reward"] = rewards
            outcomes.append(out)
        return np.concatenate(outcomes)
