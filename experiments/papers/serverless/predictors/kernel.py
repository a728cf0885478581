"""Compiled tree of similar prompts: its search (Algorithm 1) and PAM's clustering.

``nodes`` is int64 ``(N, 6)`` with the columns below; the children of a node are the rows
``FIRST .. FIRST + COUNT - 1``, and the prompts below it the rows ``START .. STOP - 1`` of the
vectors that are laid out leaf by leaf.
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
def _rank(query, vectors, start, stop, near, prompts, similarity, held):
    """Merge the rows ``start .. stop - 1`` into the ``held`` best so far, largest first."""
    np.dot(vectors[start:stop], query, near[: stop - start])
    alpha = prompts.shape[0]
    for i in range(stop - start):
        value = near[i]
        if held == alpha:
            if value <= similarity[alpha - 1]:
                continue
        else:
            held += 1
        at = held - 1
        while at > 0 and similarity[at - 1] < value:
            similarity[at] = similarity[at - 1]
            prompts[at] = prompts[at - 1]
            at -= 1
        similarity[at] = value
        prompts[at] = start + i
    return held


@jit
def search(queries, nodes, medoids, vectors, alpha):
    """The ``alpha`` most similar prompts of each query's leaf, filled up from its siblings.

    A leaf with fewer than ``alpha`` prompts is joined by its siblings, nearest medoid first, then
    by its parent's siblings; all of them are ranked before the list is cut.

    Args:
        queries: float32 ``(Q, d)``.
        nodes: int64 ``(N, 6)``.
        medoids: float32 ``(N, d)``.
        vectors: float32 ``(P, d)``, leaf by leaf.
        alpha: At most P.

    Returns:
        Rows of ``vectors`` int64 ``(Q, alpha)``, most similar first, and the similarities.
    """
    prompts = np.empty((queries.shape[0], alpha), np.int64)
    similarity = np.empty((queries.shape[0], alpha), np.float32)
    near = np.empty(max(vectors.shape[0], nodes.shape[0]), np.float32)
    order = np.empty(nodes.shape[0], np.float32)
    for row in range(queries.shape[0]):
        query, p, s = queries[row], prompts[row], similarity[row]
        node = descend(query, nodes, medoids, near)
        observed = nodes[node, STOP] - nodes[node, START]
        held = _rank(query, vectors, nodes[node, START], nodes[node, STOP], near, p, s, 0)
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
                held = _rank(query, vectors, start, stop, near, p, s, held)
                observed += stop - start
            node = parent
    return prompts, similarity


@jit
def _two_nearest(distance, medoids, nearest, first, second):
    """Place in ``medoids`` of each row's nearest one, its distance and the second nearest's."""
    for o in range(distance.shape[0]):
        nearest[o] = 0
        first[o] = np.inf
        second[o] = np.inf
        for place in range(medoids.shape[0]):
            d = distance[medoids[place], o]
            if d < first[o]:
                second[o] = first[o]
                first[o] = d
                nearest[o] = place
            elif d < second[o]:
                second[o] = d


@jit
def pam(distance, k):
    """Partitioning Around Medoids of Kaufman and Rousseeuw: BUILD, then SWAP to a local optimum.

    SWAP makes the exchange of a medoid and a point that lowers the total distance most, until none
    lowers it. One pass over the pairs values all exchanges of a point at once, by what a medoid's
    removal costs and what the point changes (FastPAM1 of Schubert and Rousseeuw); the exchanges
    are those of the original. Ties go to the lower index.

    Args:
        distance: ``(n, n)``, symmetric, 0 on the diagonal.
        k: Medoids, from 1 to n.

    Returns:
        Medoids int64 ``(k,)``, the place of each point's nearest medoid int64 ``(n,)``, and the
        total distance.
    """
    n = distance.shape[0]
    medoids = np.empty(k, np.int64)
    chosen = np.zeros(n, np.bool_)
    nearest = np.zeros(n, np.int64)
    first = np.full(n, np.inf)
    second = np.full(n, np.inf)
    for place in range(k):
        best = -1
        least = np.inf
        for j in range(n):
            if chosen[j]:
                continue
            total = 0.0
            for o in range(n):
                total += min(np.float64(distance[j, o]), first[o])
            if total < least:
                least = total
                best = j
        medoids[place] = best
        chosen[best] = True
        for o in range(n):
            first[o] = min(np.float64(distance[best, o]), first[o])
    removal = np.empty(k)
    change = np.empty(k)
    while True:
        _two_nearest(distance, medoids, nearest, first, second)
        loss = first.sum()
        if k == 1 or k == n:
            return medoids, nearest, loss
        removal[:] = 0.0
        for o in range(n):
            removal[nearest[o]] += second[o] - first[o]
        gain = -1e-12 * loss
        place = -1
        point = -1
        for j in range(n):
            if chosen[j]:
                continue
            change[:] = removal
            all_of_them = 0.0
            for o in range(n):
                d = np.float64(distance[j, o])
                if d < first[o]:
                    all_of_them += d - first[o]
                    change[nearest[o]] += first[o] - second[o]
                elif d < second[o]:
                    change[nearest[o]] += d - second[o]
            least_at = 0
            for m in range(1, k):
                if change[m] < change[least_at]:
                    least_at = m
            if change[least_at] + all_of_them < gain:
                gain = change[least_at] + all_of_them
                place = least_at
                point = j
        if place < 0:
            return medoids, nearest, loss
        chosen[medoids[place]] = False
        chosen[point] = True
        medoids[place] = point
