"""Predictors without similar prompts: EF, DOP, category, ridge, Fate."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp

from servegym.experiments.papers.serverless.predictors.base import (
    Array,
    Indexes,
    Predictor,
    js_divergence,
    unit_rows,
)


class EqualFrequency(Predictor):
    """EF: all experts of a layer are called equally often."""

    name = "ef"

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        pass

    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array:
        return np.full((len(vectors), *self._shape), 1.0 / self._shape[1])


class DistributionOnly(Predictor):
    """DOP: the mean activation of the history, whatever the prompt."""

    name = "dop"

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        self._mean = shares.mean(axis=0)

    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array:
        return np.repeat(self._mean[None], len(vectors), axis=0)


class CategoryMean(Predictor):
    """The mean activation of the prompt's task; of all prompts for a task without history."""

    name = "category"

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        assert tasks is not None, "category needs the tasks of prompts"
        self._tasks = np.unique(tasks)
        self._means = np.stack(
            [shares[tasks == t].mean(axis=0) for t in self._tasks] + [shares.mean(axis=0)]
        )

    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array:
        assert tasks is not None, "category needs the tasks of prompts"
        row = np.minimum(np.searchsorted(self._tasks, tasks), len(self._tasks) - 1)
        return self._means[np.where(self._tasks[row] == tasks, row, len(self._tasks))]


class Ridge(Predictor):
    """Ridge regression of activations on unit embeddings, in closed form.

    ``W = (X'X + lambda I)^-1 X'Y`` on centred X and Y. The regulariser is the one of ``grid`` with
    the least mean JS divergence over ``folds`` parts of the history, each predicted from the
    others. Predictions below 0 are cut to 0 and each layer is scaled to sum 1.
    """

    name = "ridge"
    grid = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    folds = 5

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        units = unit_rows(vectors).astype(np.float64)
        targets = shares.reshape(len(shares), -1)
        part = np.random.default_rng(0).permutation(len(units)) % self.folds
        loss = np.zeros(len(self.grid))
        for fold in range(self.folds):
            left = part == fold
            for i, law in enumerate(self._solve(units[~left], targets[~left], self.grid)):
                predicted = self._apply(law, units[left], shares.shape[1:])
                loss[i] += js_divergence(predicted, shares[left]).sum()
        (self._law,) = self._solve(units, targets, (self.grid[int(loss.argmin())],))

    @staticmethod
    def _solve(
        units: Array, targets: Array, grid: tuple[float, ...]
    ) -> list[tuple[Array, Array, Array]]:
        """Centre, mean and weights for each regulariser, by one decomposition."""
        centre, mean = units.mean(axis=0), targets.mean(axis=0)
        inputs = units - centre
        values, basis = np.linalg.eigh(inputs.T @ inputs)
        right = basis.T @ (inputs.T @ (targets - mean))
        values = np.maximum(values, 0.0)[:, None]
        return [(centre, mean, basis @ (right / (values + weight))) for weight in grid]

    @staticmethod
    def _apply(law: tuple[Array, Array, Array], units: Array, shape: tuple[int, ...]) -> Array:
        centre, mean, weights = law
        shares = np.maximum((units - centre) @ weights + mean, 0.0).reshape(len(units), *shape)
        # The law's layers sum to 1 before the cut, so a layer keeps a positive sum after it.
        return shares / shares.sum(axis=2, keepdims=True)

    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array:
        return self._apply(self._law, unit_rows(vectors).astype(np.float64), self._shape)


class Fate(Predictor):
    """Fate, adjusted to prompts as in Sec. V-B: every layer's gate reads the embedding.

    Gate l is ``softmax(W_l e + b_l)`` over the layer's experts, with e the unit embedding. The
    weights minimise the mean cross-entropy to the historical shares plus ``decay/2 |W|^2``, by
    at most ``iterations`` steps of L-BFGS.
    """

    name = "fate"
    decay, iterations = 1e-4, 100

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        units = unit_rows(vectors).astype(np.float64)
        self._centre = units.mean(axis=0)
        inputs = np.hstack([units - self._centre, np.ones((len(units), 1))])
        prompts, layers, experts = shares.shape
        start = np.zeros((inputs.shape[1], layers, experts))
        start[-1] = np.log(shares.mean(axis=0) + 1e-6)
        penalty = np.ones((inputs.shape[1], 1, 1)) * self.decay
        penalty[-1] = 0.0  # the intercept

        def loss(flat: Array) -> tuple[float, Array]:
            weights = flat.reshape(start.shape)
            logits = np.tensordot(inputs, weights, 1)
            logits -= logsumexp(logits, axis=2, keepdims=True)
            value = -(shares * logits).sum() / prompts + 0.5 * float((penalty * weights**2).sum())
            slope = np.tensordot(inputs.T, np.exp(logits) - shares, 1) / prompts
            return value, (slope + penalty * weights).ravel()

        options = {"maxiter": self.iterations}
        fitted = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options)
        self._weights = fitted.x.reshape(start.shape)

    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array:
        units = unit_rows(vectors).astype(np.float64)
        inputs = np.hstack([units - self._centre, np.ones((len(units), 1))])
        logits = np.tensordot(inputs, self._weights, 1)
        return np.exp(logits - logsumexp(logits, axis=2, keepdims=True))
