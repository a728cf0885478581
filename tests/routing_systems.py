"""Descriptions of routing systems by hand: linear laws, and experts in another order."""

import dataclasses

import numpy as np

from servegym.baselines.llm_routing.system import NO_SCORE, RoutingSystem

RUNNING, WAITING = 5, 5
OF_EXPERTS = "estimator prefill_s decode_s mean_score mean_output_tokens kv_capacity_tokens".split()


def linear_system(law, mean_score=None, mean_output_tokens=None, **kwargs):
    """A system of N experts with ``law`` (N, 4): base_s, k1, k2, seconds a sequence.

    ``prefill_s(P) = base + k1 P`` and ``decode_s(b, T) = base + kb b + k2 T``.
    """
    law = np.asarray(law, dtype=np.float64)
    base, k1, k2, kb = (law[:, k, None, None] for k in range(4))
    batch, grid = np.arange(RUNNING + 1.0)[:, None], np.array([0.0, 8192.0])
    return RoutingSystem(
        experts=tuple(f"expert {n + 1}" for n in range(len(law))),
        running_capacity=RUNNING,
        waiting_capacity=WAITING,
        estimator=law,
        prefill_tokens=grid,
        prefill_s=(base + k1 * grid)[:, 0],
        context_tokens=grid,
        decode_s=base + kb * batch + k2 * batch * grid,
        mean_score=np.array([NO_SCORE] * len(law) if mean_score is None else mean_score),
        mean_output_tokens=np.array(
            [150.0] * len(law) if mean_output_tokens is None else mean_output_tokens
        ),
        **kwargs,
    )


def permuted(system, order):
    """The same system with its experts in another order: new expert i is old ``order[i]``."""
    parts = {name: getattr(system, name) for name in OF_EXPERTS}
    moved = {name: part[order] for name, part in parts.items() if part is not None}
    if system.train is not None:
        columns = {k: v if v.ndim == 1 else v[:, order] for k, v in vars(system.train).items()}
        moved["train"] = dataclasses.replace(system.train, **columns)
    return dataclasses.replace(system, experts=tuple(system.experts[n] for n in order), **moved)
