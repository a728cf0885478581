"""Which experts are remote: utility and the sets that follow from it (section IV-D)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.envs.serverless_moe.sets import least_used_first, remote_count

__all__ = ["least_used_first", "remote_count", "remote_set", "utility"]


def utility(frequency: ArrayLike, n_in: float, n_out: float, top_k: int) -> NDArray[np.float64]:
    """Expected calls of each expert in prefill and decoding, ``(N_in + N_out) top_k S``.

    The printed form lacks ``top_k``; it does not change the order, but it does change counts.

    Args:
        frequency: (..., L, K) activation frequencies, each layer sums to 1.
        n_in: Prompt tokens.
        n_out: Decode tokens.
        top_k: Experts a token goes to.
    """
    return (float(n_in) + float(n_out)) * top_k * np.asarray(frequency, dtype=np.float64)


def remote_set(
    score: ArrayLike, ratio: float, experts: ArrayLike | None = None
) -> NDArray[np.bool_]:
    """The ``ceil(b K_l)`` experts of least utility in each layer.

    Args:
        score: (L, K) utility.
        ratio: b in [0, 1].
        experts: (L,) routed experts of each layer, the first of the K columns; default K each.

    Returns:
        bool (L, K), True = remote.
    """
    values = np.asarray(score, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"score must have shape (L, K), got {values.shape}")
    layers, width = values.shape
    count = np.full(layers, width) if experts is None else np.asarray(experts, dtype=np.int64)
    if count.shape != (layers,):
        raise ValueError(f"experts must have shape ({layers},), got {count.shape}")
    order = least_used_first(np.where(np.arange(width) < count[:, None], values, np.inf))
    remote = np.zeros((layers, width), dtype=np.bool_)
    chosen = np.arange(width) < remote_count(ratio, count)[:, None]
    np.put_along_axis(remote, order, chosen, axis=1)
    return remote
