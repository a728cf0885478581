"""What the fits share: thinning, monotone fits, held-out rows, errors, the linear estimator."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression, nnls

from servegym.hardware_profiles.fleet import served_models
from servegym.hardware_profiles.interpolation import interpolate
from servegym.hardware_profiles.law import Estimator, Profile
from servegym.hardware_profiles.load import unknown_name
from servegym.hardware_profiles.schema import read_json

# Times of growing work whose best non-falling fit explains less than this are no law.
EXPLAINED_FLOOR = 0.5

# Where the linear estimator is fitted: what a router with small running queues meets.
ESTIMATOR_MAX_SEQUENCES = 8
ESTIMATOR_MAX_PROMPT = 1024
ESTIMATOR_MAX_CONTEXT = 1500
# Stands in a draft until the estimator is fitted to its law.
NO_ESTIMATE = {f.name: 0.0 for f in fields(Estimator)}


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


def check_explains(values: np.ndarray, at: str) -> float:
    """Refuse times ``(G,)`` that the size of the work does not explain.

    Returns:
        R² of the best fit that never falls (:func:`isotonic_fit`).

    Raises:
        ValueError: if R² is below 0.5; ``at`` is the file and field.
    """
    values = np.asarray(values, float)
    total = float(np.sum((values - values.mean()) ** 2))
    left = float(np.sum((values - isotonic_fit(values)) ** 2))
    explained = 1.0 - left / total if total > 0.0 else 0.0
    if explained < EXPLAINED_FLOOR:
        raise ValueError(
            f"{at}: the size explains R² = {explained:.2f} of the times, below "
            f"{EXPLAINED_FLOOR}; times that do not grow with the work cannot be extrapolated: "
            "measure again, on an idle device, with more repeats and larger sizes"
        )
    return explained


def rounded(values: np.ndarray) -> Any:
    """The values with six significant digits, as (nested) lists."""
    return np.vectorize(lambda v: float(f"{v:.6g}"))(values).tolist()


def as_integers(values: np.ndarray) -> list[int]:
    """Whole numbers, as a list."""
    return [int(v) for v in values]


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
        present = ~missing[index]
        for j in np.flatnonzero(missing[index]):
            out[index][j] = interpolate(grid[present], values[index][present], grid[j])
    return out


def interpolate_without(
    grid: np.ndarray, values: np.ndarray, axis: int, at: float
) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate a table's entries at an inner point of an axis's grid from the others.

    Returns:
        The table with these entries interpolated, and which they are (bool).
    """
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


def fit_estimator(profile: Profile) -> tuple[dict[str, float], dict[str, Any]]:
    """Least-squares linear law over batches of 1 to 8, prompts to 1,024, contexts to 1,500.

    The constant and the decode terms come from decodes; the prefill slope is then fitted with
    that constant, as one constant serves both (Eq. 13 and 14 have none).

    Returns:
        The estimator's fields (seconds), and its relative errors against the profile's law.
    """
    batches = np.arange(1, ESTIMATOR_MAX_SEQUENCES + 1)
    contexts = np.arange(10, ESTIMATOR_MAX_CONTEXT + 1, 10)
    b, x = (a.ravel().astype(float) for a in np.meshgrid(batches, contexts, indexing="ij"))
    decode = np.array([profile.decode_s(n, n * c) for n, c in zip(b, x, strict=True)])
    design = np.column_stack([np.ones_like(b), b, b * x])
    scale = np.array([1.0, 1.0, 1e3])
    base, per_sequence, per_context = nnls(design / scale, decode)[0] / scale
    prompts = np.arange(1, ESTIMATOR_MAX_PROMPT + 1).astype(float)
    prefill = np.array([profile.prefill_s(p) for p in prompts])
    per_token = max(float(prompts @ (prefill - base) / (prompts @ prompts)), 0.0)
    fields = {
        "base_s": base,
        "prefill_s_per_token": per_token,
        "decode_s_per_context_token": per_context,
        "decode_s_per_sequence": per_sequence,
    }
    fields = {key: float(f"{value:.6g}") for key, value in fields.items()}
    guess = fields["base_s"] + fields["prefill_s_per_token"] * prompts
    coefficients = [
        fields[key] for key in ("base_s", "decode_s_per_sequence", "decode_s_per_context_token")
    ]
    errors = {
        "prefill": error_quantiles(guess / prefill - 1.0),
        "decode": error_quantiles(design @ np.array(coefficients) / decode - 1.0),
    }
    return fields, errors


def model_facts(name_or_path: str) -> dict[str, Any]:
    """Memory facts of a model: by its name in ``served-models.json``, or from a JSON file.

    Args:
        name_or_path: the name, or the path of a JSON file with the same fields.

    Raises:
        ValueError: for an unknown name (the nearest valid one is given).
    """
    if name_or_path.endswith(".json"):
        return read_json(name_or_path)
    models = served_models()
    if name_or_path not in models:
        raise ValueError(unknown_name("model", name_or_path, list(models)))
    return models[name_or_path]
