"""Predictors that average the activations of similar prompts: BF, SPS, VarPAM.

Eq. 11, the soft cosine similarity of two prompts, is the cosine of their *pooled* vectors, sums of
the normalised token embeddings. Distances are ``1 - SCS``, in [0, 2].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

import servegym.experiments.papers.serverless.predictors.kernel as kernel

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Indexes = NDArray[np.int64]

LARGE_DATA = {"alpha": 15, "beta": 150}
"""The paper's setting of the searches, for 5,000 historical prompts (Sec. V-B)."""
FORK = 4
"""Most children of a node."""
MAX_ITERATIONS = 10
# Below this a distance is rounding: the two prompts are the same.
_SAME = 1e-6


def unit_rows(vectors: ArrayLike) -> Floats:
    """Rows divided by their length, float32; a zero row stays zero, so its similarities are 0."""
    rows = np.asarray(vectors, np.float64)
    return np.ascontiguousarray(
        rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-12), np.float32
    )


def top(similarity: Floats, alpha: int) -> Indexes:
    """Columns of the ``alpha`` largest of each row, largest first: ``(Q, n)`` -> ``(Q, alpha)``."""
    if alpha < similarity.shape[1]:
        best = np.argpartition(similarity, -alpha, axis=1)[:, -alpha:]
        order = np.argsort(-np.take_along_axis(similarity, best, 1), axis=1, kind="stable")
        return np.take_along_axis(best, order, 1)
    return np.argsort(-similarity, axis=1, kind="stable")


class BruteForce:
    """BF: softmax-weighted mean over the ``alpha`` most similar prompts, by comparison with all.

    ``S = sum_j softmax_j(SCS_j) S_j``, without temperature, so the weights lie close together.
    """

    def __init__(self, alpha: int = 5):
        self.alpha = alpha

    def fit(self, vectors: ArrayLike, shares: Array, tasks: Any = None) -> Self:
        """Learn from historical prompts."""
        self._shares = shares
        self._units = unit_rows(vectors)
        return self

    def search_units(self, units: Floats) -> tuple[Indexes, Floats]:
        """Numbers ``(Q, alpha)`` of the most similar prompts and similarities, most similar first.

        ``units`` are float32 unit vectors ``(Q, d)``; all prompts where the history is short.
        """
        similarity = units @ self._units.T
        best = top(similarity, self.alpha)
        return best, np.take_along_axis(similarity, best, 1)

    def predict(self, vectors: Array, tasks: Any = None) -> Array:
        """Predicted shares of new prompts."""
        prompts, similarity = self.search_units(unit_rows(vectors))
        weight = np.exp(similarity.astype(np.float64))
        weight /= weight.sum(axis=1, keepdims=True)
        flat = self._shares.reshape(len(self._shares), -1)
        predicted = np.empty((len(vectors), flat.shape[1]))
        for row in range(len(vectors)):  # a batch at once would copy alpha matrices a prompt
            predicted[row] = weight[row] @ flat[prompts[row]]
        return predicted.reshape(len(vectors), *self._shares.shape[1:])


class MedoidTree:
    """A tree of prompts whose inner nodes hold one medoid a child (Sec. IV-B).

    A node with more than ``beta`` prompts is split into at most `FORK` children; one whose
    prompts are all alike stays a leaf. The children of a node are neighbours, and so are
    the prompts below it, which keeps every search step a product with a contiguous block.

    Args:
        units: ``(P, d)`` unit vectors that queries are compared with.
        split: Divides the prompts of a node: members ``(n,)`` and a generator -> medoids ``(k,)``,
            k <= `FORK`, and the part ``(n,)`` of each member; fewer than two medoids if the
            members are all alike.
        beta: Most prompts of a leaf.
        seed: Seed of the clustering.

    Attributes:
        nodes: int64 ``(N, 6)``, see `predictors.kernel`.
        order: ``(P,)`` prompts leaf by leaf.
    """

    def __init__(
        self, units: Floats, split: Callable[..., tuple[Indexes, Indexes]], beta: int, seed: int
    ):
        rng = np.random.default_rng(seed)
        self.order: Indexes = np.arange(len(units), dtype=np.int64)
        nodes, waiting = [[-1, -1, 0, 0, 0, len(units)]], [0]
        while waiting:
            node = waiting.pop()
            start, stop = nodes[node][kernel.START], nodes[node][kernel.STOP]
            if stop - start <= beta:
                continue
            members = self.order[start:stop].copy()
            medoids, part = split(members, rng)
            if len(medoids) < 2:
                continue
            nodes[node][kernel.FIRST], nodes[node][kernel.COUNT] = len(nodes), len(medoids)
            for child, medoid in enumerate(medoids):
                below = members[part == child]
                stop = start + len(below)
                self.order[start:stop] = below
                waiting.append(len(nodes))
                nodes.append([int(medoid), node, 0, 0, start, stop])
                start = stop
        self.nodes: Indexes = np.array(nodes, np.int64)
        self._leaf_units = units[self.order]
        # The root has no medoid; its row is never read.
        self._medoid_units = units[np.maximum(self.nodes[:, kernel.MEDOID], 0)]

    def search(self, queries: Floats, alpha: int) -> tuple[Indexes, Floats]:
        """Similar prompts of unit vectors ``(Q, d)`` (Algorithm 1), see `predictors.kernel.search`.

        Their numbers ``(Q, alpha)``, most similar first, and their similarities; all prompts if
        the tree holds fewer than ``alpha``.
        """
        rows, similarity = kernel.search(
            queries, self.nodes, self._medoid_units, self._leaf_units, min(alpha, len(self.order))
        )
        return self.order[rows], similarity


