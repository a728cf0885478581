"""Arguments of the serverless MoE environments, checked and turned into a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servegym._checks import choose, flag, real, whole
from servegym.envs.serverless_moe import kernel
from servegym.envs.serverless_moe.outcomes import DECODE_INVOCATIONS
from servegym.envs.serverless_moe.sets import remote_count
from servegym.envs.serverless_moe.system import (
    SystemModel,
    best_ttft_s,
    build_system,
    check_slo,
    local_tpot_s,
)
from servegym.envs.serverless_moe.tables import make_config, make_tables
from servegym.envs.workloads.activations import (
    Activations,
    MoeModel,
    list_models,
    load_activations,
    load_model,
    make_toy_activations,
)
from servegym.envs.workloads.lengths import length_quantiles
from servegym.hardware_profiles.serverless import SERVING

__all__ = [
    "GRANULARITIES",
    "PREDICTORS",
    "PRESETS",
    "Problem",
    "build_problem",
    "build_system",
    "predict",
    "slo_classes",
]

DEFAULT_MODEL = "deepseek-v2-lite"
DEPLOYMENTS = ("plan", "cpu", "gpu", "fetch", "per_expert")
"""How requests are served: as the action plans, or by a deployment that takes no decision."""
GRANULARITIES = ("global", "per_layer")
PREDICTORS = ("task_mean", "global_mean", "nearest")
NEIGHBOURS = 15
MAX_PROMPT_TOKENS = 1024

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
"""What the two presets set; every entry is an argument of its own, too. The limits of ``dynamic``
are those of the default model; `slo_classes` has the other models'."""


_SYSTEM_ARGUMENTS = (
    "price_ratio",
    "price_cpu_usd_mb_s",
    "bandwidth_mb_s",
    "load_mb_s",
    "container_start_s",
    "z_max",
    "payload_mb",
    "main_specs_mb",
    "remote_specs_mb",
    "fees",
)
"""Arguments of the environments that `build_system` takes as they are."""


def slo_classes(model: MoeModel, **grids: Any) -> tuple[tuple[float, float], ...]:
    """SLO classes of a model in the preset ``dynamic``.

    They are the same multiples of what the model can reach as the default model's classes are of
    what that one can: of the best TTFT, cold and at the mean prompt length (`best_ttft_s`), and of
    the TPOT with all experts local (`local_tpot_s`), which no overhead spoils. Constants are the
    default ones, limits have two digits. An SLO that one model meets with ease another cannot meet
    at all.

    Args:
        model: the model.
        **grids: ``main_specs_mb`` and ``remote_specs_mb`` if they are not the model's own.

    Returns:
        (TTFT s, TPOT s) of each class.
    """
    preset = PRESETS["dynamic"]
    if model.name == DEFAULT_MODEL:
        return preset["slo"]
    n_in = round(float(length_quantiles("azure", "prompt_tokens", MAX_PROMPT_TOKENS).mean()))
    reachable, default = (
        (best_ttft_s(system, n_in, True), local_tpot_s(system))
        for system in (build_system(model, **grids), build_system(DEFAULT_MODEL))
    )
    scale = [a / b for a, b in zip(reachable, default, strict=True)]
    return tuple(
        (float(f"{ttft * scale[0]:.2g}"), float(f"{tpot * scale[1]:.2g}"))
        for ttft, tpot in preset["slo"]
    )


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
        nvec: int64 values of each part of an action.
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
    if callable(predictor) or isinstance(predictor, np.ndarray):
        table = np.asarray(predictor(activations) if callable(predictor) else predictor)
        return _normalised(table, activations.frequencies().shape)
    choose("predictor", predictor, PREDICTORS)
    if predictor == "nearest":
        return _nearest_mean(activations)
    frequencies = activations.frequencies()
    train = activations.rows("train")
    table = np.broadcast_to(frequencies[train].mean(axis=0), frequencies.shape).copy()
    if predictor == "task_mean":
        for task in range(len(activations.tasks)):
            known = train[activations.task[train] == task]
            if len(known):
                table[activations.task == task] = frequencies[known].mean(axis=0)
    return table.astype(np.float32)


