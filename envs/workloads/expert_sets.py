"""Expert sets as bit masks: counting, unpacking, drawing."""

from __future__ import annotations

import numpy as np


def set_bits(sets: np.ndarray, experts: int) -> np.ndarray:
    """Bit masks uint64 ``(...,)`` as booleans ``(..., experts)``."""
    shifts = np.arange(experts, dtype=np.uint64)
    return ((sets[..., None] >> shifts) & np.uint64(1)).astype(bool)


def bit_sets(members: np.ndarray) -> np.ndarray:
    """Booleans ``(..., K)`` with K <= 64 as bit masks uint64 ``(...,)``."""
    weights = np.uint64(1) << np.arange(members.shape[-1], dtype=np.uint64)
    return np.where(members, weights, np.uint64(0)).sum(axis=-1, dtype=np.uint64)


def ids_to_masks(ids: np.ndarray) -> np.ndarray:
    """Expert sets uint64 (...) of distinct expert indexes in 0..63, (..., k)."""
    return np.bitwise_or.reduce(np.uint64(1) << np.asarray(ids).astype(np.uint64), axis=-1)


def draw_top_k(utilities: np.ndarray, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Draw sets of ``top_k`` experts one after another, each in proportion to exp(utility).

    Adding Gumbel noise to the utilities (..., E) and keeping the largest draws without replacement
    from the softmax: uint64 (...).
    """
    noisy = utilities + rng.gumbel(size=utilities.shape)
    return ids_to_masks(np.argpartition(noisy, -top_k, axis=-1)[..., -top_k:])


def masks_to_ids(masks: np.ndarray, top_k: int) -> np.ndarray:
    """Expert indexes of sets of ``top_k`` experts: uint8 (..., top_k), ascending."""
    ids = np.empty((*masks.shape, top_k), dtype=np.uint8)
    rest = masks.copy()
    for j in range(top_k):
        lowest = rest & (~rest + np.uint64(1))
        ids[..., j] = np.bitwise_count(lowest - np.uint64(1))
        rest ^= lowest
    return ids
