"""Arrays that are handed out as fresh ones, from memory that nobody holds any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

KEPT = 3


class Spares:
    """Sets of arrays of the shapes of ``like``.

    A set is used again when no reference is left to what was handed out, views of it included.
    Allocated anew at every step, an observation of 100 kB costs as much in page faults as the step.

    Args:
        like: Arrays of the shapes and types wanted.
        target: What the writer of a set takes, made once from its arrays.
    """

    def __init__(
        self, like: Sequence[np.ndarray], target: Callable[[list[np.ndarray]], Any]
    ) -> None:
        self._like = like
        self._target = target
        self._sets: list[tuple[list[np.ndarray], Any, list[int]]] = []

    def take(self) -> tuple[Any, list[np.ndarray]]:
        """What the writer takes, and the arrays to hand out, whose contents are arbitrary."""
        for arrays, target, references in self._sets:
            if list(map(getrefcount, arrays)) == references:
                # Views: whoever changes the shape of one changes it for himself alone.
                return target, [each.view() for each in arrays]
        arrays = [np.empty_like(each) for each in self._like]
        target = self._target(arrays)
        self._sets.append((arrays, target, list(map(getrefcount, arrays))))
        del self._sets[:-KEPT]
        return target, [each.view() for each in arrays]
