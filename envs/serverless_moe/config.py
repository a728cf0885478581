"""Checked arguments of the serverless MoE environments, turned into a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servegym._checks import choose, whole
from servegym.envs.serverless_moe.arguments import (
    DEFAULT_MODEL,
    MAX_PROMPT_TOKENS,
    PRESETS,
    ServerlessArguments,
)
from servegym.envs.serverless_moe.kernel import layout
from servegym.envs.serverless_moe.system import (
    SystemModel,
    best_ttft_s,
    build_system,
    check_slo,
    local_tpot_s,
    system_of,
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

PREDICTORS = ("task_mean", "global_mean", "nearest")
NEIGHBOURS = 15


def slo_classes(model: MoeModel, **grids: Any) -> tuple[tuple[float, float], ...]:
    """(TTFT s, TPOT s) of each SLO class of a model in the preset ``dynamic``.

    They are the same multiples of what the model can reach as the default model's classes are of
    what that one can: of the best TTFT, cold and at the mean prompt length (`best_ttft_s`), and of
    the TPOT with all experts local (`local_tpot_s`), which no overhead spoils. Constants are the
    default ones, limits have two digits. An SLO that one model meets with ease another cannot meet
    at all.
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
        arguments: what ``gymnasium.make`` was given and the preset's for the rest.
        system: constants of the model and its functions.
        activations: the prompts and their recorded tokens.
        rows: int64 indexes of the prompts that episodes draw from.
        predicted: float32 ``(P, L, K)`` predicted activation matrix of every prompt.
        shared: float64 ``(L, K)`` mean activations of the training prompts, the shared order's.
        nvec: int64 values of each part of an action.
        tables: arrays of the kernel.
        lengths: laws of prompt and output tokens: 21 quantiles, or one number.
        slo: (TTFT s, TPOT s) of each class.
    """

    arguments: ServerlessArguments
    system: SystemModel
    activations: Any
    rows: np.ndarray
    predicted: np.ndarray
    shared: np.ndarray
    nvec: np.ndarray
    tables: layout.Tables
    lengths: tuple[np.ndarray, np.ndarray]
    slo: np.ndarray

    @property
    def max_output_tokens(self) -> int:
        """Most generated tokens."""
        return int(self.lengths[1][-1])


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
            of_task = train[activations.task[train] == task]
            if len(of_task):
                table[activations.task == task] = frequencies[of_task].mean(axis=0)
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


def _model_of(name: Any, activations: Any) -> tuple[MoeModel, Activations | None]:
    """The model, and its activations if they are there already."""
    if activations is not None:
        if not isinstance(activations, Activations):
            raise ValueError(
                f"activations={activations!r} must be an Activations object or None, which loads "
                "those of the model."
            )
        if name not in (DEFAULT_MODEL, activations.model.name):
            raise ValueError(
                f"model={name!r} does not go with activations of {activations.model.name!r}; "
                "leave one of the two out."
            )
        return activations.model, activations
    if choose("model", name, ["toy", *list_models()]) == "toy":
        toy = make_toy_activations()
        return toy.model, toy
    return load_model(name), None


def _length_law(name: str, setting: int | str, cap: int) -> np.ndarray:
    return (
        length_quantiles(setting, name, cap)
        if isinstance(setting, str)
        else np.array([float(setting)])
    )


def _actions(
    system: SystemModel, arguments: ServerlessArguments
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """What the actions mean: remote experts by b; headroom of w, y and z; values of each action."""
    experts, levels = system.num_experts, arguments.levels
    count = min(experts, 16) + 1 if levels is None else whole("levels", levels, 2, experts + 1)
    remote_counts = np.unique(-(-np.arange(count) * experts // (count - 1)))  # ceil(b K)
    w, y, z = (
        np.array(steps, dtype=np.float64)
        for steps in (arguments.w_headroom_mb, arguments.y_headroom_mb, arguments.z_headroom)
    )
    copies = system.moe_layers if arguments.granularity == "per_layer" else 1
    nvec = [len(remote_counts), 2, len(w), *[len(y)] * copies, *[len(z)] * copies]
    nvec += [2] * arguments.keep_action
    return remote_counts, (w, y, z), np.array(nvec, dtype=np.int64)


def problem_of(arguments: ServerlessArguments) -> Problem:
    """The problem that checked arguments describe.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    model, recorded = _model_of(arguments.model, arguments.activations)
    lengths = (
        _length_law("prompt_tokens", arguments.prompt_tokens, arguments.max_prompt_tokens),
        _length_law("output_tokens", arguments.output_tokens, arguments.max_output_tokens),
    )
    system = replace(
        system_of(model, arguments, int(lengths[1][-1])),
        per_call=arguments.decode_invocation == "per_call",
        bill_cold_start=arguments.bill_cold_start,
        load_shared=arguments.load_shared,
    )
    remote_counts, headroom, nvec = _actions(system, arguments)
    classes = arguments.slo
    if classes is None:
        grids = ("main_specs_mb", "remote_specs_mb")
        classes = slo_classes(model, **{name: getattr(arguments, name) for name in grids})
    limits = np.array(classes)
    # Four sigma below the median: no request has so little overhead in every layer.
    least_overhead = float(min(arguments.trem_s) * np.exp(-4.0 * arguments.trem_sigma))
    always_cold = arguments.keep_alive_s == 0.0
    check_slo(system, limits, int(lengths[0][0]), always_cold, least_overhead)
    cfg = make_config(
        system,
        levels=len(remote_counts),
        width=int(nvec.sum()),
        requests=arguments.episode_requests,
        per_layer=arguments.granularity == "per_layer",
        keep_action=arguments.keep_action,
        keep_alive_s=arguments.keep_alive_s,
        penalty=arguments.penalty,
        flat_view=arguments.view,
        by_deployment=arguments.deployment != "plan",
        max_in=int(lengths[0][-1]),
        max_out=int(lengths[1][-1]),
    )
    # Every argument but the predictor is checked; the recordings take longest to read.
    recorded = recorded or load_activations(model.name)
    predicted = predict(recorded, arguments.predictor)
    shared = recorded.frequencies()[recorded.rows("train")].mean(axis=0)
    rows = np.asarray(recorded.rows(arguments.split), dtype=np.int64)
    if len(rows) == 0:
        raise ValueError(
            f"split={arguments.split!r}: activations {recorded.name!r} have no prompt there."
        )
    return Problem(
        arguments=arguments,
        system=system,
        activations=recorded,
        rows=rows,
        predicted=predicted,
        shared=shared,
        nvec=nvec,
        tables=make_tables(system, recorded, predicted, shared, remote_counts, headroom, cfg),
        lengths=lengths,
        slo=limits,
    )


def build_problem(*, view: int, **arguments: Any) -> Problem:
    """`problem_of` of arguments by name, as `ServerlessArguments` has them."""
    return problem_of(ServerlessArguments.fill(arguments, view))
