"""From an action to a feasible placement: every expert on some GPU, no GPU beyond its slots.

Each decoder is a deterministic function of its arguments. Experts are numbered ``l * E + e`` where
arrays are flat.
"""

from __future__ import annotations

import numpy as np

from servegym.envs.expert_placement.cluster import Cluster

HEIGHT_SPAN = 16.0
"""Heights of layers are from minus to plus half of it, in units of the logarithm of a share."""
LEAST_SHARE = 0.01


def layer_sizes(
    share: np.ndarray, cap: np.ndarray, experts: int, *, fill: bool = True
) -> np.ndarray:
    """Experts of each layer on each server, from shares (N, L) of the server's slots (N,).

    The shares of a server are normalised (all equal if they sum to 0), rounded down, clamped at E
    and, with ``fill``, filled up by the largest remainder. Layers with fewer than E places in all
    then take from those with most, at servers with many slots first.

    Returns:
        int64 ``(N, L)``: row n sums to ``min(cap[n], L E)``, every column to at least E.

    Raises:
        ValueError: the slots that are left without ``fill`` cannot hold every expert.
    """
    share = np.asarray(share, dtype=np.float64)
    servers, layers = share.shape
    total = share.sum(axis=1, keepdims=True)
    share = np.where(total > 0, share, 1.0)
    quota = cap[:, None] * share / share.sum(axis=1, keepdims=True)
    size = np.minimum(np.floor(quota).astype(np.int64), experts)
    for n in range(servers if fill else 0):
        left = min(int(cap[n]), layers * experts) - int(size[n].sum())
        remainder = np.where(size[n] < experts, quota[n] - size[n], -np.inf)
        while left > 0:
            layer = int(np.argmax(remainder))
            size[n, layer] += 1
            remainder[layer] = remainder[layer] - 1.0 if size[n, layer] < experts else -np.inf
            left -= 1
    columns = size.sum(axis=0)
    if columns.sum() < layers * experts:
        raise ValueError(
            f"rounding down leaves {columns.sum()} slots for {layers * experts} experts, too few"
        )
    order = np.argsort(-cap, kind="stable")
    for layer in range(layers):
        while columns[layer] < experts:
            for n in order:
                if columns[layer] >= experts:
                    break
                donors = (columns > experts) & (size[n] > 0)
                if size[n, layer] == experts or not donors.any():
                    continue
                donor = int(np.argmax(np.where(donors, columns, -1)))
                size[n, donor] -= 1
                size[n, layer] += 1
                columns[donor] -= 1
                columns[layer] += 1
    return size


