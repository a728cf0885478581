"""What the fits share: thinning, monotone fits, held-out rows, errors, the linear estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression, linprog, nnls

from servegym._files import read_json
from servegym.hardware_profiles.fleet import served_models
from servegym.hardware_profiles.interpolation import along
from servegym.hardware_profiles.law import Estimator, LawTables, Profile
from servegym.hardware_profiles.load import unknown_name
from servegym.hardware_profiles.schema import ESTIMATOR_FIELDS, FORMAT

# Times of growing work whose best non-falling fit explains less than this are no law.
EXPLAINED_FLOOR = 0.5

# Where the linear estimator is fitted: what a router with small running queues meets.
ESTIMATOR_MAX_SEQUENCES = 8
ESTIMATOR_MAX_PROMPT = 1024
ESTIMATOR_MAX_CONTEXT = 1500
# And of experts, whose reading fills up with the batch; shares of them by that of even routing.
EXPERT_BATCHES = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])
EXPERT_SHARES = np.geomspace(0.35, 2.0, 13)
_FEW_PROMPTS = np.unique(np.geomspace(1, ESTIMATOR_MAX_PROMPT, 40).astype(int)) - 1


def thin(grid: np.ndarray, values: np.ndarray, tolerance: float) -> np.ndarray:
    """Indexes of the points that remain so that linear interpolation stays within ``tolerance``.

    The grid ``(G,)`` increases and the values ``(G,)`` are positive; the tolerance is the largest
    relative error at a point that is dropped. The first and the last point always stay.
    """
    points = [0, len(grid) - 1]
    while True:
        error = np.abs(np.interp(grid, grid[points], values[points]) / values - 1.0)
        worst = int(np.argmax(error))
        if error[worst] <= tolerance:
            return np.array(points)
        points = sorted({*points, worst})


def isotonic_fit(values: np.ndarray) -> np.ndarray:
    """Least-squares fit ``(G,)`` of ``values`` that never falls.

    A product of more rows never takes less work, so a fall is scatter of the timing.
    """
    return isotonic_regression(values).x


def check_explains(values: np.ndarray, at: str) -> None:
    """Refuse times ``(G,)`` of which :func:`isotonic_fit` explains less than half.

    ``at`` is the file and field, for the message.
    """
    total = float(np.sum((values - values.mean()) ** 2))
    left = float(np.sum((values - isotonic_fit(values)) ** 2))
    explained = 1.0 - left / total if total > 0.0 else 0.0
    if explained < EXPLAINED_FLOOR:
        raise ValueError(
            f"{at}: the size explains R² = {explained:.2f} of the times, below "
            f"{EXPLAINED_FLOOR}; times that do not grow with the work cannot be extrapolated: "
            "measure again, on an idle device, with more repeats and larger sizes"
        )


def rounded(values: np.ndarray) -> Any:
    """The values with six significant digits, as (nested) lists."""
    return np.vectorize(lambda v: float(f"{v:.6g}"))(values).tolist()


def as_integers(values: np.ndarray) -> list[int]:
    """Whole numbers, as a list."""
    return [int(v) for v in values]


def tabulate(tables: Mapping[str, Any], tolerance: float | None = None) -> dict[str, Any]:
    """The ``law`` field of a profile: seconds with six significant digits, whole numbers.

    ``tolerance``: largest relative error of a point that is dropped (:func:`thin`); None keeps all.
    """
    law = dict(tables)
    for grid, values in (("dense_tokens", "dense_s"), ("head_sequences", "head_s")):
        if tolerance is not None:
            points = thin(law[grid], law[values], tolerance)
            law[grid], law[values] = law[grid][points], law[values][points]
    fields = {k: rounded(v) if k.endswith("_s") else as_integers(v) for k, v in law.items()}
    return {"kind": "tabulated", **fields}


def error_quantiles(error: np.ndarray, digits: int = 4) -> dict[str, float | int]:
    """Number of points, and median, 90th percentile and largest of the absolute relative errors."""
    size = np.abs(np.asarray(error, float)).ravel()
    median, p90, largest = np.quantile(size, [0.5, 0.9, 1.0])
    return {
        "points": int(size.size),
        "median": float(f"{median:.{digits}g}"),
        "p90": float(f"{p90:.{digits}g}"),
        "max": float(f"{largest:.{digits}g}"),
    }


def interpolate_missing(grid: np.ndarray, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Values at ``missing`` (bool, along the last axis) interpolated from the others."""
    out = values.copy()
    for index in np.ndindex(values.shape[:-1]):
        gone = missing[index]
        out[index][gone] = along(grid[~gone], values[index][~gone], grid[gone])
    return out