def _normalised(table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A given table of predictions, checked and with rows that sum to 1."""
    if table.shape != shape:
        raise ValueError(f"predictor gives a table of shape {table.shape}; it must be {shape}.")
    table = table.astype(np.float64)
    sums = table.sum(axis=2)
    if not np.isfinite(table).all() or (table < 0).any() or (abs(sums - 1.0) > 1e-3).any():
        raise ValueError(
            "predictor gives rows that are no frequencies: they must be finite, at least 0 "
            f"and sum to 1 (sums are between {sums.min():g} and {sums.max():g})."
        )
    return (table / sums[..., None]).astype(np.float32)


def _nearest_mean(activations: Any) -> np.ndarray:
    """Mean of the nearest training prompts by the cosine of embeddings, the prompt left out."""
    if "output" not in activations.embeddings:
        raise ValueError(
            f"predictor='nearest' needs embeddings, which {activations.name!r} has not; "
            "take 'task_mean' or 'global_mean'."
        )
    train = activations.rows("train")
    vectors = np.asarray(activations.embeddings["output"], dtype=np.float64)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = vectors @ vectors[train].T
    near[train, np.arange(len(train))] = -np.inf
    count = min(NEIGHBOURS, max(len(train) - 1, 1))
    best = np.argsort(-near, axis=1, kind="stable")[:, :count]
    return activations.frequencies()[train][best].mean(axis=1).astype(np.float32)


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
    if not isinstance(given, (list, tuple)) or not 0 < len(given) <= 64:
        raise ValueError(f"{argument}={given!r} must be a list of 1 to 64 numbers.")
    found = np.array([real(argument, x, 0.0, high) for x in given])
    if found[0] != 0 or (np.diff(found) <= 0).any():
        raise ValueError(f"{argument}={given!r} must be increasing numbers that begin with 0.")
    return found


def _with_preset(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the preset's value where one of the preset's is None."""
    preset = PRESETS[choose("preset", arguments["preset"], PRESETS)]
    return arguments | {name: x for name, x in preset.items() if arguments[name] is None}


def _actions(
    system: SystemModel, values: dict[str, Any]
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """What the actions mean: remote experts by b; headroom of w, y and z; values of each action."""
    experts, levels = system.num_experts, values["levels"]
    count = min(experts, 16) + 1 if levels is None else whole("levels", levels, 2, experts + 1)
    remote_counts = np.unique([remote_count(i / (count - 1), experts) for i in range(count)])
    headroom = (
        _steps("w_headroom_mb", values["w_headroom_mb"], 1e7),
        _steps("y_headroom_mb", values["y_headroom_mb"], 1e7),
        _steps("z_headroom", values["z_headroom"], 64),
    )
    if (headroom[2] % 1 != 0).any():
        raise ValueError(f"z_headroom={values['z_headroom']!r} must be whole numbers of replicas.")
    copies = system.moe_layers if values["granularity"] == "per_layer" else 1
    nvec = [len(remote_counts), 2, len(headroom[0])]
    nvec += [len(headroom[1])] * copies + [len(headroom[2])] * copies
    nvec += [2] * flag("keep_action", values["keep_action"])
    return remote_counts, headroom, np.array(nvec, dtype=np.int64)


def _request_laws(values: dict[str, Any]) -> dict[str, Any]:
    """The laws that requests are drawn from, by the names of `Problem`'s attributes."""
    max_in = whole("max_prompt_tokens", values["max_prompt_tokens"], 1, 100_000)
    max_out = whole("max_output_tokens", values["max_output_tokens"], 1, 100_000)
    return {
        "lengths": (
            _length("prompt_tokens", values["prompt_tokens"], max_in),
            _length("output_tokens", values["output_tokens"], max_out),
        ),
        "output_error": real("output_error", values["output_error"], 0.0, 10.0),
        "idle_s": _idle_classes(values["idle_s"]),
        "trem_s": _overheads(values["trem_s"]),
        "trem_switch": real("trem_switch", values["trem_switch"], 0.0, 1.0),
        "trem_sigma": real("trem_sigma", values["trem_sigma"], 0.0, 10.0),
    }


def _idle_classes(given: Any) -> tuple[tuple[float, float], ...]:
    """(probability, mean in s) of each class of idle gap."""
    classes = _pairs("idle_s", given, "probability, mean s")
    if abs(sum(p for p, _ in classes) - 1.0) > 1e-6:
        raise ValueError(f"idle_s={given!r}: the probabilities must sum to 1.")
    return tuple(classes)


def _overheads(given: Any) -> np.ndarray:
    """Median invocation overhead of each regime, s."""
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(f"trem_s={given!r} must be a list of seconds, one a regime.")
    return np.array([real("trem_s", x, 0.0, open_low=True) for x in given])


def _model_of(model: Any, activations: Any) -> tuple[MoeModel, Activations | None]:
    """The model, and its activations if they are there already."""
    if activations is not None:
        if not isinstance(activations, Activations):
            raise ValueError(
                f"activations={activations!r} must be an Activations object or None, which loads "
                "those of the model."
            )
        if model not in (DEFAULT_MODEL, activations.model.name):
            raise ValueError(
                f"model={model!r} does not go with activations of {activations.model.name!r}; "
                "leave one of the two out."
            )
        return activations.model, activations
    if choose("model", model, ["toy", *list_models()]) == "toy":
        toy = make_toy_activations()
        return toy.model, toy
    return load_model(model), None


def _slo_limits(system: SystemModel, values: dict[str, Any], laws: dict[str, Any]) -> np.ndarray:
    """TTFT and TPOT of each SLO class in seconds, ``(C, 2)``, that some plan can meet."""
    limits = np.array(_pairs("slo", values["slo"], "TTFT s, TPOT s"))
    always_cold = real("keep_alive_s", values["keep_alive_s"], 0.0) == 0.0
    # Four sigma below the median: no request has so little in every layer.
    least_overhead = float(laws["trem_s"].min() * np.exp(-4.0 * laws["trem_sigma"]))
    check_slo(system, limits, int(laws["lengths"][0][0]), always_cold, least_overhead)
    return limits


def _config(
    system: SystemModel,
    values: dict[str, Any],
    laws: dict[str, Any],
    remote_counts: np.ndarray,
    nvec: np.ndarray,
    view: int,
) -> np.ndarray:
    """The numbers that the kernel reads, ``(1,)`` :data:`kernel.CONFIG`."""
    prompt_law, output_law = laws["lengths"]
    return make_config(
        system,
        levels=len(remote_counts),
        width=int(nvec.sum()),
        requests=whole("episode_requests", values["episode_requests"], 1, 1_000_000),
        per_layer=values["granularity"] == "per_layer",
        keep_action=values["keep_action"],
        per_call=values["decode_invocation"] == "per_call",
        bill_cold_start=flag("bill_cold_start", values["bill_cold_start"]),
        load_shared=flag("load_shared", values["load_shared"]),
        flat_view=view,
        by_deployment=values["deployment"] != "plan",
        max_in=int(prompt_law[-1]),
        max_out=int(output_law[-1]),
        keep_alive_s=float(values["keep_alive_s"]),
        penalty=real("penalty", values["penalty"], 0.0, 1e6),
    )


def build_problem(
    *,
    view: int,
    model: str = DEFAULT_MODEL,
    preset: str = "dynamic",
    gpu: str = "eager",
    split: str = "train",
    granularity: str = "global",
    keep_action: bool | None = None,
    predictor: Any = "task_mean",
    activations: Any = None,
    episode_requests: int = 200,
    levels: int | None = None,
    w_headroom_mb: Sequence[float] = (0, 500, 1000, 2000, 4000, 8000),
    y_headroom_mb: Sequence[float] = (0, 200, 400, 800, 1200, 1600, 2400),
    z_headroom: Sequence[int] = (0, 1, 2, 3, 5, 7),
    penalty: float = 0.5,
    deployment: str = "plan",
    decode_invocation: str = "per_call",
    load_shared: bool = False,
    prompt_tokens: int | str | None = None,
    output_tokens: int | str | None = None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
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
    fees: str | Sequence[float] = "none",
) -> Problem:
    """Check every argument of a serverless environment and build its problem.

    The arguments are those of :class:`~servegym.envs.serverless_moe.env.ServerlessMoEEnv`;
    ``view`` is the kind of observation (``kernel.DICT`` or ``kernel.FLAT``).

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    if keep_action is None:
        keep_action = view == kernel.FLAT
    arguments = {k: v for k, v in locals().items() if k != "view"}
    values = _with_preset(arguments)
    choose("split", split, ("train", "val", "eval", "all"))
    choose("granularity", granularity, GRANULARITIES)
    choose("deployment", deployment, DEPLOYMENTS)
    choose("decode_invocation", decode_invocation, DECODE_INVOCATIONS)
    laws = _request_laws(values)
    moe_model, recorded = _model_of(model, activations)
    system = build_system(
        moe_model,
        gpu,
        max_output_tokens=int(laws["lengths"][1][-1]),
        **{name: values[name] for name in _SYSTEM_ARGUMENTS},
    )
    remote_counts, headroom, nvec = _actions(system, values)
    if slo is None and preset == "dynamic":
        grids = {"main_specs_mb": main_specs_mb, "remote_specs_mb": remote_specs_mb}
        values["slo"] = slo_classes(moe_model, **grids)
    limits = _slo_limits(system, values, laws)
    cfg = _config(system, values, laws, remote_counts, nvec, view)
    # Every argument but the predictor is checked; the recordings take longest to read.
    recorded = recorded or load_activations(moe_model.name)
    predicted = predict(recorded, predictor)
    shared = recorded.frequencies()[recorded.rows("train")].mean(axis=0)
    rows = np.asarray(recorded.rows(split), dtype=np.int64)
    if len(rows) == 0:
        raise ValueError(f"split={split!r}: activations {recorded.name!r} have no prompt there.")
    return Problem(
        system=system,
        activations=recorded,
        rows=rows,
        predicted=predicted,
        shared=shared,
        levels=remote_counts,
        w_headroom_mb=headroom[0],
        y_headroom_mb=headroom[1],
        z_headroom=headroom[2].astype(np.int64),
        nvec=nvec,
        tables=make_tables(system, recorded, predicted, shared, remote_counts, headroom, cfg),
        slo=limits,
        **laws,
        arguments=arguments,
    )
