"""Worst cases of expert load and of prefill: Theorems 1 and 4 and Corollary 1, corrected.

The printed Theorem 1 and Corollary 1 hold too seldom. Here the 2 of Hoeffding's bound stands under
the root, a token makes ``top_k`` calls in the mean, and it adds up to ``min(m, top_k)`` calls to a
set of m experts. Both assume equal expected load of all experts, which suits the least used ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def theorem1(n: int, experts: int, top_k: int) -> float:
    """Theorem 1: ``top_k n / K + sqrt(3 n / 2)`` calls of one of K experts by n tokens.

    Holds with probability 1 - exp(-3) = 95 % for independent tokens and equal expected loads.
    """
    return top_k * n / experts + np.sqrt(1.5 * n)


def corollary1(n: int, members: ArrayLike, experts: int, top_k: int) -> Floats:
    """Corollary 1, C1c: calls of a set of m experts, of K in the layer, by n tokens.

    ``min(n min(m, top_k), m top_k n / K + min(m, top_k) sqrt(3 n / 2))``.
    """
    m = np.asarray(members, dtype=np.float64)
    most_calls = np.minimum(m, top_k)
    return np.minimum(n * most_calls, m * top_k * n / experts + most_calls * np.sqrt(1.5 * n))


def predicted_bound(frequency: Floats, n: int, top_k: int) -> Floats:
    """Calls that an expert of this predicted frequency does not exceed, at most n.

    The deviation is that of Theorem 1, since nothing is calibrated.
    """
    return np.clip(frequency * top_k * n + np.sqrt(1.5) * np.sqrt(n), 0.0, n)


def theorem4(largest_job_s: Floats, total_s: Floats, replicas: Floats, trem_s: Floats) -> Floats:
    """Theorem 4: what the slowest of z replicas takes at most in prefill, seconds.

    ``(z - 1) / z * largest job + total / z + trem``: the list-scheduling bound. It holds for LPT
    if no job, compute and transfer, is longer than ``largest_job_s``; ``total_s`` is the sum of all
    jobs (Trem_l) and ``trem_s`` the overhead of the invocation.
    """
    return (replicas - 1.0) / replicas * largest_job_s + total_s / replicas + trem_s