def interpolate_without(
    grid: np.ndarray, values: np.ndarray, axis: int, at: float
) -> tuple[np.ndarray, np.ndarray]:
    """A table with the entries at an inner point of an axis interpolated, and which they are."""
    gone = np.zeros(values.shape, bool)
    np.moveaxis(gone, axis, 0)[grid == at] = True
    moved = interpolate_missing(grid, np.moveaxis(values, axis, -1), np.moveaxis(gone, axis, -1))
    return np.moveaxis(moved, -1, axis), gone


def random_third(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A random third of the inner points of every row."""
    missing = np.zeros(shape, bool)
    for index in np.ndindex(shape[:-1]):
        inner = np.arange(1, shape[-1] - 1)
        missing[index][rng.choice(inner, max(len(inner) // 3, 1), replace=False)] = True
    return missing


def decode_errors(
    t: LawTables, rest: np.ndarray, rng: np.random.Generator, timed: Any = True
) -> dict[str, Any]:
    """Relative errors of decodes at entries of the table that are interpolated from the others.

    Attention is a small part of an iteration, so both errors are stated: of the kernel, and of the
    iteration with ``rest`` ``(G5,)``. ``rng`` chooses a third of the entries ``timed``.
    """
    axes, table = (t.decode_sequences, t.decode_context_tokens), t.decode_attention_s
    rest = rest[:, None]
    total = table + rest
    gone = random_third(table.shape, rng)
    guess = interpolate_missing(axes[1], table, gone)
    here = gone & timed
    out = {
        "decode_attention_random_third": error_quantiles((guess / table - 1.0)[here]),
        "decode_iteration_random_third": error_quantiles(((guess + rest) / total - 1.0)[here]),
    }
    for axis, target, label in ((0, 8, "batch"), (1, 1024, "context")):
        inner = axes[axis][1:-1]
        at = float(inner[np.argmin(np.abs(inner - target))])
        guess, gone = interpolate_without(axes[axis], table, axis, at)
        here = gone & timed
        if here.any():
            error = error_quantiles(((guess + rest) / total - 1.0)[here])
            out[f"decode_iteration_all_of_{label}_{at:g}"] = error
    return out


def fit_estimator(
    profile: Profile, expert_share: float = 0.0
) -> tuple[dict[str, float], dict[str, Any]]:
    """The linear law over prompts to 1,024 and contexts to 1,500, and its relative errors.

    Of a dense model least squares over batches of 1 to 8: the constant and the decode terms come
    from decodes; the prefill slope is then fitted with that constant, as one constant serves both
    (Eq. 13 and 14 have none). Of experts, whose reading grows with the batch until all are met, the
    least largest relative error over batches of 1 to 256 and prompts together; ``expert_share`` is
    what a token meets, 0 for that of the profile's estimator.
    """
    share = expert_share or profile.estimator.expert_share
    batches = EXPERT_BATCHES if share else np.arange(1, ESTIMATOR_MAX_SEQUENCES + 1)
    contexts = np.arange(10, ESTIMATOR_MAX_CONTEXT + 1, 100 if share else 10)
    b, x = (a.ravel().astype(float) for a in np.meshgrid(batches, contexts, indexing="ij"))
    decode = np.array([profile.decode_s(n, n * c) for n, c in zip(b, x, strict=True)])
    prompts = np.arange(1, ESTIMATOR_MAX_PROMPT + 1).astype(float)
    prefill = profile.prefill_s(prompts)
    if share:
        values = min(
            (_fit_experts(one, b, x, decode, prompts, prefill)
             for one in share * EXPERT_SHARES if one <= 1.0), key=lambda fit: fit[0]
        )[1]  # fmt: skip
    else:
        design = np.column_stack([np.ones_like(b), b, b * x])
        scale = np.array([1.0, 1.0, 1e3])
        base, per_sequence, per_context = nnls(design / scale, decode)[0] / scale
        slope = float(prompts @ (prefill - base) / (prompts @ prompts))
        values = dict(zip(ESTIMATOR_FIELDS, (base, max(slope, 0.0), per_context, per_sequence),
                          strict=True))  # fmt: skip
    values = {key: float(f"{value:.6g}") for key, value in values.items()}
    estimator = Estimator(**values)
    errors = {
        "prefill": error_quantiles(estimator.prefill_s(prompts) / prefill - 1.0),
        "decode": error_quantiles(estimator.decode_s(b, b * x) / decode - 1.0),
    }
    return values, errors


def estimated(
    data: dict[str, Any], errors: Callable[[Profile], Mapping[str, Any]], expert_share: float = 0
) -> Profile:
    """The profile of its file's fields, with the estimate of its law and its errors.

    ``estimator`` and ``fit_error`` are made here, the latter from ``errors`` of the law.
    """
    empty = {"format": FORMAT, "estimator": dict.fromkeys(ESTIMATOR_FIELDS, 0.0), "fit_error": {}}
    draft = Profile.from_dict(empty | data, data["name"])
    estimator, error = fit_estimator(draft, expert_share)
    spread = {**errors(draft), "linear_estimator_against_law": error}
    fitted = {"estimator": estimator, "fit_error": spread}
    return Profile.from_dict(empty | data | fitted, data["name"])


def measured_domain(t: LawTables) -> dict[str, int]:
    """The field ``domain`` of a profile whose tables were timed."""
    return {
        "max_decode_sequences": int(t.decode_sequences[-1]),
        "max_iteration_tokens": int(t.dense_tokens[-1]),
        "max_context_tokens": int(min(t.context_tokens[-1], t.decode_context_tokens[-1])),
    }


def _fit_experts(
    share: float,
    b: np.ndarray,
    x: np.ndarray,
    decode: np.ndarray,
    prompts: np.ndarray,
    prefill: np.ndarray,
) -> tuple[float, dict[str, float]]:
    """The largest relative error and the fields with this share of the experts a token."""
    met, none = 1.0 - (1.0 - share) ** b, np.zeros_like(b)
    rows = [np.column_stack([np.ones_like(b), none, b * x, b, met]) / decode[:, None]]
    none, met = np.zeros_like(prompts), 1.0 - (1.0 - share) ** prompts
    prompt_rows = np.column_stack([np.ones_like(prompts), prompts, none, none, met])
    rows.append(prompt_rows[_FEW_PROMPTS] / prefill[_FEW_PROMPTS, None])
    design = np.concatenate(rows)
    scale, one = design.max(axis=0), np.ones((len(design), 1))
    unequal = np.block([[design / scale, -one], [-design / scale, -one]])
    bounds = np.concatenate([one, -one])[:, 0]
    best = linprog(np.eye(6)[5], A_ub=unequal, b_ub=bounds).x
    fields_of = (*ESTIMATOR_FIELDS, "experts_s")
    values = dict(zip(fields_of, best[:5] / scale, strict=True)) | {"expert_share": share}
    return float(best[5]), values


def model_facts(name_or_path: str) -> dict[str, Any]:
    """Memory facts of a model: by its name in ``served-models.json``, or from a JSON file."""
    if name_or_path.endswith(".json"):
        return read_json(name_or_path)
    models = served_models()
    if name_or_path not in models:
        raise ValueError(unknown_name("model", name_or_path, list(models)))
    return models[name_or_path]
