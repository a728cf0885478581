"""Jitted inner loops of the placement algorithms, one module a subject.

``balancing`` (EPLB), ``layer_costs`` (estimated latency by server and layer), ``link_queues``
(estimated latency with a queue at every link).
"""

from __future__ import annotations

import numpy as np

from servegym import _jit
from servegym.baselines.expert_placement.kernel import balancing, layer_costs, link_queues


def compile_kernels() -> None:
    """Compile all of them, or load them from the cache on disk."""
    table, cube = np.zeros((1, 1)), np.zeros((1, 1, 1))
    masks, rows = np.zeros((1, 1), np.uint64), np.zeros((1, 1, 1), np.uint64)
    whole, wholes = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    mask = np.zeros((1, 1, 1), np.bool_)
    costs = layer_costs.Tables(np.zeros((1, 1), layer_costs.LAYER_COST), rows, cube)
    load = np.zeros(1, link_queues.LOAD)
    queues = link_queues.Tables(rows, cube, wholes, load, table, table, 0.0, False)
    _jit.compile_kernels(
        "expert placement policies",
        [
            (balancing.balance_layers, (table, wholes, whole, wholes)),
            (balancing.fill_layers, (table, wholes, mask)),
            (layer_costs.layer_cost, (costs, 1, 1, np.uint64(1))),
            (layer_costs.remote_calls, (costs, 1, 1, np.uint64(1))),
            (layer_costs.prefix_costs, (costs, 1, wholes)),
            (layer_costs.knapsack, (table, 1)),
            (link_queues.anneal, (queues, masks, 1.0, 1, 1.0, 1.0, 1)),
        ],
    )