class SimilarPromptsSearch(BruteForce):
    """SPS: the similar prompts that Algorithm 1 finds in a multi-fork tree of k-medoids.

    The clustering is k-medoids on 1 - SCS with roulette-wheel initialisation (Sec. IV-B); a leaf
    has ``beta`` prompts at most, above ``alpha``.
    """

    def __init__(self, alpha: int = 5, beta: int = 60, seed: int = 0):
        super().__init__(alpha)
        self.beta, self.seed = beta, seed

    def fit(self, vectors: ArrayLike, shares: Array, tasks: Any = None) -> Self:
        """Learn from historical prompts."""
        super().fit(vectors, shares)
        self.tree = MedoidTree(self._units, self._split, self.beta, self.seed)
        return self

    def search_units(self, units: Floats) -> tuple[Indexes, Floats]:
        """Walk down the tree."""
        return self.tree.search(units, self.alpha)

    def _distances(self, members: Indexes, medoids: Indexes) -> Floats:
        """Distances ``(n, k)`` of members to medoids."""
        return 1.0 - self._units[members] @ self._units[medoids].T

    def _centre(self, members: Indexes) -> int:
        """The member with the least total distance to the others.

        The total of i is ``n - v_i . sum_j v_j``: no pair has to be formed.
        """
        rows = self._units[members]
        return int(members[(rows @ rows.sum(axis=0, dtype=np.float64)).argmax()])

    def _split(self, members: Indexes, rng: np.random.Generator) -> tuple[Indexes, Indexes]:
        chosen = [int(members[rng.integers(len(members))])]
        distance = self._distances(members, np.array(chosen))[:, 0].astype(np.float64)
        while len(chosen) < FORK:
            weight = np.where(distance < _SAME, 0.0, distance)
            total = weight.sum()
            if total == 0.0:
                break
            chosen.append(int(members[rng.choice(len(members), p=weight / total)]))
            new = self._distances(members, np.array(chosen[-1:]))[:, 0]
            distance = np.minimum(distance, new)
        medoids = np.array(chosen, np.int64)
        part = np.zeros(len(members), np.int64)
        if len(medoids) < 2:
            return medoids, part
        for _ in range(MAX_ITERATIONS):
            part = self._distances(members, medoids).argmin(axis=1)
            nonempty, part = np.unique(part, return_inverse=True)
            moved = [self._centre(members[part == c]) for c in range(len(nonempty))]
            if np.array_equal(moved, medoids):
                break
            medoids = np.array(moved, np.int64)
        return medoids, part


class VarPAM(SimilarPromptsSearch):
    """VarPAM: SPS with a tree of Partitioning Around Medoids (BUILD and SWAP) on 1 - SCS."""

    def _split(self, members: Indexes, rng: np.random.Generator) -> tuple[Indexes, Indexes]:
        rows = self._units[members]
        distance = np.clip(1.0 - rows @ rows.T, 0.0, None)
        distance[distance < _SAME] = 0.0
        if not distance.any():
            return members[:1], np.zeros(len(members), np.int64)
        medoids, labels = pam(distance, min(FORK, len(members)))
        nonempty, part = np.unique(labels, return_inverse=True)
        return members[medoids[nonempty]], part


def pam(distance: Floats, k: int) -> tuple[Indexes, Indexes]:
    """Partitioning Around Medoids of Kaufman and Rousseeuw: BUILD, then SWAP to a local optimum.

    SWAP makes the exchange of a medoid and a point that lowers the total distance ``(n, n)`` most;
    ties go to the lower index. Returns medoids ``(k,)`` and each point's place ``(n,)`` among them.
    """
    first, medoids = np.full(len(distance), np.inf), []
    for _ in range(k):
        total = np.minimum(distance, first).sum(axis=1)
        total[medoids] = np.inf
        medoids.append(int(total.argmin()))
        first = np.minimum(distance[medoids[-1]], first)
    while True:
        far = distance[medoids].astype(np.float64)
        place = far.argmin(axis=0)
        first, second = np.partition(far, 1, axis=0)[:2]
        # Of each point in the place of each medoid: what the members of all medoids gain by the
        # point, and what those of the medoid lose by going to the point or to the next medoid.
        closest = np.minimum(distance, first)
        change = (np.minimum(distance, second) - closest) @ (place[:, None] == np.arange(k))
        change += (closest - first).sum(axis=1)[:, None]
        change[medoids] = np.inf
        point, out = np.unravel_index(change.argmin(), change.shape)
        if change[point, out] >= -1e-12 * first.sum():
            return np.array(medoids), place
        medoids[out] = int(point)
