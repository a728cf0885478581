"""Constants and arguments of the serverless MoE environments, checked and turned into arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servegym.envs._checks import choose, real, whole
from servegym.envs.serverless_moe import kernel
from servegym.envs.serverless_moe.equations import (
    DECODE_INVOCATIONS,
    Plan,
    SystemModel,
    bit_sets,
    least_used,
    main_memory_mb,
    make_plan,
    remote_count,
    set_bits,
    smallest_spec,
)
from servegym.envs.workloads.lengths import length_quantiles
from servegym.hardware_profiles.serverless import GPU_PROFILES, MB, SERVING, Grid, memory_grids


def _specs(argument: str, given: Any, default: Grid) -> np.ndarray:
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
    price_ratio: float = SERVING.price_ratio,
    price_cpu_usd_mb_s: float = SERVING.price_cpu_usd_mb_s,
    bandwidth_mb_s: float = SERVING.bandwidth_mb_s,
    load_mb_s: float = SERVING.load_mb_s,
    container_start_s: float = SERVING.container_start_s,
    z_max: int = SERVING.z_max,
    payload_mb: float = SERVING.payload_mb,
    main_specs_mb: Sequence[float] | None = None,
    remote_specs_mb: Sequence[float] | None = None,
    max_output_tokens: int = 400,
) -> SystemModel:
    """Build the system of one model from the constants of ``hardware_profiles.serverless``.

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
    card = GPU_PROFILES[choose("gpu", gpu, GPU_PROFILES)]
    price_cpu = real("price_cpu_usd_mb_s", price_cpu_usd_mb_s, 0.0, open_low=True)
    default_main, default_remote, grid_source = memory_grids(model.name)
    main = _specs("main_specs_mb", main_specs_mb, default_main)
    remote = _specs("remote_specs_mb", remote_specs_mb, default_remote)
    experts = np.zeros(model.layers, dtype=np.int64)
    experts[list(model.moe_layers)] = model.experts
    count = len(model.moe_layers)
    scale = model.expert_bytes / model.bytes_per_value / SERVING.expert_parameters
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
        expert_theta1_s=SERVING.expert_theta1_s * scale,
        expert_theta2_per_gb=SERVING.theta2_per_gb(model.name),
        expert_theta3_s=SERVING.expert_theta3_s * scale,
        expert_token_s=SERVING.expert_token_s * scale,
        max_vcpus=SERVING.max_vcpus,
        gpu_layer_base_s=card.layer_base_s,
        gpu_layer_token_s=card.layer_token_s,
        gpu_experts_base_s=card.experts_base_s,
        gpu_experts_token_s=card.experts_token_s,
        swap_base_s=SERVING.swap_base_s,
        swap_mb_s=SERVING.swap_mb_s,
        provenance={
            **SERVING.provenance(),
            "gpu": f"{card.kind}: {card.source}",
            "main_specs_mb": grid_source,
            "remote_specs_mb": grid_source,
        },
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


# ------------------------------------------------------------------------------------ environments

GRANULARITIES = ("global", "per_layer")
PREDICTORS = ("task_mean", "global_mean", "nearest")
NEIGHBOURS = 15

