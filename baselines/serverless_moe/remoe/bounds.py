"""Worst cases of expert load and of prefill: Theorems 1 and 4, Corollary 1 and a conformal bound.

The printed Theorem 1 and Corollary 1 are here so that their failure can be shown. The corrected
forms put the 2 of Hoeffding's bound under the root, count ``top_k`` calls a token in the mean and
let one token add up to ``min(m, top_k)`` calls to a set of m experts. Both still assume equal
expected load of all experts: use the corrected corollary for the least used experts, and the
conformal bound for single ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def _checked(n: ArrayLike, experts: ArrayLike) -> tuple[Floats, Floats]:
    tokens, count = np.asarray(n, dtype=np.float64), np.asarray(experts, dtype=np.float64)
    if (tokens < 0).any():
        raise ValueError(f"n must be at least 0 tokens, got {tokens.min():g}")
    if (count < 1).any():
        raise ValueError(f"experts must be at least 1, got {count.min():g}")
    return tokens, count


def theorem1_printed(n: ArrayLike, experts: ArrayLike) -> Floats:
    """Theorem 1 as printed: ``sqrt(3 n) / 2 + n / K`` calls of one expert.

    Args:
        n: Tokens.
        experts: K, experts of the layer.
    """
    tokens, count = _checked(n, experts)
    return np.sqrt(3.0 * tokens) / 2.0 + tokens / count


def theorem1(n: ArrayLike, experts: ArrayLike, top_k: int) -> Floats:
    """Theorem 1 corrected: ``top_k n / K + sqrt(3 n / 2)`` calls of one expert.

    Holds with probability 1 - exp(-3) = 95 % for independent tokens and equal expected loads.
    """
    tokens, count = _checked(n, experts)
    return top_k * tokens / count + np.sqrt(1.5 * tokens)


def corollary1_printed(n: ArrayLike, members: ArrayLike, experts: ArrayLike) -> Floats:
    """Corollary 1 as printed: ``sqrt(3 n) / 2 + m n / K`` calls of m experts."""
    tokens, count = _checked(n, experts)
    return np.sqrt(3.0 * tokens) / 2.0 + np.asarray(members) * tokens / count


def corollary1(n: ArrayLike, members: ArrayLike, experts: ArrayLike, top_k: int) -> Floats:
    """Corollary 1 corrected, C1c: calls of a set of m experts by n tokens.

    ``min(n min(m, top_k), m top_k n / K + min(m, top_k) sqrt(3 n / 2))``.

    Args:
        n: Tokens.
        members: m, size of the set.
        experts: K, experts of the layer.
        top_k: Experts a token goes to.
    """
    tokens, count = _checked(n, experts)
    m = np.asarray(members, dtype=np.float64)
    if (m < 0).any() or (m > count).any():
        raise ValueError(f"members must be in 0..experts, got {m.min():g}..{m.max():g}")
    most_calls = np.minimum(m, top_k)
    return np.minimum(
        tokens * most_calls, m * top_k * tokens / count + most_calls * np.sqrt(1.5 * tokens)
    )


@dataclass(frozen=True)
class ConformalBound:
    """Upper bound on expert loads, ``S top_k n + q sqrt(n)``, with q calibrated on prompts.

    Attributes:
        q: Quantile of ``(count - S top_k n) / sqrt(n)`` over the calibration prompts.
        top_k: Experts a token goes to.
        level: Coverage that q was taken for.
    """

    q: float
    top_k: int
    level: float = 0.95

    @classmethod
    def fit(
        cls,
        counts: ArrayLike,
        predicted: ArrayLike,
        top_k: int,
        *,
        level: float = 0.95,
        layer_maximum: bool = False,
    ) -> ConformalBound:
        """Calibrate on prompts that the predictor has not observed (split conformal).

        Args:
            counts: (P, L, K) calls of each expert.
            predicted: (P, L, K) or (L, K) predicted frequencies, each layer sums to 1.
            top_k: Experts a token goes to.
            level: Wanted coverage in (0, 1).
            layer_maximum: Cover all experts of a layer at once instead of each alone.

        Raises:
            ValueError: If a shape or the level is wrong.
        """
        load = np.asarray(counts, dtype=np.float64)
        frequency = np.asarray(predicted, dtype=np.float64)
        if load.ndim != 3 or frequency.shape not in (load.shape, load.shape[1:]):
            raise ValueError(
                "counts must be (P, L, K) and predicted (P, L, K) or (L, K), "
                f"got {load.shape} and {frequency.shape}"
            )
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must be in (0, 1), got {level}")
        n = load.sum(axis=2, keepdims=True) / top_k
        routed = n[:, 0, 0] > 0
        score = ((load - frequency * top_k * n) / np.sqrt(np.maximum(n, 1.0)))[routed]
        score = score.max(axis=2).ravel() if layer_maximum else score.ravel()
        rank = min(int(np.ceil((score.size + 1) * level)), score.size)
        return cls(float(np.partition(score, rank - 1)[rank - 1]), int(top_k), float(level))

    def __call__(self, frequency: ArrayLike, n: ArrayLike) -> Floats:
        """Calls that an expert of this predicted frequency does not exceed, at most n."""
        tokens = np.asarray(n, dtype=np.float64)
        mean = np.asarray(frequency, dtype=np.float64) * self.top_k * tokens
        return np.clip(mean + self.q * np.sqrt(tokens), 0.0, tokens)


def theorem4(
    largest_job_s: ArrayLike, total_s: ArrayLike, replicas: ArrayLike, trem_s: ArrayLike
) -> Floats:
    """Theorem 4: what the slowest of z replicas takes at most in prefill, seconds.

    ``(z - 1) / z * largest job + total / z + trem``: the list-scheduling bound. It holds for LPT
    if no job, compute and transfer, is longer than ``largest_job_s``; ``total_s`` is the sum of all
    jobs (Trem_l) and ``trem_s`` the overhead of the invocation.
    """
    z = np.asarray(replicas, dtype=np.float64)
    if (z < 1).any():
        raise ValueError(f"replicas must be at least 1, got {z.min():g}")
    longest, total = np.asarray(largest_job_s, float), np.asarray(total_s, float)
    return (z - 1.0) / z * longest + total / z + np.asarray(trem_s, float)
