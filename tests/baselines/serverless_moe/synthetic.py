"""Requests with skewed routing, and a system that is small enough to enumerate."""

import dataclasses

import numpy as np

from servegym.envs.serverless_moe.records import Request
from servegym.envs.workloads.expert_sets import bit_sets


def draw_sets(rng, logits, tokens, top_k):
    keys = logits + rng.gumbel(size=(tokens, *logits.shape))
    members = np.zeros(keys.shape, dtype=bool)
    np.put_along_axis(members, np.argsort(-keys, axis=2)[..., :top_k], True, axis=2)
    return members


def make_request(system, n_in=115):
    """A skewed request, and the frequencies that it was drawn from (estimated)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(system.moe_layers, system.num_experts))
    prefill = draw_sets(rng, logits, n_in, system.top_k).sum(axis=0)
    decode = bit_sets(draw_sets(rng, logits, 60, system.top_k))
    frequency = draw_sets(rng, logits, 500, system.top_k).mean(axis=0) / system.top_k
    overhead = 2e-4 * rng.lognormal(0, 0.25, system.moe_layers)
    return Request(prefill, decode, overhead, n_in), frequency


def tiny(system, **changes):
    """Two MoE layers of four experts and coarse grids: everything can be enumerated."""
    fields = {
        "layers": 2,
        "experts": np.array([4, 4]),
        "top_k": 2,
        "expert_mb": np.full(2, 16.5),
        "non_expert_mb": np.full(2, 60.0),
        "kv_mb_per_token": np.full(2, 0.001),
        "main_specs_mb": np.array([200.0, 1000.0]),
        "remote_specs_mb": np.array([500.0, 1500.0, 2500.0]),
        "z_max": 2,
    }
    return dataclasses.replace(system, **{**fields, **changes})
