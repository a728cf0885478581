"""Constants and arguments of the serverless MoE environments, checked and turned into arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym.envs._checks import choose, real, whole
from servegym.envs.serverless_moe.equations import SystemModel

MB = float(2**20)
_REFERENCE_EXPERT_PARAMETERS = 3 * 2048 * 1408  # DeepSeek-V2-Lite, whose expert was timed
_THETA2_PER_GB = {"gpt2-moe": 11.8665}

# Seconds of one MoE block on the GPU for one decode token: non-expert module, routed experts.
GPU_PROFILES: dict[str, tuple[float, float]] = {
    "eager": (0.4e-3, 1.1e-3),
    "fused": (0.15e-3, 0.10e-3),
}
# (lowest, highest, step) of the main and of the remote functions in MB.
_SPECS_MB: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "gpt2-moe": ((200.0, 5000.0, 100.0), (200.0, 2000.0, 100.0)),
    "mixtral-8x7b": ((1000.0, 120000.0, 100.0), (1000.0, 10000.0, 100.0)),
}
_DEFAULT_SPECS_MB = ((1000.0, 40000.0, 100.0), (1000.0, 5000.0, 100.0))

PROVENANCE: dict[str, str] = {
    "expert_theta2_per_gb": "paper (Fig. 6)",
    "expert_theta1_s": "derived: 0.80 ms a call at 1 GB, scaled with the expert's parameters",
    "expert_theta3_s": "chosen: 0.20 ms a call, scaled with the expert's parameters",
    "expert_token_s": "measured: 0.148 ms a further token on one vCPU, scaled likewise",
    "max_vcpus": "chosen",
    "gpu_layer_base_s": "chosen",
    "gpu_layer_token_s": "chosen",
    "gpu_experts_base_s": "chosen",
    "gpu_experts_token_s": "chosen",
    "swap_base_s": "chosen",
    "swap_mb_s": "chosen: 16 GB/s",
    "bandwidth_mb_s": "chosen: 10 Gbit/s",
    "load_mb_s": "measured by others (ServerlessLLM)",
    "container_start_main_s": "chosen",
    "container_start_remote_s": "chosen",
    "price_cpu": "list price (AWS Lambda)",
    "price_gpu": "paper: three times the CPU price",
    "z_max": "chosen",
    "payload_mb": "documented limit (AWS Lambda)",
    "main_specs_mb": "paper (V-A) where the model is in it, else chosen",
    "remote_specs_mb": "paper (V-A) where the model is in it, else chosen",
}


def _specs(argument: str, given: Any, default: tuple[float, float, float]) -> np.ndarray:
    """A grid of memory specifications: ``(low, high, step)`` as an increasing array."""
    if given is None:
        given = default
    if not isinstance(given, (list, tuple)) or len(given) != 3:
        raise ValueError(f"{argument}={given!r} must be three numbers (low, high, step) in MB.")
    low, high, step = (real(argument, x, 0.0, 1e7, open_low=True) for x in given)
    if high < low:
        raise ValueError(f"{argument}={given!r}: the highest specification is below the lowest.")
    grid = low + step * np.arange(math.floor((high - low) / step + 1e-9) + 1)
    if len(grid) > 100_000:
        raise ValueError(f"{argument}={given!r} has {len(grid)} steps; at most 100000 are allowed.")
    return grid


def build_system(
    model: Any = "deepseek-v2-lite",
    gpu: str = "eager",
    *,
    price_ratio: float = 3.0,
    price_cpu_usd_mb_s: float = 1.6276e-8,
    bandwidth_mb_s: float = 1250.0,
    load_mb_s: float = 2600.0,
    container_start_s: float = 1.0,
    z_max: int = 8,
    payload_mb: float = 6.0,
    main_specs_mb: Sequence[float] | None = None,
    remote_specs_mb: Sequence[float] | None = None,
    max_output_tokens: int = 400,
) -> SystemModel:
    """Build the system of one model from the constants of :data:`PROVENANCE`.

    Args:
        model: a model's name, or a :class:`servegym.envs.workloads.activations.MoeModel`.
        gpu: ``eager`` (a framework that launches its kernels one by one) or ``fused``.
        price_ratio: c_g / c_c.
        price_cpu_usd_mb_s: c_c in USD per MB s.
        bandwidth_mb_s: B in MB/s.
        load_mb_s: MB/s at which a starting function reads its weights.
        container_start_s: seconds to start a container, main or remote.
        z_max: most replicas of a remote function.
        payload_mb: largest body of one invocation.
        main_specs_mb: (low, high, step) of the main function's memory; the model's own if None.
        remote_specs_mb: likewise of the remote functions.
        max_output_tokens: most generated tokens that the memory grids must hold.

    Raises:
        ValueError: a bad argument, or memory grids that cannot hold the model.
    """
    if isinstance(model, str):
        from servegym.envs.workloads.activations import load_model

        model = load_model(model)
    layer_s, experts_s = GPU_PROFILES[choose("gpu", gpu, GPU_PROFILES)]
    price_cpu = real("price_cpu_usd_mb_s", price_cpu_usd_mb_s, 0.0, open_low=True)
    default_main, default_remote = _SPECS_MB.get(model.name, _DEFAULT_SPECS_MB)
    main = _specs("main_specs_mb", main_specs_mb, default_main)
    remote = _specs("remote_specs_mb", remote_specs_mb, default_remote)
    experts = np.zeros(model.layers, dtype=np.int64)
    experts[list(model.moe_layers)] = model.experts
    count = len(model.moe_layers)
    scale = model.expert_bytes / model.bytes_per_value / _REFERENCE_EXPERT_PARAMETERS
    token_mb = model.token_bytes / MB
    expert_mb = model.expert_bytes / MB
    system = SystemModel(
        name=model.name,
        gpu=gpu,
        layers=model.layers,
        experts=experts,
        top_k=model.top_k,
        main_specs_mb=main,
        remote_specs_mb=remote,
        expert_mb=np.full(count, expert_mb),
        non_expert_mb=np.asarray(model.non_expert_mb, dtype=np.float64),
        kv_mb_per_token=np.full(model.layers, model.kv_bytes_per_token_layer / MB),
        token_mb=token_mb,
        bandwidth_mb_s=real("bandwidth_mb_s", bandwidth_mb_s, 0.0, open_low=True),
        price_cpu=price_cpu,
        price_gpu=price_cpu * real("price_ratio", price_ratio, 0.0, open_low=True),
        load_mb_s=real("load_mb_s", load_mb_s, 0.0, open_low=True),
        container_start_main_s=real("container_start_s", container_start_s, 0.0),
        container_start_remote_s=float(container_start_s),
        z_max=whole("z_max", z_max, 1, 64),
        payload_mb=real("payload_mb", payload_mb, 0.0, open_low=True),
        expert_theta1_s=6.86e-3 * scale,
        expert_theta2_per_gb=_THETA2_PER_GB.get(model.name, 2.4363),
        expert_theta3_s=0.20e-3 * scale,
        expert_token_s=0.148e-3 * scale,
        max_vcpus=16.0,
        gpu_layer_base_s=layer_s,
        gpu_layer_token_s=1e-6,
        gpu_experts_base_s=experts_s,
        gpu_experts_token_s=1e-6,
        swap_base_s=20e-6,
        swap_mb_s=16.0 * 1024.0,
        provenance=dict(PROVENANCE),
    )
    need = system.all_experts_mb + token_mb * whole("max_output_tokens", max_output_tokens, 1)
    if main[-1] < need:
        raise ValueError(
            f"main_specs_mb: the largest specification, {main[-1]:g} MB, cannot hold all experts "
            f"of {model.name!r}: {need:.0f} MB are needed (10f)."
        )
    largest = float((system.expert_mb * system.num_experts).max())
    if remote[-1] < largest:
        raise ValueError(
            f"remote_specs_mb: the largest specification, {remote[-1]:g} MB, cannot hold all "
            f"experts of a layer of {model.name!r}: {largest:.0f} MB are needed (10e)."
        )
    return system
