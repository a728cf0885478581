"""Predictors that average the activations of similar prompts: BF, SPS, VarPAM, VarED."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from servegym.experiments.papers.serverless.predictors.base import Array, Indexes, Predictor
from servegym.experiments.papers.serverless.predictors.tree import (
    EuclideanMedoids,
    MedoidTree,
    PartitioningAroundMedoids,
    SemanticMedoids,
    Splitter,
    top,
    unit_rows,
)

__all__ = ["LARGE_DATA", "BruteForce", "SimilarPromptsSearch", "VarED", "VarPAM"]

LARGE_DATA = {"alpha": 15, "beta": 150}
"""The paper's setting of the searches, for 5,000 historical prompts (Sec. V-B)."""


class _Neighbours(Predictor):
    """Softmax-weighted mean over the most similar historical prompts.

    ``S = sum_j softmax_j(SCS_j) S_j``. The softmax has no temperature, so the weights lie close
    together.
    """

    def __init__(self, alpha: int):
        self.alpha = alpha

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        self._shares = shares
        self._units = unit_rows(vectors)

    @abstractmethod
    def search_units(self, units: NDArray[np.float32]) -> tuple[Indexes, NDArray[np.float32]]:
        """The most similar historical prompts.

        Args:
            units: float32 unit vectors ``(Q, d)``.

        Returns:
            Numbers ``(Q, alpha)`` of prompts, most similar first, and their similarities (Eq. 11);
            all prompts where the history is shorter than ``alpha``.
        """

    def _predict(self, vectors: Array, tasks: Indexes | None) -> Array:
        prompts, similarity = self.search_units(unit_rows(vectors))
        weight = np.exp(similarity.astype(np.float64))
        weight /= weight.sum(axis=1, keepdims=True)
        flat = self._shares.reshape(len(self._shares), -1)
        found = np.empty((len(vectors), flat.shape[1]))
        for row in range(len(vectors)):  # a batch at once would copy alpha matrices a prompt
            found[row] = weight[row] @ flat[prompts[row]]
        return found.reshape(len(vectors), *self._shape)


class BruteForce(_Neighbours):
    """BF: the most similar prompts by comparison with all of the history.

    Args:
        alpha: Prompts that a prediction averages.
    """

    name = "bf"

    def __init__(self, alpha: int = 5):
        super().__init__(alpha)

    def search_units(self, units: NDArray[np.float32]) -> tuple[Indexes, NDArray[np.float32]]:
        """Compare with every historical prompt: one matrix product."""
        similarity = units @ self._units.T
        best = top(similarity, self.alpha)
        return best, np.take_along_axis(similarity, best, 1)


class SimilarPromptsSearch(_Neighbours):
    """SPS: the similar prompts that Algorithm 1 finds in a multi-fork tree of k-medoids.

    Args:
        alpha: Prompts that a prediction averages.
        beta: Most prompts of a leaf, above ``alpha``.
        fork: Most children of a node.
        seed: Seed of the clustering.
    """

    name = "sps"

    def __init__(self, alpha: int = 5, beta: int = 60, fork: int = 4, seed: int = 0):
        super().__init__(alpha)
        self.beta, self.fork, self.seed = beta, fork, seed

    def _splitter(self) -> Splitter:
        return SemanticMedoids(self._units)

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        super()._fit(vectors, shares, tasks)
        self.tree = MedoidTree(self._units, self._splitter(), self.beta, self.fork, self.seed)

    def search_units(self, units: NDArray[np.float32]) -> tuple[Indexes, NDArray[np.float32]]:
        """Walk down the tree."""
        return self.tree.search(units, self.alpha)


class VarPAM(SimilarPromptsSearch):
    """VarPAM: SPS with a tree of Partitioning Around Medoids (BUILD and SWAP)."""

    name = "varpam"

    def _splitter(self) -> Splitter:
        return PartitioningAroundMedoids(self._units)


class VarED(SimilarPromptsSearch):
    """VarED: SPS clustered by the Euclidean distance of activations.

    A new prompt has no activations yet: it descends by its similarity to the medoids' prompts.
    """

    name = "vared"

    def _splitter(self) -> Splitter:
        return EuclideanMedoids(self._shares)
