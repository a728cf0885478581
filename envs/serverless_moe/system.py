"""A model, the functions it is served from and their prices; what no plan can do better than."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servegym._checks import choose, real, whole
from servegym.envs.serverless_moe.arguments import SystemArguments
from servegym.envs.serverless_moe.kernel import cost
from servegym.envs.workloads.moe_models import MoeModel, load_model
from servegym.hardware_profiles import serverless


@dataclass(frozen=True, eq=False)
class SystemModel:
    """A model, the functions it is served from, and their prices.

    Make one with :func:`servegym.envs.serverless_moe.config.build_system`, which checks everything.

    Attributes:
        name: the model's name.
        gpu: name of the GPU profile.
        layers: transformer blocks, dense ones included.
        experts: int64 ``(layers,)`` K_l, 0 for a dense block.
        top_k: routed experts per token.
        main_specs_mb: float64 ``(V,)`` increasing memory specifications of the main function.
        remote_specs_mb: float64 ``(Ve,)`` of the remote functions.
        expert_mb: float64 ``(L,)`` one expert of each MoE layer.
        non_expert_mb: float64 ``(layers,)`` non-expert module, shared experts included.
        kv_mb_per_token: float64 ``(layers,)`` KV cache of one token.
        token_mb: D, one token vector.
        bandwidth_mb_s: B, network rate.
        price_cpu: c_c, USD per MB s.
        price_gpu: c_g, USD per MB s.
        load_mb_s: rate at which a starting function reads its weights.
        container_start_s: start of a function's container.
        z_max: most replicas of a remote function.
        payload_mb: largest body of one invocation.
        expert_theta1_s: theta1 of the one-token expert time.
        expert_theta2_per_gb: theta2.
        expert_theta3_s: theta3, the time that no memory takes away.
        expert_token_s: one further token in the same call, on one vCPU.
        max_vcpus: vCPUs beyond which a further token gets no faster.
        gpu_layer_base_s: non-expert module of one block on the GPU, one token.
        gpu_layer_token_s: each further token.
        gpu_experts_base_s: routed experts of one MoE layer on the GPU (GPU deployments), one token.
        gpu_experts_token_s: each further token.
        gpu_experts_table: tokens and seconds, which go before the two terms; None: there is none.
        swap_base_s: GPU-CPU move of token vectors, one way: latency.
        swap_mb_s: its rate.
        invocation_usd: fee of one invocation; 0 in the paper.
        granularity_s: billed durations are rounded up to its multiples; 0 in the paper: they are
            not rounded.
        per_call: whether every remote call of a decoded token is an invocation (Eq. 5 as printed);
            else one invocation of a layer carries all calls of the token.
        bill_cold_start: whether starting functions are billed; in Eq. 6 they are not.
        load_shared: whether the weights of all starting functions, each replica's own, share one
            storage link; else every function has its own.
    """

    name: str
    gpu: str
    layers: int
    experts: np.ndarray
    top_k: int
    main_specs_mb: np.ndarray
    remote_specs_mb: np.ndarray
    expert_mb: np.ndarray
    non_expert_mb: np.ndarray
    kv_mb_per_token: np.ndarray
    token_mb: float
    bandwidth_mb_s: float
    price_cpu: float
    price_gpu: float
    load_mb_s: float
    container_start_s: float
    z_max: int
    payload_mb: float
    expert_theta1_s: float
    expert_theta2_per_gb: float
    expert_theta3_s: float
    expert_token_s: float
    max_vcpus: float
    gpu_layer_base_s: float
    gpu_layer_token_s: float
    gpu_experts_base_s: float
    gpu_experts_token_s: float
    swap_base_s: float
    swap_mb_s: float
    invocation_usd: float = 0.0
    granularity_s: float = 0.0
    per_call: bool = True
    bill_cold_start: bool = False
    load_shared: bool = False
    gpu_experts_table: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def moe_layers(self) -> int:
        """L, blocks with routed experts."""
        return len(self.expert_mb)

    @property
    def num_experts(self) -> int:
        """K, routed experts of a MoE layer (all MoE layers have as many)."""
        return int(self.experts.max())

    @property
    def all_non_expert_mb(self) -> float:
        """sum_l mu(f_l)."""
        return float(self.non_expert_mb.sum())

    @property
    def all_experts_mb(self) -> float:
        """sum_{l,k} mu(e_{l,k})."""
        return float(self.expert_mb.sum() * self.num_experts)

    @property
    def gpu_token_mb(self) -> float:
        """GPU memory of a token: its vector and its KV cache."""
        return self.token_mb + float(self.kv_mb_per_token.sum())

    def expert_law(self, mb: Any) -> tuple[Any, Any]:
        """tau^c: expert call of one token and each further token, seconds in the shape of ``mb``.

        One token takes ``theta1 exp(-theta2 y) + theta3`` with y the memory in GB; each further
        one ``expert_token_s / min(vCPUs, max_vcpus)``.
        """
        gb = np.asarray(mb, dtype=np.float64) / 1024.0
        one = self.expert_theta1_s * np.exp(-self.expert_theta2_per_gb * gb) + self.expert_theta3_s
        return one, self.expert_token_s / np.minimum(gb, self.max_vcpus)

    def expert_cpu_s(self, mb: Any, tokens: Any) -> Any:
        """One expert call on CPU, in seconds; none for no token."""
        n = np.asarray(tokens, dtype=np.float64)
        return np.where(n > 0, cost.experts_s(*self.expert_law(mb), 0.0, 1.0, n), 0.0)

    def gpu_experts_s(self, tokens: int) -> float:
        """Routed experts of one MoE layer on the GPU, in seconds (for GPU deployments)."""
        if self.gpu_experts_table is not None:
            return float(np.interp(tokens, *self.gpu_experts_table))
        return self.gpu_experts_base_s + self.gpu_experts_token_s * (tokens - 1)


def _specs(argument: str, setting: Any, default: serverless.Grid) -> np.ndarray:
    """A grid of memory specifications: ``(low, high, step)`` as an increasing array."""
    if setting is None:
        setting = default
    if not isinstance(setting, (list, tuple)) or len(setting) != 3:
        raise ValueError(f"{argument}={setting!r} must be three numbers (low, high, step) in MB.")
    low, high, step = (real(argument, x, 0.0, 1e7, open_low=True) for x in setting)
    if high < low:
        raise ValueError(f"{argument}={setting!r}: the highest specification is below the lowest.")
    count = math.floor((high - low) / step + 1e-9) + 1
    if count > 100_000:
        raise ValueError(f"{argument}={setting!r} has {count} steps; at most 100000 are allowed.")
    return low + step * np.arange(count)


def _fees(setting: Any) -> serverless.Fees:
    """A platform's fees by name, or those of (USD an invocation, granularity in seconds)."""
    if isinstance(setting, str):
        return serverless.FEES[choose("fees", setting, serverless.FEES)]
    if not isinstance(setting, (list, tuple)) or len(setting) != 2:
        raise ValueError(
            f"fees={setting!r} must be one of {list(serverless.FEES)} or two numbers (USD an "
            "invocation, granularity in seconds)."
        )
    usd, step = real("fees", setting[0], 0.0, 1.0), real("fees", setting[1], 0.0, 60.0)
    if 0.0 < step < 1e-6:
        raise ValueError(f"fees={setting!r}: the granularity must be 0 or at least 1e-6 seconds.")
    return serverless.Fees(usd, step)


