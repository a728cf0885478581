"""The multi-fork clustering tree of Remoe's similar-prompts search (Sec. IV-B, Algorithm 1).

Eq. 11, the soft cosine similarity of two prompts, is the cosine of their *pooled* vectors
``u_p`` = sum of the normalised token embeddings of prompt p, so one vector a prompt is all that
the tree needs. Distances are ``1 - SCS``, in [0, 2].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.experiments.papers.serverless.predictors.base import Indexes
from servegym.experiments.papers.serverless.predictors.kernel import (
    COUNT,
    FIRST,
    MEDOID,
    PARENT,
    START,
    STOP,
    search,
)

FORK = 4
"""Most children of a node."""
Floats = NDArray[np.float32]
Split = Callable[[Indexes, np.random.Generator], tuple[Indexes, Indexes]]
"""Divides the prompts of a node: members ``(n,)`` and a generator -> medoids ``(k,)``, k <= `FORK`,
and the part ``(n,)`` of each member; fewer than two medoids if the members are all alike."""


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


class MedoidTree:
    """A tree of prompts whose inner nodes hold one medoid a child.

    A node with more than ``beta`` prompts is split into at most `FORK` children; one whose
    prompts are all alike stays a leaf. The children of a node are neighbours, and so are
    the prompts below it, which keeps every search step a product with a contiguous block.

    Args:
        units: ``(P, d)`` unit vectors that queries are compared with.
        split: Clustering of a node's prompts.
        beta: Most prompts of a leaf.
        seed: Seed of the clustering.

    Attributes:
        nodes: int64 ``(N, 6)``, see `predictors.kernel`.
        order: ``(P,)`` prompts leaf by leaf.
    """

    def __init__(self, units: Floats, split: Split, beta: int, seed: int):
        rng = np.random.default_rng(seed)
        self.order: Indexes = np.arange(len(units), dtype=np.int64)
        nodes, waiting = [[-1, -1, 0, 0, 0, len(units)]], [0]
        while waiting:
            node = waiting.pop()
            start, stop = nodes[node][START], nodes[node][STOP]
            if stop - start <= beta:
                continue
            members = self.order[start:stop].copy()
            medoids, part = split(members, rng)
            if len(medoids) < 2:
                continue
            nodes[node][FIRST], nodes[node][COUNT] = len(nodes), len(medoids)
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
        self._medoid_units = units[np.maximum(self.nodes[:, MEDOID], 0)]

    @property
    def leaves(self) -> list[Indexes]:
        """The prompts of each leaf, from left to right."""
        ends = sorted(self.nodes[self.nodes[:, COUNT] == 0][:, [START, STOP]].tolist())
        return [self.order[start:stop] for start, stop in ends]

    @property
    def depth(self) -> int:
        """Steps from the root to the deepest leaf."""
        depth = np.zeros(len(self.nodes), int)
        for i in range(1, len(self.nodes)):
            depth[i] = depth[self.nodes[i, PARENT]] + 1
        return int(depth.max())

    def search(self, queries: Floats, alpha: int) -> tuple[Indexes, Floats]:
        """Similar prompts of each query (Algorithm 1), see `predictors.kernel.search`.

        Args:
            queries: ``(Q, d)`` unit vectors.
            alpha: Prompts wanted; all of them if the tree holds fewer.

        Returns:
            Prompt numbers ``(Q, alpha)``, most similar first, and their similarities.
        """
        rows, similarity = search(
            queries, self.nodes, self._medoid_units, self._leaf_units, min(alpha, len(self.order))
        )
        return self.order[rows], similarity
