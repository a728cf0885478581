"""Everything that the kernel reads of a problem, laid out in arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym.envs.serverless_moe import kernel
from servegym.envs.serverless_moe.equations import main_memory_mb, smallest_spec
from servegym.envs.serverless_moe.sets import bit_sets, least_used, set_bits
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.expert_sets import masks_to_ids


def make_config(system: SystemModel, **chosen: float) -> np.ndarray:
    """The numbers of a problem, ``(1,)`` :data:`kernel.CONFIG`.

    Args:
        system: the constants.
        **chosen: the fields that the constants do not decide.
    """
    fixed: dict[str, float] = {
        "layers": system.moe_layers,
        "experts": system.num_experts,
        "top_k": system.top_k,
        "blocks": system.layers,
        "main_specs": len(system.main_specs_mb),
        "remote_specs": len(system.remote_specs_mb),
        "z_max": system.z_max,
        "gpu_base": system.gpu_layer_base_s,
        "gpu_token": system.gpu_layer_token_s,
        "swap_base": system.swap_base_s,
        "swap_rate": system.swap_mb_s,
        "token_mb": system.token_mb,
        "bandwidth": system.bandwidth_mb_s,
        "price_cpu": system.price_cpu,
        "price_gpu": system.price_gpu,
        "gpu_per_token": system.token_mb + float(system.kv_mb_per_token.sum()),
        "non_expert": system.all_non_expert_mb,
        "gpu_fixed": system.all_non_expert_mb + system.mem_pre_post_mb + system.runtime_gpu_mb,
        "runtime_cpu": system.runtime_cpu_mb,
        "load": system.load_mb_s,
        "start_main": system.container_start_main_s,
        "start_remote": system.container_start_remote_s,
        "payload": system.payload_mb,
        "expert_total": system.all_experts_mb,
        "largest_expert": float(system.expert_mb.max()),
    }
    values = fixed | chosen
    cfg = np.zeros(1, dtype=kernel.CONFIG)
    for name in kernel.CONFIG.names or ():
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
) -> kernel.Tables:
    """Lay out everything that the kernel reads."""
    prompts, layers, experts = predicted.shape
    unique, prediction = np.unique(predicted.reshape(prompts, -1), axis=0, return_inverse=True)
    q = len(unique)
    table = np.ascontiguousarray(unique.reshape(q, layers, experts))
    wide = table.astype(np.float64)
    masks = np.empty((q + 1, len(levels), layers), dtype=np.uint64)
    share = np.zeros((q, 2, len(levels), layers))
    worst = np.zeros((q, 2, len(levels), 2))
    for level, count in enumerate(levels):
        away = least_used(shared, int(count))
        masks[q, level] = bit_sets(away)
        for i in range(q):
            mine = least_used(wide[i], int(count))
            masks[i, level] = bit_sets(mine)
            for order, members in enumerate((mine, away)):
                inside = np.where(members, wide[i], 0.0)
                share[i, order, level] = inside.sum(axis=1)
                worst[i, order, level] = share[i, order, level].max(), inside.max()
    specs = np.concatenate([system.main_specs_mb, system.remote_specs_mb])
    one = system.expert_cpu_s(specs, 1)
    # Not a difference of two calls: LPT breaks ties by the last digit.
    more = system.expert_token_s / np.minimum(specs / 1024.0, system.max_vcpus)
    law = np.stack([specs, one, more], axis=1)
    choice = np.empty((len(levels), len(headroom[0])), dtype=np.int64)
    most = int(cfg["max_out"][0])
    for level, count in enumerate(levels):
        away = least_used(shared, int(count))
        least = smallest_spec(system.main_specs_mb, main_memory_mb(system, away, most))
        for w, more in enumerate(headroom[0]):
            chosen = smallest_spec(system.main_specs_mb, least + more)
            choice[level, w] = np.searchsorted(system.main_specs_mb, chosen)
    bank = np.array(activations.bank)
    bits = set_bits(bank, experts)
    sums, starts = [], [0]
    for p in range(prompts):
        mine = bits[activations.bank_start[p] : activations.bank_start[p + 1]]
        if len(mine) > 65_535:
            raise ValueError(f"activations: prompt {p} has {len(mine)} tokens; 65535 are allowed.")
        until = np.concatenate([np.zeros((1, layers, experts), np.uint16), mine]).cumsum(
            axis=0, dtype=np.uint16
        )
        sums.append(np.concatenate([until[:: kernel.CHUNK], until[-1:]]))
        starts.append(starts[-1] + len(sums[-1]))
    return kernel.Tables(
        cfg=cfg,
        law=law,
        sizes=np.ascontiguousarray(system.expert_mb, dtype=np.float64),
        main_choice=choice,
        y_headroom=headroom[1],
        z_headroom=headroom[2].astype(np.int64),
        members=levels.astype(np.int64),
        predicted=table,
        falling=np.argsort(-table, axis=2, kind="stable").astype(np.int16),
        masks=masks,
        share=share,
        worst=worst,
        prediction=np.ascontiguousarray(prediction.reshape(-1).astype(np.int64)),
        bank=bank,
        ids=masks_to_ids(bank, system.top_k),
        bank_start=np.array(activations.bank_start, dtype=np.int64),
        sums=np.concatenate(sums),
        sums_start=np.asarray(starts, dtype=np.int64),
    )
