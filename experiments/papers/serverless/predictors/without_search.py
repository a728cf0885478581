"""Predictors without similar prompts: DOP, category, Fate."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from servegym.experiments.papers.serverless.predictors.similar_prompts import (
    Array,
    Indexes,
    unit_rows,
)


class DistributionOnly:
    """DOP: the mean activation of the history, whatever the prompt."""

    def fit(self, vectors: ArrayLike, shares: Array, tasks: Any = None) -> Self:
        """Learn from historical prompts."""
        self._mean = shares.mean(axis=0)
        return self

    def predict(self, vectors: Array, tasks: Any = None) -> Array:
        """Predicted shares of new prompts."""
        return np.repeat(self._mean[None], len(vectors), axis=0)


class CategoryMean:
    """The mean activation of the prompt's task; of all prompts for a task without history."""

    def fit(self, vectors: ArrayLike, shares: Array, tasks: Indexes) -> Self:
        """Learn from historical prompts."""
        self._rest = shares.mean(axis=0)
        self._means = {task: shares[tasks == task].mean(axis=0) for task in set(tasks.tolist())}
        return self

    def predict(self, vectors: ArrayLike, tasks: Indexes) -> Array:
        """Predicted shares of new prompts."""
        return np.stack([self._means.get(task, self._rest) for task in tasks.tolist()])


class Fate:
    """Fate, adjusted to prompts as in Sec. V-B: every layer's gate reads the embedding.

    Gate l is ``softmax(W_l e + b_l)`` over the layer's experts, with e the unit embedding. The
    weights minimise the mean cross-entropy to the historical shares plus ``decay/2 |W|^2``, by
    at most ``iterations`` steps of L-BFGS.
    """

    decay, iterations = 1e-4, 100

    def fit(self, vectors: ArrayLike, shares: Array, tasks: Any = None) -> Self:
        """Learn from historical prompts."""
        self._centre = unit_rows(vectors).mean(axis=0, dtype=np.float64)
        inputs = self._inputs(vectors)
        prompts, layers, experts = shares.shape
        start = np.zeros((inputs.shape[1], layers, experts))
        start[-1] = np.log(shares.mean(axis=0) + 1e-6)
        penalty = np.ones((inputs.shape[1], 1, 1)) * self.decay
        penalty[-1] = 0.0  # the intercept

        def loss(flat: Array) -> tuple[float, Array]:
            weights = flat.reshape(start.shape)
            logits = log_softmax(np.tensordot(inputs, weights, 1), axis=2)
            value = -(shares * logits).sum() / prompts + 0.5 * float((penalty * weights**2).sum())
            slope = np.tensordot(inputs.T, np.exp(logits) - shares, 1) / prompts
            return value, (slope + penalty * weights).ravel()

        options = {"maxiter": self.iterations}
        fitted = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options)
        self._weights = fitted.x.reshape(start.shape)
        return self

    def predict(self, vectors: ArrayLike, tasks: Any = None) -> Array:
        """Predicted shares of new prompts."""
        return softmax(np.tensordot(self._inputs(vectors), self._weights, 1), axis=2)

    def _inputs(self, vectors: ArrayLike) -> Array:
        """Centred unit vectors with a column of ones."""
        units = unit_rows(vectors).astype(np.float64) - self._centre
        return np.hstack([units, np.ones((len(units), 1))])
