"""The multi-fork clustering tree of Remoe's similar-prompts search (Sec. IV-B, Algorithm 1).

Eq. 11, the soft cosine similarity of two prompts, is the cosine of their *pooled* vectors
``u_p`` = sum of the normalised token embeddings of prompt p, so one vector a prompt is all that
the tree needs. Distances are ``1 - SCS``, in [0, 2].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.experiments.papers.serverless.predictors.kernel import (
    COUNT,
    FIRST,
    MEDOID,
    PARENT,
    START,
    STOP,
    pam,
    search,
)

__all__ = [
    "EuclideanMedoids",
    "MedoidTree",
    "PartitioningAroundMedoids",
    "SemanticMedoids",
    "Splitter",
    "top",
    "unit_rows",
]

Floats = NDArray[np.float32]
Indexes = NDArray[np.int64]

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
        found = np.argpartition(similarity, -alpha, axis=1)[:, -alpha:]
        order = np.argsort(-np.take_along_axis(similarity, found, 1), axis=1, kind="stable")
        return np.take_along_axis(found, order, 1)
    return np.argsort(-similarity, axis=1, kind="stable")


class Splitter(Protocol):
    """Divides the prompts of a node."""

    def split(
        self, members: Indexes, fork: int, rng: np.random.Generator
    ) -> tuple[Indexes, Indexes]:
        """Medoids ``(k,)``, k <= ``fork``, and the part ``(len(members),)`` of each member.

        Fewer than two medoids mean that the members cannot be told apart.
        """
        ...


class _Roulette(ABC):
    """K-medoids with roulette-wheel initialisation (Sec. IV-B)."""

    @abstractmethod
    def distances(self, members: Indexes, medoids: Indexes) -> Floats:
        """``(n, k)`` distances of members to medoids."""

    @abstractmethod
    def centre(self, members: Indexes) -> int:
        """The member with the least total distance to the others."""

    def split(
        self, members: Indexes, fork: int, rng: np.random.Generator
    ) -> tuple[Indexes, Indexes]:
        chosen = [int(members[rng.integers(len(members))])]
        distance = self.distances(members, np.array(chosen))[:, 0].astype(np.float64)
        while len(chosen) < fork:
            weight = np.where(distance < _SAME, 0.0, distance)
            total = weight.sum()
            if total == 0.0:
                break
            chosen.append(int(members[rng.choice(len(members), p=weight / total)]))
            new = self.distances(members, np.array(chosen[-1:]))[:, 0]
            distance = np.minimum(distance, new)
        medoids = np.array(chosen, np.int64)
        part = np.zeros(len(members), np.int64)
        if len(medoids) < 2:
            return medoids, part
        for _ in range(MAX_ITERATIONS):
            part = self.distances(members, medoids).argmin(axis=1)
            nonempty = np.unique(part)
            part = np.searchsorted(nonempty, part)
            moved = np.array(
                [self.centre(members[part == c]) for c in range(len(nonempty))], np.int64
            )
            if np.array_equal(moved, medoids):
                break
            medoids = moved
        return medoids, part


class SemanticMedoids(_Roulette):
    """K-medoids on 1 - SCS: the clustering of SPS."""

    def __init__(self, units: Floats):
        self._units = units

    def distances(self, members: Indexes, medoids: Indexes) -> Floats:
        """``(n, k)`` distances 1 - SCS."""
        return 1.0 - self._units[members] @ self._units[medoids].T

    def centre(self, members: Indexes) -> int:
        """The member with the least total distance.

        The total of i is ``n - v_i . sum_j v_j``: no pair has to be formed.
        """
        rows = self._units[members]
        return int(members[(rows @ rows.sum(axis=0, dtype=np.float64)).argmax()])


class EuclideanMedoids(_Roulette):
    """K-medoids on the Euclidean distance of activation matrices: the clustering of VarED."""

    def __init__(self, activations: NDArray[np.float64]):
        self._rows = np.ascontiguousarray(activations.reshape(len(activations), -1), np.float32)
        self._squares = np.einsum("ij,ij->i", self._rows, self._rows)

    def distances(self, members: Indexes, medoids: Indexes) -> Floats:
        """``(n, k)`` Euclidean distances."""
        squared = (
            self._squares[members][:, None]
            + self._squares[medoids]
            - 2.0 * self._rows[members] @ self._rows[medoids].T
        )
        # The difference of equal numbers is rounding, which a square root would blow up.
        scale = self._squares[members][:, None] + self._squares[medoids]
        return np.sqrt(np.where(squared < _SAME * scale, 0.0, squared))

    def centre(self, members: Indexes) -> int:
        """The member with the least total distance."""
        return int(members[self.distances(members, members).sum(axis=1).argmin()])


class PartitioningAroundMedoids:
    """BUILD and SWAP of Kaufman and Rousseeuw on 1 - SCS: the clustering of VarPAM."""

    def __init__(self, units: Floats):
        self._units = units

    def split(
        self, members: Indexes, fork: int, rng: np.random.Generator
    ) -> tuple[Indexes, Indexes]:
        """Medoids and parts of ``members``; BUILD is deterministic, so ``rng`` is not drawn on."""
        rows = self._units[members]
        distance = np.clip(1.0 - rows @ rows.T, 0.0, None)
        distance[distance < _SAME] = 0.0
        if not distance.any():
            return members[:1], np.zeros(len(members), np.int64)
        medoids, labels, _ = pam(distance, min(fork, len(members)))
        nonempty, part = np.unique(labels, return_inverse=True)
        return members[medoids[nonempty]], part.astype(np.int64)


class MedoidTree:
    """A tree of prompts whose inner nodes hold one medoid a child.

    A node with more than ``beta`` prompts is split into at most ``fork`` children; one whose
    prompts cannot be told apart stays a leaf. Prompts are numbered as they were given; the
    children of a node are neighbours, and so are the prompts below it, which keeps every search
    step a product with a contiguous block.

    Args:
        units: ``(P, d)`` unit vectors that queries are compared with.
        splitter: Clustering of a node's prompts.
        beta: Most prompts of a leaf.
        fork: Most children of a node.
        seed: Seed of the clustering.
    """

    def __init__(self, units: Floats, splitter: Splitter, beta: int, fork: int, seed: int = 0):
        nodes: list[list[int]] = [[-1, -1, 0, 0, 0, 0]]
        members: dict[int, Indexes] = {0: np.arange(len(units), dtype=np.int64)}
        _divide(nodes, members, splitter, beta, fork, np.random.default_rng(seed))
        self.order = _lay_out(nodes, members)
        self.nodes: Indexes = np.array(nodes, np.int64)
        self._leaf_units = units[self.order]
        # The root has no medoid; its row is never read.
        self._medoid_units = units[np.maximum(self.nodes[:, MEDOID], 0)]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def leaves(self) -> list[Indexes]:
        """The prompts of each leaf, from left to right."""
        inner = self.nodes[:, COUNT] > 0
        ends = sorted((int(n[START]), int(n[STOP])) for n in self.nodes[~inner])
        return [self.order[start:stop] for start, stop in ends]

    @property
    def depth(self) -> int:
        """Steps from the root to the deepest leaf."""
        depth = np.zeros(len(self.nodes), int)
        for i in range(1, len(self.nodes)):
            depth[i] = depth[self.nodes[i, PARENT]] + 1
        return int(depth.max())

    def search(self, queries: Floats, alpha: int) -> tuple[Indexes, Floats]:
        """Similar prompts of each query (Algorithm 1).

        A leaf with fewer than ``alpha`` prompts is filled up from its siblings, the one with the
        nearest medoid first, then from its parent's siblings. All prompts gathered are ranked
        before the list is cut.

        Args:
            queries: ``(Q, d)`` unit vectors.
            alpha: Prompts wanted; all of them if the tree holds fewer.

        Returns:
            Prompt numbers ``(Q, alpha)``, most similar first, and their similarities.
        """
        rows, similarity = search(
            queries, self.nodes, self._medoid_units, self._leaf_units, min(alpha, len(self))
        )
        return self.order[rows], similarity


def _divide(
    nodes: list[list[int]],
    members: dict[int, Indexes],
    splitter: Splitter,
    beta: int,
    fork: int,
    rng: np.random.Generator,
) -> None:
    """Split the root, and what comes of it, until no leaf is too large; changes both arguments."""
    waiting = [0]
    while waiting:
        node = waiting.pop()
        here = members[node]
        if len(here) <= beta:
            continue
        medoids, part = splitter.split(here, fork, rng)
        if len(medoids) < 2:
            continue
        first = len(nodes)
        nodes[node][FIRST : COUNT + 1] = [first, len(medoids)]
        del members[node]
        for child, medoid in enumerate(medoids):
            nodes.append([int(medoid), node, 0, 0, 0, 0])
            members[first + child] = here[part == child]
            waiting.append(first + child)


def _lay_out(nodes: list[list[int]], members: dict[int, Indexes]) -> Indexes:
    """Write START and STOP of each node; returns the prompts in the order of the leaves."""
    # Children have greater numbers than their parent: sizes come from the end, places from 0.
    for number in range(len(nodes) - 1, -1, -1):
        fields = nodes[number]
        below = nodes[fields[FIRST] : fields[FIRST] + fields[COUNT]]
        size = sum(child[STOP] for child in below) if below else len(members[number])
        fields[START : STOP + 1] = [0, size]
    order = np.empty(nodes[0][STOP], np.int64)
    for number, fields in enumerate(nodes):
        at = fields[START]
        if not fields[COUNT]:
            order[at : fields[STOP]] = members[number]
        for child in nodes[fields[FIRST] : fields[FIRST] + fields[COUNT]]:
            child[START] = at
            at = child[STOP] = at + child[STOP]
    return order
