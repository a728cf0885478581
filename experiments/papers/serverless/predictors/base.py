"""What all predictors of expert activations share: the interface, the measure, unit vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Indexes = NDArray[np.int64]


def js_divergence(p: ArrayLike, q: ArrayLike) -> Array:
    """Jensen-Shannon divergence in bits, in [0, 1], over the last axis.

    Args:
        p: Distributions ``(..., K)``.
        q: Distributions ``(..., K)``; leading axes broadcast against those of ``p``.
    """
    first, second = np.asarray(p, np.float64), np.asarray(q, np.float64)
    middle = 0.5 * (first + second)
    total = np.zeros(middle.shape[:-1])
    for side in (first, second):
        side = np.broadcast_to(side, middle.shape)
        ratio = np.divide(side, middle, out=np.ones_like(middle), where=side > 0)
        total += 0.5 * (side * np.log2(ratio)).sum(axis=-1)
    return np.clip(total, 0.0, 1.0)


def unit_rows(vectors: ArrayLike) -> Floats:
    """Rows divided by their length, float32; a zero row stays zero, so its similarities are 0."""
    rows = np.asarray(vectors, np.float64)
    return np.ascontiguousarray(
        rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-12), np.float32
    )


class Predictor(ABC):
    """Predicts a prompt's expert activations from its embedding."""

    name: str = ""
    """Name in `predictors.PREDICTORS`."""

    _shape: tuple[int, int] = (0, 0)

    def fit(self, embeddings: ArrayLike, activations: ArrayLike, tasks: Any = None) -> Self:
        """Learn from historical prompts; returns the predictor.

        Args:
            embeddings: ``(P, d)``, one pooled vector a prompt; the sum of its normalised token
                embeddings makes similarities those of Eq. 11.
            activations: ``(P, L, K)`` calls, or shares of calls, of each expert.
            tasks: ``(P,)`` task numbers, or None.
        """
        calls = np.asarray(activations)
        shares = calls / calls.sum(axis=2, keepdims=True, dtype=np.float64)
        self._fit(np.asarray(embeddings, np.float64), shares, tasks)
        self._shape = shares.shape[1], shares.shape[2]
        return self

    def predict(self, embeddings: ArrayLike, task: Any = None) -> Array:
        """Predicted share of each layer's calls ``(Q, L, K)``, each layer summing to 1.

        Args:
            embeddings: ``(Q, d)``.
            task: ``(Q,)`` task numbers, or None.
        """
        return self._predict(np.asarray(embeddings, np.float64), task)

    @abstractmethod
    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None: ...

    @abstractmethod
    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array: ...
