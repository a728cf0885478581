"""Compiled search in the tree of similar prompts (Algorithm 1).

``nodes`` is int64 ``(N, 6)``: a node's children are the rows ``FIRST .. FIRST + COUNT - 1``, its
prompts the rows ``START .. STOP - 1`` of the vectors laid out leaf by leaf.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import jit

MEDOID, PARENT, FIRST, COUNT, START, STOP = range(6)


@jit
def descend(query, nodes, medoids, near):
    """Leaf that a query ``(d,)`` reaches by the most similar medoid of each level.

    ``medoids`` is float32 ``(N, d)``; ``near`` is scratch of at least the largest COUNT.
    """
    node = 0
    while nodes[node, COUNT] > 0:
        first, count = nodes[node, FIRST], nodes[node, COUNT]
        np.dot(medoids[first : first + count], query, near[:count])
        best = 0
        for child in range(1, count):
            if near[child] > near[best]:
                best = child
        node = first + best
    return node


@jit
def _rank(query, vectors, start, stop, near, prompts, similarity, ranked):
    """Merge the rows ``start .. stop - 1`` into the ``ranked`` best so far, largest first."""
    np.dot(vectors[start:stop], query, near[: stop - start])
    alpha = prompts.shape[0]
    for i in range(stop - start):
        value = near[i]
        if ranked == alpha:
            if value <= similarity[alpha - 1]:
                continue
        else:
            ranked += 1
        at = ranked - 1
        while at > 0 and similarity[at - 1] < value:
            similarity[at] = similarity[at - 1]
            prompts[at] = prompts[at - 1]
            at -= 1
        similarity[at] = value
        prompts[at] = start + i
    return ranked


@jit
def search(queries, nodes, medoids, vectors, alpha):
    """Rows of ``vectors`` ``(Q, alpha)``, most similar first, and the similarities.

    A leaf with fewer than ``alpha`` prompts is joined by its siblings, nearest medoid first, then
    by its parent's siblings; all of them are ranked before the list is cut. Arrays are float32.
    """
    prompts = np.empty((queries.shape[0], alpha), np.int64)
    similarity = np.empty((queries.shape[0], alpha), np.float32)
    near = np.empty(max(vectors.shape[0], nodes.shape[0]), np.float32)
    order = np.empty(nodes.shape[0], np.float32)
    for row in range(queries.shape[0]):
        query, p, s = queries[row], prompts[row], similarity[row]
        node = descend(query, nodes, medoids, near)
        observed = nodes[node, STOP] - nodes[node, START]
        ranked = _rank(query, vectors, nodes[node, START], nodes[node, STOP], near, p, s, 0)
        while observed < alpha:
            parent = nodes[node, PARENT]
            first, count = nodes[parent, FIRST], nodes[parent, COUNT]
            np.dot(medoids[first : first + count], query, order[:count])
            order[node - first] = -np.inf
            for _ in range(count - 1):
                if observed >= alpha:
                    break
                best = 0
                for child in range(1, count):
                    if order[child] > order[best]:
                        best = child
                order[best] = -np.inf
                start, stop = nodes[first + best, START], nodes[first + best, STOP]
                ranked = _rank(query, vectors, start, stop, near, p, s, ranked)
                observed += stop - start
            node = parent
    return prompts, similarity