def best_experts(score: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The ``size[n]`` best-scored experts of each server, repaired so that each is somewhere.

    An expert that no server has chosen goes, in order of its number, to the server that scores it
    highest among those with an expert that another server has too, in place of the lowest-scored of
    these. Ties go to the lowest number. Scores are ``(N, C)``, as is the bool result; sizes are at
    most C each and at least C in all.
    """
    servers, count = score.shape
    chosen = np.zeros((servers, count), dtype=bool)
    ranked = []
    for n in range(servers):
        best = np.argsort(-score[n], kind="stable")[: size[n]]
        chosen[n, best] = True
        ranked.append(best.tolist())
    copies = chosen.sum(axis=0)
    missing = np.flatnonzero(copies == 0)
    for expert in missing.tolist():
        best = -1
        for n in range(servers):
            # A spare expert never comes back: copies of those first chosen only become fewer.
            while ranked[n] and copies[ranked[n][-1]] < 2:
                ranked[n].pop()
            if ranked[n] and (best < 0 or score[n, expert] > score[best, expert]):
                best = n
        worst = ranked[best].pop()
        chosen[best, worst] = False
        chosen[best, expert] = True
        copies[worst] -= 1
        copies[expert] = 1
    return chosen


def assign_gpus(
    slots: np.ndarray,
    gpu_server: np.ndarray,
    view: np.ndarray,
    weight: np.ndarray,
    current: np.ndarray,
) -> np.ndarray:
    """Spread the experts ``(N, L, E)`` of each server over its GPUs: uint8 ``(G, L, E)``.

    An expert that is on a GPU of the server already, by ``current``, stays there. The others follow
    layer by layer, by falling weight ``(L, E)``, each to the GPU with a free slot that has the
    least weight of the layer so far (ties: most free slots, then the lowest number). ``slots`` and
    ``gpu_server`` are ``(G,)``; a GPU has as many slots as its server has experts, or more.
    """
    z = np.zeros(current.shape, dtype=np.uint8)
    for n in range(len(view)):
        gpus = np.flatnonzero(gpu_server == n)
        if len(gpus) == 1:
            z[gpus[0]] = view[n]
            continue
        open_ = view[n].copy()
        free = slots[gpus].copy()
        load = np.zeros((len(gpus), view.shape[1]))
        for i, g in enumerate(gpus):
            stay = open_ & (current[g] > 0)
            z[g] = stay
            open_ &= ~stay
            free[i] -= int(stay.sum())
            load[i] = (stay * weight).sum(axis=1)
        room = free.tolist()
        for layer in np.flatnonzero(open_.any(axis=1)).tolist():
            waiting = np.flatnonzero(open_[layer])
            order = waiting[np.argsort(-weight[layer, waiting], kind="stable")]
            on = load[:, layer].tolist()
            gpu = []
            for w in weight[layer, order].tolist():
                best = -1
                for i, left in enumerate(room):
                    if left > 0 and (
                        best < 0 or on[i] < on[best] or (on[i] == on[best] and left > room[best])
                    ):
                        best = i
                gpu.append(gpus[best])
                room[best] -= 1
                on[best] += w
            z[gpu, layer, order] = 1
    return z


def decode_budget(
    cluster: Cluster, share: np.ndarray, counts: np.ndarray, current: np.ndarray
) -> np.ndarray:
    """A placement from the share of each server's slots for each layer, ``(N, L)``.

    Which experts of a layer a server has goes by its counts ``(N, L, E)``; where they are equal,
    it keeps those it has.
    """
    size = layer_sizes(share, cluster.cap, cluster.experts)
    score = counts + 0.5 * cluster.server_view(current)
    view = np.zeros(score.shape, dtype=bool)
    for layer in range(cluster.layers):
        view[:, layer] = best_experts(score[:, layer], size[:, layer])
    return assign_gpus(cluster.slots, cluster.gpu_server, view, counts.sum(axis=0), current)


def decode_scores(
    cluster: Cluster, score: np.ndarray, counts: np.ndarray, current: np.ndarray
) -> np.ndarray:
    """A placement from a score of each expert at each server, ``(N, L, E)``."""
    flat = np.asarray(score, dtype=np.float64).reshape(cluster.num_servers, -1)
    view = best_experts(flat, np.minimum(cluster.cap, flat.shape[1])).reshape(score.shape)
    return assign_gpus(cluster.slots, cluster.gpu_server, view, counts.sum(axis=0), current)


def decode_heights(
    cluster: Cluster, plan: np.ndarray, counts: np.ndarray, current: np.ndarray
) -> np.ndarray:
    """A placement from a number in [0, 1] for each layer of each server, ``(N, L)``.

    The score of an expert is the natural logarithm of its share of the server's own assignments in
    the layer plus the layer's height, `HEIGHT_SPAN` times (number - 1/2), see `decode_scores`. A
    share counts as `LEAST_SHARE` of an even one at least; without assignments all are even.
    """
    counts = np.asarray(counts, dtype=np.float64)
    total = counts.sum(axis=2, keepdims=True)
    even = 1.0 / cluster.experts
    share = np.where(total > 0, counts / np.maximum(total, 1.0), even)
    height = HEIGHT_SPAN * (np.asarray(plan, dtype=np.float64) - 0.5)
    score = np.log(np.maximum(share, LEAST_SHARE * even)) + height[:, :, None]
    return decode_scores(cluster, score, counts, current)


def repair_placement(cluster: Cluster, placement: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ``placement`` ``(G, L, E)``, unchanged if it is feasible.

    A GPU beyond its slots gives up experts that another GPU has too, the least used first, then
    the least used of the others. An expert on no GPU goes to the GPU with most free slots, and
    when none has any in place of the least used second copy.
    """
    use = counts.sum(axis=0).reshape(-1)
    z = (np.asarray(placement).reshape(cluster.num_gpus, -1) > 0).astype(np.uint8)
    copies = z.sum(axis=0, dtype=np.int64)
    for g in range(cluster.num_gpus):
        here = np.flatnonzero(z[g])
        excess = len(here) - int(cluster.slots[g])
        if excess > 0:
            order = np.lexsort((here, use[here], copies[here] < 2))
            z[g, here[order[:excess]]] = 0
            copies[here[order[:excess]]] -= 1
    missing = np.flatnonzero(copies == 0).tolist()
    free = cluster.slots - z.sum(axis=1, dtype=np.int64)
    spare: list[tuple[int, int]] | None = None
    for expert in missing:
        g = int(np.argmax(free))
        if free[g] <= 0:
            if spare is None:
                at, which = np.nonzero(z * (copies > 1))
                order = np.lexsort((at, which, use[which]))[::-1]
                spare = list(zip(at[order].tolist(), which[order].tolist(), strict=True))
            g, other = spare.pop()
            while copies[other] < 2:
                g, other = spare.pop()
            z[g, other] = 0
            copies[other] -= 1
            free[g] += 1
        z[g, expert] = 1
        copies[expert] = 1
        free[g] -= 1
    return z.reshape(cluster.num_gpus, cluster.layers, cluster.experts)