def build_system(
    model: str | MoeModel = "deepseek-v2-lite",
    gpu: str = "eager",
    *,
    max_output_tokens: int = 400,
    **constants: Any,
) -> SystemModel:
    """Build the system of one model from the constants of ``hardware_profiles.serverless``.

    Args:
        model: a model's name, or a :class:`servegym.envs.workloads.activations.MoeModel`.
        gpu: ``eager`` (a framework that launches its kernels one by one) or ``fused``, both chosen,
            or a card by its laws: ``a100``, ``h100``, ``l40s``.
        max_output_tokens: most generated tokens that the memory grids must hold.
        **constants: others, as `SystemArguments` has them.

    Raises:
        ValueError: a bad argument, or memory grids that cannot hold the model.
    """
    model = load_model(model) if isinstance(model, str) else model
    arguments = SystemArguments.fill({"gpu": gpu, **constants})
    return system_of(model, arguments, whole("max_output_tokens", max_output_tokens, 1))


def system_of(model: MoeModel, arguments: SystemArguments, max_output_tokens: int) -> SystemModel:
    """The system of a model with checked constants.

    Raises:
        ValueError: memory grids that cannot hold the model.
    """
    main_specs, remote_specs = serverless.memory_grids(model.name)
    bill = _fees(arguments.fees)
    experts = np.zeros(model.layers, dtype=np.int64)
    experts[list(model.moe_layers)] = model.experts
    expert_mb = model.expert_bytes / serverless.MB
    non_expert_mb = np.asarray(model.non_expert_mb, dtype=np.float64)
    parameters = model.expert_bytes / model.bytes_per_value
    theta1, theta2, theta3, further = serverless.expert_law(model.name, parameters)
    card = serverless.gpu_profile(
        arguments.gpu,
        model.name,
        non_expert_mb=float(non_expert_mb.mean()),
        expert_mb=expert_mb,
        parameters=parameters,
        experts=model.experts,
        top_k=model.top_k,
    )
    system = SystemModel(
        name=model.name,
        gpu=arguments.gpu,
        layers=model.layers,
        experts=experts,
        top_k=model.top_k,
        main_specs_mb=_specs("main_specs_mb", arguments.main_specs_mb, main_specs),
        remote_specs_mb=_specs("remote_specs_mb", arguments.remote_specs_mb, remote_specs),
        expert_mb=np.full(len(model.moe_layers), expert_mb),
        non_expert_mb=non_expert_mb,
        kv_mb_per_token=np.full(model.layers, model.kv_bytes_per_token_layer / serverless.MB),
        token_mb=model.token_bytes / serverless.MB,
        bandwidth_mb_s=arguments.bandwidth_mb_s,
        price_cpu=arguments.price_cpu_usd_mb_s,
        price_gpu=arguments.price_cpu_usd_mb_s * arguments.price_ratio,
        load_mb_s=arguments.load_mb_s,
        container_start_s=arguments.container_start_s,
        z_max=arguments.z_max,
        payload_mb=arguments.payload_mb,
        expert_theta1_s=theta1,
        expert_theta2_per_gb=theta2,
        expert_theta3_s=theta3,
        expert_token_s=further,
        max_vcpus=serverless.MAX_VCPUS,
        gpu_layer_base_s=card.layer_base_s,
        gpu_layer_token_s=card.layer_token_s,
        gpu_experts_base_s=card.experts_base_s,
        gpu_experts_token_s=card.experts_token_s,
        gpu_experts_table=card.experts_table,
        swap_base_s=serverless.SWAP_BASE_S,
        swap_mb_s=serverless.SWAP_MB_S,
        invocation_usd=bill.invocation_usd,
        granularity_s=bill.granularity_s,
    )
    _check_memory(system, max_output_tokens)
    return system


