"""Everything that the kernel reads of a problem, laid out in arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from servegym.envs.serverless_moe.kernel import layout
from servegym.envs.serverless_moe.plans import main_choices
from servegym.envs.serverless_moe.sets import least_used
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.expert_sets import bit_sets, masks_to_ids, set_bits


def make_config(system: SystemModel, **chosen: float) -> np.ndarray:
    """The numbers of a problem, ``(1,)`` `CONFIG`: those chosen, and else the system's."""
    fields = layout.CONFIG.names or ()
    values = {name: getattr(system, name) for name in fields if hasattr(system, name)}
    values |= {"layers": system.moe_layers, "experts": system.num_experts, "blocks": system.layers}
    values |= {"largest_expert_mb": float(system.expert_mb.max()), **chosen}
    cfg = np.zeros(1, dtype=layout.CONFIG)
    for name in fields:
        cfg[0][name] = values.pop(name)  # a field that nobody sets is an error
    if values:
        raise KeyError(f"no such fields: {sorted(values)}")
    return cfg


def make_tables(
    system: SystemModel,
    activations: Any,
    predicted: np.ndarray,
    shared: np.ndarray,
    levels: np.ndarray,
    headroom: tuple[np.ndarray, np.ndarray, np.ndarray],
    cfg: np.ndarray,
) -> layout.Tables:
    """Lay out everything that the kernel reads."""
    table, prediction = _distinct(predicted)
    masks, share, worst_expert = _remote_sets(table, shared, levels)
    sums, sums_start = _cumulative_counts(activations, predicted.shape[2])
    bank = np.array(activations.bank)
    main_mb = main_choices(system, levels, headroom[0], int(cfg["max_out"][0]))
    return layout.Tables(
        cfg=cfg,
        main_law=_laws(system, system.main_specs_mb),
        remote_law=_laws(system, system.remote_specs_mb),
        expert_mb=np.ascontiguousarray(system.expert_mb, dtype=np.float64),
        main_choice=np.searchsorted(system.main_specs_mb, main_mb),
        y_headroom=headroom[1],
        z_headroom=headroom[2].astype(np.int64),
        members=levels.astype(np.int64),
        predicted=table,
        falling=np.argsort(-table, axis=2, kind="stable").astype(np.int16),
        masks=masks,
        share=share,
        worst_share=share.max(axis=3),
        worst_expert=worst_expert,
        prediction=prediction,
        recorded=layout.Recorded(
            bank=bank,
            ids=masks_to_ids(bank, system.top_k),
            bank_start=np.array(activations.bank_start, dtype=np.int64),
            sums=sums,
            sums_start=sums_start,
        ),
    )


def _distinct(predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct predictions ``(Q, L, K)`` and the one of each prompt, int64 ``(P,)``."""
    prompts, layers, experts = predicted.shape
    unique, which = np.unique(predicted.reshape(prompts, -1), axis=0, return_inverse=True)
    table = np.ascontiguousarray(unique.reshape(len(unique), layers, experts))
    return table, np.ascontiguousarray(which.reshape(-1).astype(np.int64))


def _remote_sets(
    table: np.ndarray, shared: np.ndarray, levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``masks``, ``share`` and ``worst_expert`` of :class:`layout.Tables`."""
    q, layers, _ = table.shape
    wide = table.astype(np.float64)
    masks = np.empty((q + 1, len(levels), layers), dtype=np.uint64)
    share = np.zeros((q, 2, len(levels), layers))
    worst_expert = np.zeros((q, 2, len(levels)))
    for level, count in enumerate(levels):
        by_prompt, by_shared = least_used(wide, int(count)), least_used(shared, int(count))
        masks[:q, level], masks[q, level] = bit_sets(by_prompt), bit_sets(by_shared)
        for order, members in enumerate((by_prompt, by_shared)):
            inside = np.where(members, wide, 0.0)
            share[:, order, level] = inside.sum(axis=2)
            worst_expert[:, order, level] = inside.max(axis=(1, 2))
    return masks, share, worst_expert


def _laws(system: SystemModel, specs_mb: np.ndarray) -> np.ndarray:
    """Memory specifications and the speed of experts in them, :data:`layout.LAW`."""
    law = np.zeros(len(specs_mb), dtype=layout.LAW)
    law["mb"] = specs_mb
    law["one_s"], law["more_s"] = system.expert_law(specs_mb)
    return law


def _cumulative_counts(activations: Any, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """``sums`` and ``sums_start`` of :class:`layout.Recorded`."""
    bits = set_bits(np.array(activations.bank), experts)
    sums, starts = [], [0]
    for prompt, (first, last) in enumerate(pairwise(activations.bank_start)):
        if last - first > 65_535:
            raise ValueError(
                f"activations: prompt {prompt} has {last - first} tokens; 65535 are allowed."
            )
        nothing = np.zeros((1, *bits.shape[1:]), np.uint16)
        until = np.concatenate([nothing, bits[first:last]]).cumsum(axis=0, dtype=np.uint16)
        sums.append(np.concatenate([until[:: layout.CHUNK], until[-1:]]))
        starts.append(starts[-1] + len(sums[-1]))
    return np.concatenate(sums), np.asarray(starts, dtype=np.int64)
