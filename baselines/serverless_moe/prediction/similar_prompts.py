"""Predictors that average the activations of similar prompts: BF, SPS, VarPAM, VarED."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym._checks import whole
from servegym._files import write_atomic
from servegym.baselines.serverless_moe.prediction.base import (
    Array,
    Indexes,
    Predictor,
    checked_distributions,
    checked_shares,
    checked_vectors,
)
from servegym.baselines.serverless_moe.prediction.tree import (
    EuclideanMedoids,
    MedoidTree,
    PartitioningAroundMedoids,
    SemanticMedoids,
    Splitter,
    top,
    unit_rows,
)
from servegym.envs.workloads.files import read_arrays

__all__ = ["LARGE_DATA", "BruteForce", "SimilarPromptsSearch", "VarED", "VarPAM"]

LARGE_DATA = {"alpha": 15, "beta": 150}
"""The paper's setting of the searches, for 5,000 historical prompts (Sec. V-B)."""


class _Neighbours(Predictor):
    """Softmax-weighted mean over the most similar historical prompts.

    ``S = sum_j softmax_j(SCS_j) S_j``. The softmax has no temperature, so the weights lie close
    together.
    """

    def __init__(self, alpha: int):
        self.alpha = whole("alpha", alpha, 1)

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        self._vectors, self._shares = vectors, shares
        self._units = unit_rows(vectors)

    def search(self, embeddings: ArrayLike) -> tuple[Indexes, NDArray[np.float32]]:
        """The most similar historical prompts.

        Args:
            embeddings: ``(Q, d)``.

        Returns:
            Numbers ``(Q, alpha)`` of prompts, most similar first, and their similarities (Eq. 11);
            all prompts where the history is shorter than ``alpha``.

        Raises:
            ValueError: If the predictor is not fitted or the width does not fit.
        """
        return self.search_units(unit_rows(self._queries(embeddings)))

    @abstractmethod
    def search_units(self, units: NDArray[np.float32]) -> tuple[Indexes, NDArray[np.float32]]:
        """:meth:`search` without its checks, for float32 unit vectors ``(Q, d)``."""

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


# Arrays of a saved predictor and the kinds of numbers they hold.
_KINDS = {"name": "U", "settings": "i", "vectors": "f", "shares": "f", "nodes": "i", "order": "iu"}


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
        self.beta = whole("beta", beta, 2)
        if self.beta <= self.alpha:
            raise ValueError(f"beta={beta!r} must be above alpha={alpha!r}.")
        self.fork = whole("fork", fork, 2)
        self.seed = whole("seed", seed, 0)

    def _splitter(self) -> Splitter:
        return SemanticMedoids(self._units)

    def _fit(self, vectors: Array, shares: Array, tasks: Indexes | None) -> None:
        super()._fit(vectors, shares, tasks)
        self.tree = MedoidTree(self._units, self._splitter(), self.beta, self.fork, self.seed)

    def search_units(self, units: NDArray[np.float32]) -> tuple[Indexes, NDArray[np.float32]]:
        """Walk down the tree."""
        return self.tree.search(units, self.alpha)

    def add(self, embeddings: ArrayLike, activations: ArrayLike) -> None:
        """Add prompts to the fitted history, without building the tree anew.

        Args:
            embeddings: ``(n, d)``.
            activations: ``(n, L, K)`` calls or shares of calls.

        Raises:
            ValueError: If the predictor is not fitted or an array does not fit the history.
        """
        vectors = self._queries(embeddings)
        shares = checked_shares(activations, len(vectors), self._shape)
        self._vectors = np.concatenate([self._vectors, vectors])
        self._shares = np.concatenate([self._shares, shares])
        self._units = np.concatenate([self._units, unit_rows(vectors)])
        self.tree.add(self._units, self._splitter())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted predictor as ``.npz``, never half of it.

        Raises:
            ValueError: If the predictor is not fitted or ``path`` has another ending.
        """
        if self._width is None:
            raise ValueError(f"the predictor {self.name!r} must be fitted before it is saved.")
        if Path(path).suffix != ".npz":
            raise ValueError(f"path={str(path)!r} must end in .npz.")
        arrays: dict[str, Any] = {
            "name": np.array(self.name),
            "settings": np.array([self.alpha, self.beta, self.fork, self.seed], np.int64),
            "vectors": self._vectors,
            "shares": self._shares,
            "nodes": self.tree.nodes,
            "order": self.tree.order,
        }
        write_atomic(path, lambda stream: np.savez_compressed(stream, **arrays))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The predictor that :meth:`save` wrote.

        Raises:
            ValueError: If there is no such file or it is not one of this class.
        """
        if not Path(path).is_file():
            raise ValueError(f"path={str(path)!r} is not a file.")
        try:
            file = read_arrays(path, "write it with save()")
            for name, kinds in _KINDS.items():
                if file[name].dtype.kind not in kinds:
                    raise ValueError(f"{name} has dtype {file[name].dtype}.")
            if str(file["name"]) != cls.name:
                raise ValueError(f"it holds {str(file['name'])!r}, not {cls.name!r}.")
            if file["settings"].shape != (4,):
                raise ValueError(f"settings have shape {file['settings'].shape}, not (4,).")
            alpha, beta, fork, seed = file["settings"].tolist()
            found = cls(alpha, beta, fork, seed)
            vectors = checked_vectors(file["vectors"])
            # Not scaled once more: the loaded predictor gives the saved one's numbers.
            shares = checked_distributions("shares", file["shares"])
            checked_shares(shares, len(vectors))
            _Neighbours._fit(found, vectors, shares, None)
            found.tree = MedoidTree.from_arrays(
                found._units, file["nodes"], file["order"], beta, fork, seed
            )
        except (ValueError, KeyError) as error:
            raise ValueError(f"path={str(path)!r} cannot be used: {error}") from None
        found._width, found._shape = vectors.shape[1], (shares.shape[1], shares.shape[2])
        return found


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
