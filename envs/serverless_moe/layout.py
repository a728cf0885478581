"""What the kernel reads and writes: records, the tables of a problem, the arrays of a batch.

Units are seconds, MB, tokens and USD.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["CONFIG", "DEPLOYED", "ENV", "LIVE", "LOG", "REQUEST", "Batch", "Tables"]


def _record(fields: list[tuple[str, str]]) -> np.dtype:
    # np.record scalars give attribute access with the JIT switched off, too.
    return np.dtype((np.record, np.dtype(fields, align=True)))


CONFIG = _record(
    [
        (name, "i8")
        for name in (
            "layers experts top_k blocks main_specs remote_specs z_max levels requests width "
            "per_layer per_call bill shared flat_view max_in max_out deployed"
        ).split()
    ]
    + [
        (name, "f8")
        for name in (
            "gpu_base gpu_token swap_base swap_rate token_mb bandwidth price_cpu price_gpu "
            "gpu_per_token gpu_fixed non_expert runtime_cpu load start_main start_remote payload "
            "keep_alive penalty expert_total largest_expert"
        ).split()
    ]
)
REQUEST = _record(
    [(name, "i4") for name in ("prompt", "offset", "n_in", "n_out")]
    + [(name, "f8") for name in ("n_out_predicted", "ttft_limit", "tpot_limit", "gap")]
)
ENV = _record(
    [(name, "i8") for name in ("index", "live", "level", "order", "feasible", "main_warm")]
    + [
        (name, "f8")
        for name in (
            "idle main_mb reward_cost reward_ttft reward_tpot cost mix_cost ttft tpot cold prefill "
            "decode cost_main cost_prefill cost_decode cost_cold "
            "total_cost total_mix total_ttft total_tpot total_cold total_ratio total_reward"
        ).split()
    ]
    + [(name, "i8") for name in ("late_ttft", "late_tpot", "infeasible", "main_hits")]
    + [(name, "i8") for name in ("bad_main", "bad_remote", "bad_payload", "slow", "stalled")]
)
DEPLOYED = _record(
    [
        (name, "f8")
        for name in (
            "prefill decode main_usd prefill_usd decode_usd start start_usd main_mb remote"
        ).split()
    ]
)
LIVE = _record([("mask", "u8"), ("mb", "f8"), ("replicas", "i8")])
LOG = _record(
    [
        (name, "f8")
        for name in (
            "cost_usd mix_cost_usd cost_main_usd cost_prefill_usd cost_decode_usd cost_cold_usd "
            "ttft_s tpot_s prefill_s decode_s cold_start_s main_mb remote_mb replicas reward"
        ).split()
    ]
    + [
        (name, "i8")
        for name in (
            "level order main_warm ttft_violated tpot_violated main_memory remote_memory payload"
        ).split()
    ]
)


class Tables(NamedTuple):
    """What all systems of a problem share.

    Attributes:
        cfg: ``(1,)`` :data:`CONFIG`.
        law: ``(V + Ve, 3)`` MB, seconds of one token, seconds of one more token, of each
            specification of the main, then of the remote functions.
        sizes: ``(L,)`` MB of one expert.
        main_choice: int64 ``(levels, n_w)`` specification of the main function.
        y_headroom: ``(n_y,)`` MB.
        z_headroom: int64 ``(n_z,)`` replicas.
        members: int64 ``(levels,)`` remote experts of a layer.
        predicted: float32 ``(Q, L, K)``, the distinct predictions.
        falling: int16 ``(Q, L, K)`` experts by falling prediction, ties to the lower index.
        masks: uint64 ``(Q + 1, levels, L)`` remote sets; the last row is the shared order's.
        share: ``(Q, 2, levels, L)`` predicted share of the remote set, by order.
        worst: ``(Q, 2, levels, 2)`` over layers: largest share, largest single remote expert.
        prediction: int64 ``(P,)`` row of ``predicted`` of each prompt.
        bank: uint64 ``(T, L)`` expert sets.
        ids: uint8 ``(T, L, top_k)`` the same as indexes.
        bank_start: int64 ``(P + 1,)``.
        sums: uint16 ``(C, L, K)`` counts before every CHUNK-th token of each prompt, then of all.
        sums_start: int64 ``(P + 1,)``.
    """

    cfg: Any
    law: Any
    sizes: Any
    main_choice: Any
    y_headroom: Any
    z_headroom: Any
    members: Any
    predicted: Any
    falling: Any
    masks: Any
    share: Any
    worst: Any
    prediction: Any
    bank: Any
    ids: Any
    bank_start: Any
    sums: Any
    sums_start: Any


class Batch(NamedTuple):
    """The arrays of B systems.

    Attributes:
        requests: ``(B, J)`` :data:`REQUEST`.
        trem: ``(B, J + 1, L)`` invocation overheads, those before the first request in front.
        env: ``(B,)`` :data:`ENV`.
        live: ``(B, L)`` :data:`LIVE`, the remote functions last deployed.
        deployed: ``(B, J)`` :data:`DEPLOYED`, what each request takes of a deployment that is no
            plan; ``(B, 0)`` where the action's plan serves.
        log: ``(B, J)`` :data:`LOG`.
        activations: float32 ``(B, L, K)`` observation.
        scalars: float32 ``(B, kernel.SCALARS)`` observation.
        warm_remote: float32 ``(B, L, 2)`` observation.
        flat: float32 ``(B, F)`` observation of the flat view, else ``(B, 0)``.
        action_mask: int8 ``(B, A)``.
        out: ``(B, 4)`` the three reward terms and whether the episode ended.
        counts: int64 ``(L * K + L * (top_k + 1),)`` scratch.
        work: float64 ``(256 + L,)`` scratch.
        chosen: int64 ``(64 + L,)`` scratch.
    """

    requests: Any
    trem: Any
    env: Any
    live: Any
    deployed: Any
    log: Any
    activations: Any
    scalars: Any
    warm_remote: Any
    flat: Any
    action_mask: Any
    out: Any
    counts: Any
    work: Any
    chosen: Any
