"""What a placement and a migration cost, by Eq. 3 and Eq. 4 of the Prism paper.

Slots are counted by GPU and then added, the frequencies are *counts* (never normalised by server),
an expert on another GPU of the same server is local, and freeing memory costs nothing. Shapes are
those of `feasibility`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def migration_time(
    old: ArrayLike, new: ArrayLike, expert_bytes: float, bytes_per_s: ArrayLike
) -> float:
    """Eq. 3: seconds of loading, added over all GPUs; experts that go cost nothing.

    Args:
        old: (G, L, E) placement before.
        new: (G, L, E) placement after.
        expert_bytes: Bytes of one expert.
        bytes_per_s: Loading speed, one number or (G,).

    Returns:
        Seconds.
    """
    before, after = np.asarray(old).astype(np.bool_), np.asarray(new).astype(np.bool_)
    per_gpu = (after & ~before).sum(axis=(1, 2)) * float(expert_bytes)
    return float((per_gpu / np.asarray(bytes_per_s, dtype=np.float64)).sum())


def expected_cost(
    counts: ArrayLike, held: ArrayLike, extra_s: ArrayLike, horizon_s: float, window_s: float
) -> float:
    """C(P) of Eq. 4: seconds that remote calls will cost over the decision horizon.

    C = horizon / window * sum_n extra_n * (remote assignments of server n).

    Args:
        counts: (N, L, E) assignments of the window.
        held: (N, L, E) bool.
        extra_s: (N,) mean seconds per assignment of a remote call less those of a local one.
        horizon_s: Time the plan is for.
        window_s: Time the counts were taken over.

    Returns:
        Seconds; 0 if nothing was seen.

    Raises:
        ValueError: If a time is not positive.
    """
    if horizon_s <= 0 or window_s <= 0:
        raise ValueError(
            f"horizon_s and window_s must be above 0, got {horizon_s!r} and {window_s!r}"
        )
    remote = np.sum(counts, where=~np.asarray(held).astype(np.bool_), axis=(1, 2), dtype=np.float64)
    return float(horizon_s / window_s * (np.asarray(extra_s, dtype=np.float64) * remote).sum())


def adopts(cost_new: float, migration_s: float, cost_old: float) -> bool:
    """Eq. 4: whether the new plan pays for its migration, C(P') + T_mig < C(P)."""
    return cost_new + migration_s < cost_old