PRESETS: dict[str, dict[str, Any]] = {
    "seed": {
        "prompt_tokens": 115,
        "output_tokens": 200,
        "output_error": 0.0,
        "idle_s": ((1.0, 20.0),),
        "keep_alive_s": 0.0,
        "bill_cold_start": False,
        "slo": ((14.0, 0.12),),
        "trem_s": (0.3e-3,),
        "trem_switch": 0.0,
        "trem_sigma": 0.0,
    },
    "dynamic": {
        "prompt_tokens": "azure",
        "output_tokens": "azure",
        "output_error": 0.3,
        "idle_s": ((0.7, 20.0), (0.3, 1500.0)),
        "keep_alive_s": 300.0,
        "bill_cold_start": True,
        "slo": ((8.0, 0.06), (8.0, 0.12), (14.0, 0.05), (14.0, 0.08)),
        "trem_s": (0.2e-3, 1.0e-3),
        "trem_switch": 0.1,
        "trem_sigma": 0.25,
    },
}
"""What the two presets set; every entry is an argument of its own, too."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A serverless problem: what the environments and the baselines share.

    Attributes:
        system: constants of the model and its functions.
        activations: the prompts and their recorded tokens.
        rows: int64 indexes of the prompts that episodes draw from.
        predicted: float32 ``(P, L, K)`` predicted activation matrix of every prompt.
        shared: float64 ``(L, K)`` mean activations of the training prompts, the shared order's.
        levels: int64 ``(levels,)`` remote experts of a layer at each value of the first action.
        w_headroom_mb: MB above the minimum at each value of the third.
        y_headroom_mb: MB above the minimum at each value of the fourth.
        z_headroom: replicas above the minimum at each value of the fifth.
        nvec: int64 values of each action.
        tables: arrays of the kernel.
        lengths: laws of prompt and output tokens: 21 quantiles, or one number.
        output_error: sigma of the lognormal error of the predicted output length.
        idle_s: (probability, mean in s) of each class of idle gap.
        slo: (TTFT s, TPOT s) of each class.
        trem_s: median invocation overhead of each regime, s.
        trem_switch: probability of leaving the regime at a request.
        trem_sigma: sigma of one overhead about the regime's median.
        arguments: the arguments as given.
    """

    system: SystemModel
    activations: Any
    rows: np.ndarray
    predicted: np.ndarray
    shared: np.ndarray
    levels: np.ndarray
    w_headroom_mb: np.ndarray
    y_headroom_mb: np.ndarray
    z_headroom: np.ndarray
    nvec: np.ndarray
    tables: kernel.Tables
    lengths: tuple[np.ndarray, np.ndarray]
    output_error: float
    idle_s: tuple[tuple[float, float], ...]
    slo: np.ndarray
    trem_s: np.ndarray
    trem_switch: float
    trem_sigma: float
    arguments: dict[str, Any]

    @property
    def episode_requests(self) -> int:
        """Requests of an episode."""
        return int(self.tables.cfg["requests"][0])

    @property
    def granularity(self) -> str:
        """``global`` or ``per_layer``."""
        return GRANULARITIES[int(self.tables.cfg["per_layer"][0])]

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt."""
        return int(self.tables.cfg["max_in"][0])

    @property
    def max_output_tokens(self) -> int:
        """Most generated tokens."""
        return int(self.tables.cfg["max_out"][0])

    def remote(self, level: int, activations: np.ndarray) -> np.ndarray:
        """Remote set bool ``(L, K)`` of a value of the first action, by ``(L, K)`` activations."""
        return least_used(activations, int(self.levels[level]))

    def plan(self, prompt: int, n_in: int, action: np.ndarray) -> Plan:
        """The plan that an action means for a request of ``n_in`` tokens of a prompt."""
        level, order, w = (int(x) for x in action[:3])
        y, z = action[3:4], action[4:5]
        if self.granularity == "per_layer":
            y, z = np.split(np.asarray(action[3:]), 2)
        predicted = self.predicted[prompt].astype(np.float64)
        return make_plan(
            self.system,
            self.remote(level, self.shared if order else predicted),
            n_in * self.system.top_k * predicted,
            self.max_output_tokens,
            main_headroom_mb=float(self.w_headroom_mb[w]),
            remote_headroom_mb=np.broadcast_to(self.y_headroom_mb[y], self.system.moe_layers),
            extra_replicas=np.broadcast_to(self.z_headroom[z], self.system.moe_layers),
        )


def predict(activations: Any, predictor: Any = "task_mean") -> np.ndarray:
    """Predicted activation matrices of all prompts, fitted on the training prompts alone.

    Args:
        activations: P prompts.
        predictor: ``task_mean`` (mean of the training prompts of the same task, which the caller
            is assumed to tell), ``global_mean``, ``nearest`` (mean of the 15 training prompts
            nearest by the cosine of their embeddings, the prompt itself left out), an array
            ``(P, L, K)``, or a callable that gives one for ``activations``.

    Returns:
        float32 ``(P, L, K)``; each row sums to 1.

    Raises:
        ValueError: an unknown name, or a table of wrong shape or with rows that are no frequencies.
    """
    frequencies = activations.frequencies()
    train = activations.rows("train")
    if callable(predictor) or isinstance(predictor, np.ndarray):
        table = np.asarray(predictor(activations) if callable(predictor) else predictor)
        if table.shape != frequencies.shape:
            raise ValueError(
                f"predictor gives a table of shape {table.shape}; it must be {frequencies.shape}."
            )
        table = table.astype(np.float64)
        sums = table.sum(axis=2)
        if not np.isfinite(table).all() or (table < 0).any() or (abs(sums - 1.0) > 1e-3).any():
            raise ValueError(
                "predictor gives rows that are no frequencies: they must be finite, at least 0 "
                f"and sum to 1 (sums are between {sums.min():g} and {sums.max():g})."
            )
        return (table / sums[..., None]).astype(np.float32)
    choose("predictor", predictor, PREDICTORS)
    mean = frequencies[train].mean(axis=0)
    if predictor == "nearest":
        if "output" not in activations.embeddings:
            raise ValueError(
                f"predictor='nearest' needs embeddings, which {activations.name!r} has not; "
                "take 'task_mean' or 'global_mean'."
            )
        vectors = np.asarray(activations.embeddings["output"], dtype=np.float64)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        near = vectors @ vectors[train].T
        near[train, np.arange(len(train))] = -np.inf
        count = min(NEIGHBOURS, max(len(train) - 1, 1))
        best = np.argsort(-near, axis=1, kind="stable")[:, :count]
        return frequencies[train][best].mean(axis=1).astype(np.float32)
    table = np.broadcast_to(mean, frequencies.shape).copy()
    if predictor == "task_mean":
        for task in range(len(activations.tasks)):
            known = train[activations.task[train] == task]
            if len(known):
                table[activations.task == task] = frequencies[known].mean(axis=0)
    return table.astype(np.float32)


def _length(argument: str, given: Any, cap: int) -> np.ndarray:
    if isinstance(given, str):
        return length_quantiles(choose(argument, given, ("azure",)), argument, cap)
    return np.array([float(whole(argument, given, 1, 100_000))])


def _pairs(argument: str, given: Any, what: str) -> list[tuple[float, float]]:
    ok = isinstance(given, (list, tuple)) and len(given) > 0
    if not ok or any(not isinstance(x, (list, tuple)) or len(x) != 2 for x in given):
        raise ValueError(f"{argument}={given!r} must be a list of pairs ({what}).")
    found = []
    for x in given:
        first, second = (real(argument, v, 0.0, open_low=True) for v in x)
        found.append((first, second))
    return found


def _steps(argument: str, given: Any, high: float) -> np.ndarray:
    ok = isinstance(given, (list, tuple)) and 0 < len(given) <= 64
    if not ok or given[0] != 0 or any(b <= a for a, b in zip(given, given[1:], strict=False)):
        raise ValueError(f"{argument}={given!r} must be increasing numbers that begin with 0.")
    return np.array([real(argument, x, 0.0, high) for x in given])


def _flag(argument: str, given: Any) -> bool:
    if not isinstance(given, (bool, np.bool_)):
        raise ValueError(f"{argument}={given!r} must be True or False.")
    return bool(given)


def best_ttft_s(system: SystemModel, n_in: int, cold: bool) -> float:
    """Bound on the TTFT of every plan, in seconds: prefill on the GPU and, if cold, a start."""
    start = system.container_start_main_s + system.all_non_expert_mb / system.load_mb_s
    swaps = 2.0 * system.moe_layers * system.swap_s(n_in)
    return system.layers * system.gpu_layer_s(n_in) + swaps + (start if cold else 0.0)


def best_tpot_s(system: SystemModel) -> float:
    """Bound on the TPOT of every plan, in seconds: the fastest functions and no overhead."""
    one = float(system.expert_cpu_s(system.main_specs_mb[-1], 1))
    far = float(system.expert_cpu_s(system.remote_specs_mb[-1], 1))
    far += 2.0 * system.token_mb / system.bandwidth_mb_s
    k = system.top_k
    layer = min(max((k - r) * one, r * far) for r in range(k + 1))
    swaps = 2.0 * system.swap_s(k)
    return system.layers * system.gpu_layer_s(1) + system.moe_layers * (layer + swaps)


def _check_slo(system: SystemModel, slo: np.ndarray, n_in: int, cold: bool) -> None:
    for i, (ttft, tpot) in enumerate(slo):
        for name, limit, best in (
            ("TTFT", ttft, best_ttft_s(system, n_in, cold)),
            ("TPOT", tpot, best_tpot_s(system)),
        ):
            if limit < best:
                raise ValueError(
                    f"slo[{i}]: no plan can meet a {name} of {limit:g} s; the best achievable is "
                    f"{best:.4g} s."
                )


def _tables(
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
    ids = np.nonzero(bits)[2].reshape(len(bank), layers, system.top_k).astype(np.uint8)
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
        ids=ids,
        bank_start=np.array(activations.bank_start, dtype=np.int64),
        sums=np.concatenate(sums),
        sums_start=np.asarray(starts, dtype=np.int64),
    )


def _load(model: Any, activations: Any) -> Any:
    from servegym.envs.workloads import activations as source

    if activations is not None:
        if not isinstance(activations, source.Activations):
            raise ValueError(
                f"activations={activations!r} must be an Activations object or None, which loads "
                "those of the model."
            )
        return activations
    names = ["toy", *source.list_models()]
    if choose("model", model, names) == "toy":
        return source.make_toy_activations()
    return source.load_activations(model)


def build_problem(
    *,
    view: int,
    model: str = "deepseek-v2-lite",
    preset: str = "dynamic",
    gpu: str = "eager",
    split: str = "train",
    granularity: str = "global",
    predictor: Any = "task_mean",
    activations: Any = None,
    episode_requests: int = 200,
    levels: int | None = None,
    w_headroom_mb: Sequence[float] = (0, 500, 1000, 2000, 4000, 8000),
    y_headroom_mb: Sequence[float] = (0, 200, 400, 800, 1200, 1600, 2400),
    z_headroom: Sequence[int] = (0, 1, 2, 3, 5, 7),
    penalty: float = 0.5,
    decode_invocation: str = "per_call",
    load_shared: bool = False,
    prompt_tokens: int | str | None = None,
    output_tokens: int | str | None = None,
    max_prompt_tokens: int = 1024,
    max_output_tokens: int = 400,
    output_error: float | None = None,
    idle_s: Sequence[Sequence[float]] | None = None,
    keep_alive_s: float | None = None,
    bill_cold_start: bool | None = None,
    slo: Sequence[Sequence[float]] | None = None,
    trem_s: Sequence[float] | None = None,
    trem_switch: float | None = None,
    trem_sigma: float | None = None,
    price_ratio: float = SERVING.price_ratio,
    price_cpu_usd_mb_s: float = SERVING.price_cpu_usd_mb_s,
    bandwidth_mb_s: float = SERVING.bandwidth_mb_s,
    load_mb_s: float = SERVING.load_mb_s,
    container_start_s: float = SERVING.container_start_s,
    z_max: int = SERVING.z_max,
    payload_mb: float = SERVING.payload_mb,
    main_specs_mb: Sequence[float] | None = None,
    remote_specs_mb: Sequence[float] | None = None,
) -> Problem:
    """Check every argument of a serverless environment and build its problem.

    The arguments are those of :class:`~servegym.envs.serverless_moe.env.ServerlessMoEEnv`;
    ``view`` is the kind of observation (``kernel.DICT`` or ``kernel.FLAT``).

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    arguments = {k: v for k, v in locals().items() if k != "view"}
    settings = PRESETS[choose("preset", preset, PRESETS)]

    def setting(name: str) -> Any:
        given = arguments[name]
        return settings[name] if given is None else given

    choose("split", split, ("train", "val", "eval", "all"))
    choose("granularity", granularity, GRANULARITIES)
    choose("decode_invocation", decode_invocation, DECODE_INVOCATIONS)
    most_in = whole("max_prompt_tokens", max_prompt_tokens, 1, 100_000)
    most_out = whole("max_output_tokens", max_output_tokens, 1, 100_000)
    lengths = (
        _length("prompt_tokens", setting("prompt_tokens"), most_in),
        _length("output_tokens", setting("output_tokens"), most_out),
    )
    longest = [int(law[-1]) for law in lengths]
    book = _load(model, activations)
    system = build_system(
        book.model,
        gpu,
        price_ratio=price_ratio,
        price_cpu_usd_mb_s=price_cpu_usd_mb_s,
        bandwidth_mb_s=bandwidth_mb_s,
        load_mb_s=load_mb_s,
        container_start_s=container_start_s,
        z_max=z_max,
        payload_mb=payload_mb,
        main_specs_mb=main_specs_mb,
        remote_specs_mb=remote_specs_mb,
        max_output_tokens=longest[1],
    )
    layers, experts = system.moe_layers, system.num_experts
    count = min(experts, 16) + 1 if levels is None else whole("levels", levels, 2, experts + 1)
    members = np.unique([remote_count(i / (count - 1), experts) for i in range(count)])
    headroom = (
        _steps("w_headroom_mb", w_headroom_mb, 1e7),
        _steps("y_headroom_mb", y_headroom_mb, 1e7),
        _steps("z_headroom", z_headroom, 64),
    )
    if (headroom[2] % 1 != 0).any():
        raise ValueError(f"z_headroom={z_headroom!r} must be whole numbers of replicas.")
    copies = layers if granularity == "per_layer" else 1
    nvec = np.array(
        [len(members), 2, len(headroom[0])]
        + [len(headroom[1])] * copies
        + [len(headroom[2])] * copies,
        dtype=np.int64,
    )
    keep_alive = real("keep_alive_s", setting("keep_alive_s"), 0.0)
    limits = np.array(_pairs("slo", setting("slo"), "TTFT s, TPOT s"))
    _check_slo(system, limits, int(lengths[0][0]), keep_alive == 0.0)
    idle = _pairs("idle_s", setting("idle_s"), "probability, mean s")
    if abs(sum(p for p, _ in idle) - 1.0) > 1e-6:
        raise ValueError(f"idle_s={setting('idle_s')!r}: the probabilities must sum to 1.")
    overheads = setting("trem_s")
    if not isinstance(overheads, (list, tuple)) or not overheads:
        raise ValueError(f"trem_s={overheads!r} must be a list of seconds, one a regime.")
    overheads = np.array([real("trem_s", x, 0.0, open_low=True) for x in overheads])

    cfg = np.zeros(1, dtype=kernel.CONFIG)
    c = cfg[0]
    c["layers"], c["experts"], c["top_k"] = layers, experts, system.top_k
    c["blocks"], c["levels"], c["width"] = system.layers, len(members), int(nvec.sum())
    c["main_specs"] = len(system.main_specs_mb)
    c["remote_specs"] = len(system.remote_specs_mb)
    c["z_max"] = system.z_max
    c["requests"] = whole("episode_requests", episode_requests, 1, 1_000_000)
    c["per_layer"] = granularity == "per_layer"
    c["per_call"] = decode_invocation == "per_call"
    c["bill"] = _flag("bill_cold_start", setting("bill_cold_start"))
    c["shared"] = _flag("load_shared", load_shared)
    c["flat_view"], c["max_in"], c["max_out"] = view, *longest
    c["gpu_base"], c["gpu_token"] = system.gpu_layer_base_s, system.gpu_layer_token_s
    c["swap_base"], c["swap_rate"] = system.swap_base_s, system.swap_mb_s
    c["token_mb"], c["bandwidth"] = system.token_mb, system.bandwidth_mb_s
    c["price_cpu"], c["price_gpu"] = system.price_cpu, system.price_gpu
    c["gpu_per_token"] = system.token_mb + system.kv_mb_per_token.sum()
    c["non_expert"] = system.all_non_expert_mb
    c["gpu_fixed"] = system.all_non_expert_mb + system.mem_pre_post_mb + system.runtime_gpu_mb
    c["runtime_cpu"], c["load"] = system.runtime_cpu_mb, system.load_mb_s
    c["start_main"] = system.container_start_main_s
    c["start_remote"] = system.container_start_remote_s
    c["payload"], c["keep_alive"] = system.payload_mb, keep_alive
    c["penalty"] = real("penalty", penalty, 0.0, 1e6)
    c["expert_total"], c["largest_expert"] = system.all_experts_mb, system.expert_mb.max()

    predicted = predict(book, predictor)
    shared = book.frequencies()[book.rows("train")].mean(axis=0)
    rows = np.asarray(book.rows(split), dtype=np.int64)
    if len(rows) == 0:
        raise ValueError(f"split={split!r}: activations {book.name!r} have no prompt there.")
    return Problem(
        system=system,
        activations=book,
        rows=rows,
        predicted=predicted,
        shared=shared,
        levels=members,
        w_headroom_mb=headroom[0],
        y_headroom_mb=headroom[1],
        z_headroom=headroom[2].astype(np.int64),
        nvec=nvec,
        tables=_tables(system, book, predicted, shared, members, headroom, cfg),
        lengths=lengths,
        output_error=real("output_error", setting("output_error"), 0.0, 10.0),
        idle_s=tuple(idle),
        slo=limits,
        trem_s=overheads,
        trem_switch=real("trem_switch", setting("trem_switch"), 0.0, 1.0),
        trem_sigma=real("trem_sigma", setting("trem_sigma"), 0.0, 10.0),
        arguments=arguments,
    )
