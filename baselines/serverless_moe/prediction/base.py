"""What all predictors of expert activations share: the interface, its checks, the measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Array",
    "Indexes",
    "Predictor",
    "checked_distributions",
    "checked_shares",
    "checked_vectors",
    "js_divergence",
]

Array = NDArray[np.float64]
Indexes = NDArray[np.int64]


def js_divergence(p: ArrayLike, q: ArrayLike) -> Array:
    """Jensen-Shannon divergence in bits, in [0, 1], over the last axis.

    Args:
        p: Distributions ``(..., K)``.
        q: Distributions ``(..., K)``; leading axes broadcast against those of ``p``.

    Returns:
        ``(...)``.

    Raises:
        ValueError: If a row is not a distribution or the shapes do not fit.
    """
    first, second = checked_distributions("p", p), checked_distributions("q", q)
    if first.shape[-1] != second.shape[-1]:
        raise ValueError(
            f"q has {second.shape[-1]} outcomes; allowed is the number of p, {first.shape[-1]}."
        )
    middle = 0.5 * (first + second)
    total = np.zeros(middle.shape[:-1])
    for side in (first, second):
        side = np.broadcast_to(side, middle.shape)
        ratio = np.divide(side, middle, out=np.ones_like(middle), where=side > 0)
        total += 0.5 * (side * np.log2(ratio)).sum(axis=-1)
    return np.clip(total, 0.0, 1.0)


def checked_distributions(argument: str, given: ArrayLike) -> Array:
    """Distributions over the last axis as float64; ValueError for anything else."""
    rows = np.asarray(given, np.float64)
    if rows.ndim < 1 or rows.shape[-1] == 0:
        raise ValueError(f"{argument} has shape {rows.shape}; allowed is (..., K) with K >= 1.")
    if not np.isfinite(rows).all() or (rows < 0).any():
        raise ValueError(f"{argument} must hold finite numbers of at least 0.")
    if np.abs(rows.sum(axis=-1) - 1.0).max(initial=0.0) > 1e-6:
        raise ValueError(f"{argument} must sum to 1 along its last axis.")
    return rows


def checked_vectors(given: ArrayLike, width: int | None = None) -> Array:
    """Embeddings as float64 ``(prompts, d)``, of ``width`` if given; ValueError if unusable."""
    rows = np.asarray(given)
    if rows.ndim != 2 or rows.shape[0] == 0 or rows.shape[1] == 0:
        raise ValueError(f"embeddings has shape {rows.shape}; allowed is (prompts, d), not empty.")
    if width is not None and rows.shape[1] != width:
        raise ValueError(f"embeddings has width {rows.shape[1]}; allowed is {width}, as fitted.")
    if rows.dtype.kind not in "fiu" or not np.isfinite(rows).all():
        raise ValueError("embeddings must hold finite numbers.")
    return rows.astype(np.float64)


def checked_shares(given: ArrayLike, prompts: int) -> Array:
    """Shares of calls from counts or shares ``(P, L, K)``; ValueError if unusable."""
    calls = np.asarray(given)
    if calls.ndim != 3 or 0 in calls.shape or calls.shape[0] != prompts:
        raise ValueError(
            f"activations has shape {calls.shape}; allowed is (prompts, layers, experts) with the "
            f"{prompts} prompts of embeddings."
        )
    if calls.dtype.kind not in "fiu" or not np.isfinite(calls).all() or (calls < 0).any():
        raise ValueError("activations must hold finite numbers of at least 0.")
    total = calls.sum(axis=2, keepdims=True, dtype=np.float64)
    if (total == 0).any():
        prompt, layer = np.argwhere(total[:, :, 0] == 0)[0]
        raise ValueError(f"activations of prompt {prompt}, layer {layer} are all 0.")
    return calls / total


def _task_numbers(argument: str, given: ArrayLike, prompts: int) -> Indexes:
    tasks = np.asarray(given)
    if tasks.shape != (prompts,) or tasks.dtype.kind not in "iu":
        raise ValueError(
            f"{argument} has shape {tasks.shape} and type {tasks.dtype}; allowed is one whole "
            f"number for each of the {prompts} prompts."
        )
    return tasks.astype(np.int64)


class Predictor(ABC):
    """Predicts a prompt's expert activations from its embedding."""

    name: str = ""
    """Name in :func:`make_predictor`."""

    _width: int | None = None
    _shape: tuple[int, int] = (0, 0)

    def fit(self, embeddings: ArrayLike, activations: ArrayLike, tasks: Any = None) -> Self:
        """Learn from historical prompts.

        Args:
            embeddings: ``(P, d)``, one pooled vector a prompt; the sum of its normalised token
                embeddings makes similarities those of Eq. 11.
            activations: ``(P, L, K)`` calls, or shares of calls, of each expert.
            tasks: ``(P,)`` task numbers, or None.

        Returns:
            The predictor.

        Raises:
            ValueError: If an array has a shape or values that cannot be used.
        """
        vectors = checked_vectors(embeddings)
        shares = checked_shares(activations, len(vectors))
        numbers = None if tasks is None else _task_numbers("tasks", tasks, len(vectors))
        self._fit(vectors, shares, numbers)
        self._width, self._shape = vectors.shape[1], (shares.shape[1], shares.shape[2])
        return self

    def predict(self, embeddings: ArrayLike, task: Any = None) -> Array:
        """Predicted share of each layer's calls.

        Args:
            embeddings: ``(Q, d)``.
            task: ``(Q,)`` task numbers, or None.

        Returns:
            ``(Q, L, K)`` float64; each layer sums to 1.

        Raises:
            ValueError: If the predictor is not fitted or an array does not fit the history.
        """
        vectors = self._queries(embeddings)
        numbers = None if task is None else _task_numbers("task", task, len(vectors))
        return self._predict(vectors, numbers)

    def _queries(self, embeddings: ArrayLike) -> Array:
        if self._width is None:
            raise ValueError(f"the predictor {self.name!r} must be fitted before it predicts.")
        return checked_vectors(embeddings, self._width)

    @abstractmethod
    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None: ...

    @abstractmethod
    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array: ...
