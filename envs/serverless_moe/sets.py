"""The remote set of experts: the least used ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def remote_count(ratio: float, experts: ArrayLike) -> NDArray[np.int64]:
    """|R_l| = ceil(b K_l), guarded against the float error of b: int64 in the shape of ``experts``.

    Raises:
        ValueError: If b is outside [0, 1].
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"ratio={ratio!r} must be in [0, 1].")
    # A ratio like 3/64 must give 3 and not 4 for a rounding error.
    return np.ceil(ratio * np.asarray(experts, dtype=np.float64) - 1e-9).astype(np.int64)


def least_used_first(score: ArrayLike) -> NDArray[np.int64]:
    """Experts by rising score, ties to the lower index: (..., K) -> (..., K) indexes."""
    return np.argsort(np.asarray(score, dtype=np.float64), axis=-1, kind="stable")


def least_used(activations: np.ndarray, count: int) -> np.ndarray:
    """R_l of every layer, bool ``(L, K)``: the ``count`` least activated, ties to the lower."""
    remote = np.zeros(activations.shape, dtype=bool)
    np.put_along_axis(remote, least_used_first(activations)[..., :count], True, axis=-1)
    return remote
