"""What became of requests, told when they end and not before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class OutcomeReader:
    """Reads from a native vector environment which requests have ended since it last read.

    Args:
        envs: Of a family with `Family.outcomes`, wrapped or not.
    """

    def __init__(self, envs: Any) -> None:
        self._batch = envs.unwrapped.batch
        self._decided = self._batch.decided()
        size = self._decided.size, self._batch.problem.arguments["episode_requests"]
        self._told = np.zeros(size, dtype=np.bool_)

    def read(self) -> NDArray[Any]:
        """Those that have ended since the last call, by row and decision.

        They are records (K,), `OUTCOME` of the family's module ``outcomes``. What was left of a
        row's last episode when the next one began is left out.
        """
        decided, told = self._batch.decided(), self._told
        told[decided < self._decided] = False  # a new episode
        self._decided = decided
        # All before `first` have been told in every row: long episodes cost no more than short.
        first = int(np.where(told.all(axis=1), decided, told.argmin(axis=1)).min())
        last = int(decided.max())
        row, at = np.nonzero(~told[:, first:last] & (np.arange(first, last) < decided[:, None]))
        ended = self._batch.outcomes(row, first + at)
        told[ended["row"], ended["decision"]] = True
        return ended
