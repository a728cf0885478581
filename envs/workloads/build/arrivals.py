"""Fit the arrival presets to BurstGPT and Azure; writes ``data/arrivals.json``.

    SERVEGYM_DATA=FOLDER python -m servegym.envs.workloads.build.arrivals

All fits are in units of the trace's mean gap, with fixed seeds: gamma by the CV of the gaps, mmpp
by maximum likelihood, modulated by `fit_burstgpt` and `fit_azure`. Their index of dispersion at a
window w is the variance over the mean of the counts in windows of w. The model's side is the median
over so many simulated traces of the same length that their noise is below what parameters differ
by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import gammaincinv, ndtr

from servegym._command_line import run_main
from servegym._files import csv_rows
from servegym.envs.workloads.arrivals import (
    Arrivals,
    GammaArrivals,
    MMPPArrivals,
    ModulatedArrivals,
)
from servegym.envs.workloads.build import measured_data, write_made
from servegym.envs.workloads.build.lengths import TRACES
from servegym.envs.workloads.files import DATA_DIR
from servegym.envs.workloads.traces import load_trace

AZURE, ABOUT_AZURE = TRACES["azure"]
BURSTGPT_WINDOWS = (1, 2, 5, 10, 20, 50)
AZURE_WINDOWS = (1, 5, 10, 50, 150, 300, 600)
AZURE_BLOCK_S = 5.0
BURSTGPT_TRACES, AZURE_TRACES = 600, 48
"""Simulated traces that a loss looks at."""


def burstiness(times: np.ndarray, windows: Sequence[float]) -> np.ndarray:
    """CV of the gaps, and index of dispersion of the counts in each window of so many mean gaps."""
    gaps = np.diff(times)
    mean = gaps.mean()
    values = [gaps.std() / mean]
    for window in windows:
        edges = np.arange(times[0], times[-1] + 1e-9, window * mean)
        counts = np.histogram(times, edges)[0]
        values.append(counts.var() / counts.mean())
    return np.array(values)


def hourly_shape(rates: np.ndarray) -> np.ndarray:
    """CV and lag-one autocorrelation within days of hourly rates (days, 24).

    Each day's rates are scaled to mean one, and pooled.
    """
    off = rates / rates.mean(axis=1, keepdims=True) - 1
    return np.array([np.sqrt(np.mean(off**2)), np.sum(off[:, 1:] * off[:, :-1]) / np.sum(off**2)])


def simulated(
    process: Arrivals, n: int, windows: Sequence[float], repeats: int, seed: int
) -> np.ndarray:
    """:func:`burstiness` of simulated traces of ``n`` requests: float64 (repeats, ...)."""
    rng = np.random.default_rng(seed)
    return np.array([burstiness(process.sample(n, rng, 1.0), windows) for _ in range(repeats)])


def mmpp_log_likelihood(gaps: np.ndarray, process: MMPPArrivals) -> float:
    """Log likelihood of gaps (of mean about one) under a two-state MMPP of mean rate one.

    The density of the gaps is  p  prod_k exp((Q - L) g_k) L  1  with p the state law just after an
    arrival. The product is taken pairwise, so that it is a few array operations.
    """
    share, ratio = process.busy_share, process.rate_ratio
    calm = 1 / (1 - share + share * ratio)
    rates = np.array([calm, calm * ratio])
    leave = 1 / (np.array([1 - share, share]) * process.cycle_requests)
    generator = np.array([[-leave[0], leave[0]], [leave[1], -leave[1]]]) - np.diag(rates)
    values, vectors = np.linalg.eig(generator)
    decay = np.exp(values * gaps[:, None])
    product = np.einsum("ij,kj,jl->kil", vectors, decay, np.linalg.inv(vectors)) * rates
    total = 0.0
    while len(product) > 1:
        if len(product) % 2:
            product = np.concatenate([product, np.eye(2)[None]])
        product = product[0::2] @ product[1::2]
        scale = np.maximum(product.sum(axis=(1, 2)), 1e-300)
        total += np.log(scale).sum()
        product /= scale[:, None, None]
    start = np.array([1 - share * rates[1], share * rates[1]])
    return float(total + np.log(max((start @ product[0]).sum(), 1e-300)))


def _minimise(loss: Callable[[np.ndarray], float], *starts: Sequence[float]) -> np.ndarray:
    """The least point that Nelder-Mead finds from several starts, and once more from their ends."""
    found = []
    for start in starts:
        point = np.asarray(start, dtype=float)
        for _ in range(2):
            # The default's steps, 5 % of a coordinate or .00025 of a zero, may already meet xatol.
            simplex = np.vstack([point, point + 0.5 * np.eye(point.size)])
            options = {"xatol": 1e-3, "fatol": 1e-5, "maxiter": 400, "initial_simplex": simplex}
            point = minimize(loss, point, method="Nelder-Mead", options=options).x
        found.append(point)
    return min(found, key=loss)


def _logistic(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def fit_mmpp(gaps: np.ndarray) -> dict[str, float]:
    """Maximum-likelihood MMPP of gaps scaled to mean one; the best of three starts."""

    def process(x: np.ndarray) -> MMPPArrivals:
        x = np.clip(x, -12, 12)
        return MMPPArrivals(1 + float(np.exp(x[0])), _logistic(x[1]), float(np.exp(x[2])))

    def loss(x: np.ndarray) -> float:
        return -mmpp_log_likelihood(gaps, process(x)) / len(gaps)

    return asdict(process(_minimise(loss, [1.0, -1.0, 3.0], [3.0, -2.0, 5.0], [-1.0, 0.0, 6.0])))


def model_hourly_shape(rate_cv: float, rho: float, days: int) -> np.ndarray:
    """:func:`hourly_shape` of simulated rates, mean of 20 traces of ``days``: float64 (2,)."""
    levels = np.random.default_rng(2).standard_normal((20, 24 * days))
    levels[:, 1:] *= np.sqrt(1 - rho**2)
    for k in range(1, levels.shape[1]):
        levels[:, k] += rho * levels[:, k - 1]
    rates = gammaincinv(rate_cv**-2, ndtr(levels)) + 1e-9  # a day may have no requests at all
    return np.mean([hourly_shape(trace.reshape(-1, 24)) for trace in rates], axis=0)


def fit_burstgpt(times: np.ndarray, hourly: np.ndarray) -> dict[str, float]:
    """Parameters of the modulated model for BurstGPT, of times in s after the start of an hour.

    A block is one hour at the mean rate of the rows; ``cv`` is that of the gaps within hours, each
    hour's scaled to mean one; ``rate_cv`` and ``rho`` minimise the squared log errors of
    `burstiness` and of the CV of `hourly_shape`, and the squared error of its autocorrelation.
    """
    gaps, hours = np.diff(times), (times // 3600).astype(int)
    same = hours[1:] == hours[:-1]
    scaled = []
    for hour in np.unique(hours):
        inside = gaps[same & (hours[1:] == hour)]
        if len(inside) >= 5:
            scaled.append(inside / inside.mean())
    cv = float(np.concatenate(scaled).std())
    block = 3600 / gaps.mean()
    measured, shape = burstiness(times, BURSTGPT_WINDOWS), hourly_shape(hourly)

    def loss(x: np.ndarray) -> float:
        rate_cv, rho = float(np.exp(x[0])), _logistic(x[1])
        process = ModulatedArrivals(cv, rate_cv, rho, block)
        model = np.median(
            simulated(process, len(times), BURSTGPT_WINDOWS, BURSTGPT_TRACES, 1), axis=0
        )
        model_shape = model_hourly_shape(rate_cv, rho, len(hourly))
        error = np.sum(np.log(model / measured) ** 2) + np.log(model_shape[0] / shape[0]) ** 2
        return float(error + (model_shape[1] - shape[1]) ** 2)

    x = _minimise(loss, [0.2, 0.0], [0.9, 1.0], [0.9, -1.0])
    return {"cv": cv, "rate_cv": np.exp(x[0]), "rho": _logistic(x[1]), "block_requests": block}


def fit_azure(times: np.ndarray) -> dict[str, float]:
    """Parameters of the modulated model for Azure by its `burstiness`; a block is five seconds."""
    measured = burstiness(times, AZURE_WINDOWS)
    block = AZURE_BLOCK_S / np.diff(times).mean()

    def loss(x: np.ndarray) -> float:
        process = ModulatedArrivals(np.exp(x[0]), np.exp(x[1]), _logistic(x[2]), block)
        model = np.median(simulated(process, len(times), AZURE_WINDOWS, AZURE_TRACES, 3), axis=0)
        return float(np.sum(np.log(model / measured) ** 2))

    x = _minimise(loss, [0.0, -1.4, 3.0], [-0.3, -0.7, 2.0])
    cv, rate_cv = np.exp(x[:2])
    return {"cv": cv, "rate_cv": rate_cv, "rho": _logistic(x[2]), "block_requests": block}


def read_hourly(path: Path) -> np.ndarray:
    """Requests per hour of the whole days with more than 100 an hour: float64 (days, 24)."""
    rows = csv_rows(path, ("hour_start_s", "requests"))
    counts = {int(row["hour_start_s"]) // 3600: float(row["requests"]) for _, row in rows}
    hours = range((max(counts) + 1) // 24 * 24)
    days = np.array([counts.get(hour, 0.0) for hour in hours]).reshape(-1, 24)
    return days[days.mean(axis=1) > 100]


def _entry(
    times: np.ndarray, windows: Sequence[float], modulated: dict[str, float], notes: dict[str, Any]
) -> dict[str, Any]:
    """One trace's part of the file: provenance, measured values, fits and their errors."""
    gaps = np.diff(times)
    measured = burstiness(times, windows)
    labels = ["cv", *(f"index_of_dispersion_{window}_mean_gaps" for window in windows)]
    fits: dict[str, tuple[Callable[..., Arrivals], dict[str, float]]] = {
        "gamma": (GammaArrivals, {"cv": float(measured[0])}),
        "mmpp": (MMPPArrivals, fit_mmpp(gaps / gaps.mean())),
        "modulated": (ModulatedArrivals, modulated),
    }
    repeats = max(40, min(400, 400_000 // len(times)))
    parameters, errors = {}, {}
    for name, (maker, values) in fits.items():
        parameters[name] = {key: float(f"{value:.5g}") for key, value in values.items()}
        runs = simulated(maker(**parameters[name]), len(times), windows, repeats, 4)
        low, middle, high = np.quantile(runs, (0.05, 0.5, 0.95), axis=0)
        errors[name] = {
            label: {
                "measured": float(f"{m:.4g}"),
                "model_median": float(f"{b:.4g}"),
                "model_5_95": [float(f"{a:.4g}"), float(f"{c:.4g}")],
            }
            for label, m, a, b, c in zip(labels, measured, low, middle, high, strict=True)
        }
    return {
        "kind": "fitted",
        **notes,
        "requests": len(times),
        "mean_gap_s": float(f"{gaps.mean():.6g}"),
        **parameters,
        "fit_error": errors,
    }


def main() -> None:
    """Write the fits."""
    rows = measured_data("burstgpt", "burstgpt_1_first500_reconstructed.csv")
    # The first row is 5 s after the hour; load_trace counts from the first row.
    burst = load_trace(rows).timestamps_s + 5.0
    hourly = read_hourly(measured_data("burstgpt", "burstgpt_1_hourly_requests.csv"))
    azure = load_trace(measured_data(AZURE)).timestamps_s
    shape = hourly_shape(hourly)
    modulated = fit_burstgpt(burst, hourly)
    model_shape = model_hourly_shape(modulated["rate_cv"], modulated["rho"], len(hourly))
    content = {
        "burstgpt": _entry(
            burst,
            BURSTGPT_WINDOWS,
            modulated,
            {
                "source": "BurstGPT: first 500 rows of BurstGPT_1.csv recovered from replay logs "
                "(liao4s/BurstGPT_test), hourly counts of its 61 days (perryz0/BurstGPT)",
                "commit": "a9d14bacf75c; 971d50577870",
                "licence": "BurstGPT data CC-BY-4.0",
                "hourly": {
                    "days": len(hourly),
                    "cv_within_days": float(f"{shape[0]:.4g}"),
                    "lag_one_autocorrelation_within_days": float(f"{shape[1]:.4g}"),
                    "model_cv_within_days": float(f"{model_shape[0]:.4g}"),
                    "model_lag_one_autocorrelation_within_days": float(f"{model_shape[1]:.4g}"),
                },
            },
        ),
        "azure": _entry(azure, AZURE_WINDOWS, fit_azure(azure), ABOUT_AZURE),
    }
    write_made(DATA_DIR / "arrivals.json", "arrivals", content)


if __name__ == "__main__":
    run_main(main)
