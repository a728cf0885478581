"""Jitted inner loops of the placement algorithms, one module a subject.

``balancing`` (EPLB), ``link_queues`` (estimated latency with a queue at every link).
"""

from __future__ import annotations

import numpy as np

from servegym import _jit
from servegym.baselines.expert_placement.kernel import balancing, link_queues


def compile_kernels() -> None:
    """Compile all of them, or load them from the cache on disk."""
    table, cube = np.zeros((1, 1)), np.zeros((1, 1, 1))
    masks, rows = np.zeros((1, 1), np.uint64), np.zeros((1, 1, 1), np.uint64)
    whole, wholes = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    mask = np.zeros((1, 1, 1), np.bool_)
    load = np.zeros(1, link_queues.LOAD)
    queues = link_queues.Tables(rows, cube, wholes, load, table, table, 0.0, False)
    _jit.compile_kernels(
        "expert placement policies",
        [
            (balancing.balance_layers, (table, wholes, whole, wholes)),
            (balancing.fill_layers, (table, wholes, mask)),
            (link_queues.anneal, (queues, masks, 1.0, 1, 1.0, 1.0, 1)),
        ],
    )