def _check_memory(system: SystemModel, max_output_tokens: int) -> None:
    """Refuse memory grids and a payload that cannot hold the model's experts and tokens."""
    need = system.all_experts_mb + system.token_mb * max_output_tokens
    if system.main_specs_mb[-1] < need:
        raise ValueError(
            f"main_specs_mb: the largest specification, {system.main_specs_mb[-1]:g} MB, cannot "
            f"hold all experts of {system.name!r}: {need:.0f} MB are needed (10f)."
        )
    if system.payload_mb < system.token_mb:
        raise ValueError(
            f"payload_mb={system.payload_mb!r} cannot carry one token vector of {system.name!r}, "
            f"{system.token_mb:.4g} MB (10g)."
        )
    largest = float((system.expert_mb * system.num_experts).max())
    if system.remote_specs_mb[-1] < largest:
        raise ValueError(
            f"remote_specs_mb: the largest specification, {system.remote_specs_mb[-1]:g} MB, "
            f"cannot hold all experts of a layer of {system.name!r}: {largest:.0f} MB are needed "
            "(10e)."
        )


# ------------------------------------------------------------------- what no plan can do better


def best_ttft_s(system: SystemModel, n_in: int, cold: bool) -> float:
    """Bound on the TTFT of every plan, in seconds.

    Prefill with the experts' tokens shared out at will over the largest functions and ``z_max``
    replicas, without the base time of a call; if cold, the start of the functions for the best b.
    """
    prefill = system.layers * cost.block_s(system, n_in)
    prefill += system.moe_layers * cost.layer_s(system, 0.0, 0.0, n_in)
    main = system.expert_law(system.main_specs_mb[-1])[1]
    remote = system.expert_law(system.remote_specs_mb[-1])[1] + cost.transfer_s(system)
    more = (n_in - 1) * system.top_k
    prefill += system.moe_layers * more / (1.0 / main + system.z_max / remote)
    if not cold:
        return float(prefill)
    m = np.arange(system.num_experts + 1)
    local = system.all_non_expert_mb + (system.num_experts - m) * float(system.expert_mb.sum())
    main_start = cost.start_s(system, local)
    far = cost.start_s(system, m * float(system.expert_mb.max()))
    return float(prefill + np.maximum(main_start, np.where(m > 0, far, 0.0)).min())


