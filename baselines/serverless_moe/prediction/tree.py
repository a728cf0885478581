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

from servegym.baselines.serverless_moe.prediction import kernel
from servegym.baselines.serverless_moe.prediction.kernel import (
    COUNT,
    FIRST,
    MEDOID,
    PARENT,
    START,
    STOP,
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
        medoids, labels, _ = kernel.pam(distance, min(fork, len(members)))
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
        self.beta, self.fork, self.seed = beta, fork, seed
        self._units = units
        self._rng = np.random.default_rng(seed)
        self._nodes: list[list[int]] = [[-1, -1, 0, 0, 0, 0]]
        self._members: dict[int, Indexes] = {0: np.arange(len(units), dtype=np.int64)}
        self._divide(0, splitter)
        self._lay_out()

    @classmethod
    def from_arrays(
        cls, units: Floats, nodes: Indexes, order: Indexes, beta: int, fork: int, seed: int = 0
    ) -> MedoidTree:
        """The tree that was saved as ``nodes`` and ``order``.

        Raises:
            ValueError: If the arrays are not those of a tree over ``units``.
        """
        tree = cls.__new__(cls)
        tree.beta, tree.fork, tree.seed = beta, fork, seed
        tree._units = units
        tree._rng = np.random.default_rng(seed)
        nodes, order = np.asarray(nodes), np.asarray(order)
        prompts = len(units)
        if nodes.ndim != 2 or nodes.shape[1] != 6 or not np.issubdtype(nodes.dtype, np.integer):
            raise ValueError(f"nodes has shape {nodes.shape}; allowed is integer (N, 6).")
        if not np.array_equal(np.sort(order), np.arange(prompts)):
            raise ValueError(f"order must name each of the {prompts} prompts once.")
        number = np.arange(len(nodes))
        medoid, parent, first, count, start, stop = nodes.T
        inner = count > 0
        is_tree = (
            len(nodes) > 0
            and parent[0] == -1
            and (start[0], stop[0]) == (0, prompts)
            and bool(np.all((parent[1:] >= 0) & (parent[1:] < number[1:])))
            and bool(np.all((medoid[1:] >= 0) & (medoid[1:] < prompts)))
            and bool(np.all(first[inner] > number[inner]))
            and bool(np.all((first + count)[inner] <= len(nodes)))
            and int(count.sum()) == len(nodes) - 1
            and int((stop - start)[~inner].sum()) == prompts
            and all(
                np.all(parent[f : f + c] == i) and start[f] == s and stop[f + c - 1] == e
                for i, (_, _, f, c, s, e) in enumerate(nodes)
                if c
            )
        )
        if not is_tree or np.any(stop <= start):
            raise ValueError("nodes is not a tree whose leaves hold every prompt once.")
        tree._nodes = nodes.tolist()
        tree._members = {int(i): order[start[i] : stop[i]].astype(np.int64) for i in number[~inner]}
        tree._lay_out()
        return tree

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

    def _divide(self, node: int, splitter: Splitter) -> None:
        """Split a leaf, and what comes of it, until no leaf is too large."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            members = self._members[node]
            if len(members) <= self.beta:
                continue
            medoids, part = splitter.split(members, self.fork, self._rng)
            if len(medoids) < 2:
                continue
            first = len(self._nodes)
            self._nodes[node][FIRST : COUNT + 1] = [first, len(medoids)]
            del self._members[node]
            for child, medoid in enumerate(medoids):
                self._nodes.append([int(medoid), node, 0, 0, 0, 0])
                self._members[first + child] = members[part == child]
                waiting.append(first + child)

    def _lay_out(self) -> None:
        """Order the prompts depth first and copy vectors beside each other."""
        # Children have greater numbers than their parent: sizes come from the end, places from 0.
        for number in range(len(self._nodes) - 1, -1, -1):
            fields = self._nodes[number]
            below = self._nodes[fields[FIRST] : fields[FIRST] + fields[COUNT]]
            size = sum(child[STOP] for child in below) if below else len(self._members[number])
            fields[START : STOP + 1] = [0, size]
        self.order: Indexes = np.empty(len(self._units), np.int64)
        for number, fields in enumerate(self._nodes):
            at = fields[START]
            if not fields[COUNT]:
                self.order[at : fields[STOP]] = self._members[number]
            for child in self._nodes[fields[FIRST] : fields[FIRST] + fields[COUNT]]:
                child[START] = at
                at = child[STOP] = at + child[STOP]
        self.nodes: Indexes = np.array(self._nodes, np.int64)
        self._leaf_units = self._units[self.order]
        # The root has no medoid; its row is never read.
        self._medoid_units = self._units[np.maximum(self.nodes[:, MEDOID], 0)]

    def add(self, units: Floats, splitter: Splitter) -> None:
        """Take in new prompts: each goes to the leaf of its search, which is split when too large.

        Args:
            units: ``(P + n, d)`` the known vectors with the new ones behind them.
            splitter: Clustering over all P + n prompts.
        """
        known = len(self)
        self._units = units
        leaf = kernel.find_leaves(units[known:], self.nodes, self._medoid_units)
        for node in np.unique(leaf):
            new = known + np.flatnonzero(leaf == node)
            self._members[int(node)] = np.concatenate([self._members[int(node)], new])
            self._divide(int(node), splitter)
        self._lay_out()

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
        rows, similarity = kernel.search(
            queries, self.nodes, self._medoid_units, self._leaf_units, min(alpha, len(self))
        )
        return self.order[rows], similarity
