"""The exact optimum of the proxy, Eq. 2, as a linear program; arguments as in `feasibility`."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from servegym.baselines.expert_placement.feasibility import (
    Bools,
    as_instance,
    assign_gpus,
    fill_slots,
)


def proxy_optimum(counts: ArrayLike, slots: ArrayLike, gpu_server: ArrayLike) -> Bools:
    """The placement with the least Eq. 2. It is no optimum of latency.

    maximise sum f z subject to sum_n z >= 1 for each expert and sum z <= cap_n for each
    server. Every variable is in one row of each kind, so the matrix is totally unimodular and the
    vertex that the simplex method returns is a placement.

    Invariants: no feasible placement has a smaller Eq. 2; every server's slots used up, one copy of
    an expert a server.
    """
    f, room, home, cap = as_instance(counts, slots, gpu_server)
    servers, layers, experts = f.shape
    size = layers * experts
    # Scaled to about 1, where the solver's absolute tolerances belong.
    weight = f.reshape(servers, size)
    used = weight[weight > 0]
    scale = float(used.mean()) if used.size else 1.0
    columns = np.arange(servers * size)
    ones = np.ones(columns.size)
    coverage = csr_array((-ones, (columns % size, columns)))
    memory = csr_array((ones, (columns // size, columns)))
    solution = linprog(
        -(weight / scale).ravel(),
        A_ub=vstack([coverage, memory], format="csc"),
        b_ub=np.concatenate([np.full(size, -1.0), cap.astype(np.float64)]),
        bounds=(0.0, 1.0),
        method="highs-ds",
    )
    if not solution.success:
        raise RuntimeError(f"the linear program of Eq. 2 was not solved: {solution.message}")
    chosen = solution.x > 0.5
    if np.abs(solution.x - chosen).max() > 1e-6:
        raise RuntimeError("the linear program of Eq. 2 has no integral vertex")
    view = fill_slots(chosen.reshape(f.shape), f, cap)
    return assign_gpus(view, f, room, home)