def local_tpot_s(system: SystemModel) -> float:
    """TPOT with every expert in a main function of the largest memory, in seconds."""
    one = system.expert_law(system.main_specs_mb[-1])[0]
    layer = cost.layer_s(system, system.top_k * one, 0.0, system.top_k)
    return float(system.layers * cost.block_s(system, 1) + system.moe_layers * layer)


def best_tpot_s(system: SystemModel, trem_s: float = 0.0) -> float:
    """Bound on the TPOT of every plan, in seconds, with at least this invocation overhead.

    The largest functions and, in every layer, the number of remote experts that suits best.
    """
    r = np.arange(system.top_k + 1)
    together = replace(system, per_call=False)  # the least that calls can take
    one = system.expert_law(system.main_specs_mb[-1])[0]
    call = system.expert_law(system.remote_specs_mb[-1])[0] + cost.transfer_s(system)
    invoked, each = cost.remote_calls(together, r, call, trem_s)
    layer = cost.layer_s(system, (system.top_k - r) * one, invoked * each, system.top_k).min()
    return float(system.layers * cost.block_s(system, 1) + system.moe_layers * layer)


def check_slo(
    system: SystemModel, slo: np.ndarray, n_in: int, cold: bool, trem_s: float = 0.0
) -> None:
    """Refuse limits that no plan can meet, even for the shortest prompt, of ``n_in`` tokens.

    ``slo`` (C, 2) has the limits of TTFT and TPOT in seconds, ``trem_s`` is the least overhead;
    with ``cold`` every request starts cold.
    """
    bounds = {"TTFT": best_ttft_s(system, n_in, cold), "TPOT": best_tpot_s(system, trem_s)}
    for i, limits in enumerate(slo):
        for (name, best), limit in zip(bounds.items(), limits, strict=True):
            if limit < best:
                raise ValueError(
                    f"slo[{i}]: no plan for {system.name!r} on the {system.gpu!r} GPU can meet a "
                    f"{name} of {limit:g} s; the best achievable is at least {best:.4g} s. Give "
                    "slo=[[TTFT s, TPOT s], ...] above it."
                )
