"""The remote set of experts: the least used ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def least_used_first(score: ArrayLike) -> NDArray[np.int64]:
    """Experts by rising score, ties to the lower index: (..., K) -> (..., K) indexes."""
    return np.argsort(np.asarray(score, dtype=np.float64), axis=-1, kind="stable")


def least_used(activations: np.ndarray, count: int) -> np.ndarray:
    """R_l of every layer, bool ``(..., K)``: the ``count`` least activated, ties to the lower."""
    remote = np.zeros(activations.shape, dtype=bool)
    np.put_along_axis(remote, least_used_first(activations)[..., :count], True, axis=-1)
    return remote
