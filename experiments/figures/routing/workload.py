"""What the router faces: answers of different models, interference, arrivals (Fig. 4, 5 and 8).

``python -m servegym.experiments.figures.routing.workload`` needs no trained router. With the data
folder (``SERVEGYM_DATA``) Fig. 8 shows the hourly requests of the published trace, too.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym.envs._command_line import run_main
from servegym.envs._files import measured_data
from servegym.envs.workloads import load_catalog, make_arrivals
from servegym.envs.workloads.errors import MalformedFileError
from servegym.experiments.evaluate import DEFAULT_SEED, make_envs
from servegym.experiments.figures.routing.common import (
    ENV_ID,
    Options,
    run_figures,
    save,
)
from servegym.experiments.figures.script import legend, pyplot, tidy
from servegym.experiments.output import print_table
from servegym.hardware_profiles import load_fleet

__all__ = ["first_request_latency", "main"]

MODULE = "servegym.experiments.figures.routing.workload"
HOURLY = ("burstgpt", "burstgpt_1_hourly_requests.csv")
EXPERTS = {"RTX 4090": "rtx4090-llama-3.1-8b", "paper-linear": "paper-linear-01"}
"""Single experts of Fig. 5."""
RATES = (0.5, 1.0, 2.0, 3.0)
CLOCK = 40.0
"""Arrivals a second that look at the expert; all but a share of them are dropped."""


def fig4(options: Options) -> None:
    """Distributions of scores and lengths of the default fleet's models."""
    catalog = load_catalog("alpaca_eval_7b")
    models = load_fleet("edge-6-heterogeneous").models[:6]
    columns = catalog.columns(list(models))
    rows, body = [], []
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    edges = {
        "score": np.linspace(0, 1, 21),
        "output_tokens": np.linspace(0, catalog.max_output_tokens, 21),
    }
    for model, column in zip(models, columns, strict=True):
        values = {
            "score": catalog.scores[:, column].astype(np.float64),
            "output_tokens": catalog.output_tokens[:, column].astype(np.float64),
        }
        cells = [model]
        for axis, (quantity, found) in zip(axes, values.items(), strict=True):
            grid = edges[quantity]
            share = np.histogram(np.clip(found, grid[0], grid[-1]), grid)[0] / len(found)
            axis.stairs(100 * share, grid, label=model, linewidth=1.5)
            rows += [
                {
                    "model": model,
                    "quantity": quantity,
                    "bin_low": round(low, 4),
                    "bin_high": round(high, 4),
                    "share": round(float(part), 6),
                }
                for low, high, part in zip(grid[:-1], grid[1:], share, strict=True)
            ]
            p10, p50, p90 = np.percentile(found, [10, 50, 90])
            cells += [f"{found.mean():.3g}", f"{p10:.3g}", f"{p50:.3g}", f"{p90:.3g}"]
        body.append(cells)
    axes[0].set(xlabel="score", ylabel="share of prompts, %")
    axes[1].set(xlabel="output tokens", ylabel="share of prompts, %")
    for axis in axes:
        tidy(axis)
    legend(figure, axes[0])
    parts = [f"{q} {s}" for q in ("score", "tokens") for s in ("mean", "P10", "P50", "P90")]
    title = f"fig4: {catalog.num_prompts} prompts of {catalog.name}, all splits"
    print_table(title, ["model", *parts], body)
    figure.suptitle(title.partition(": ")[2], fontsize=11)
    save(options, "fig4_distributions", rows, figure, "scores and lengths of the catalog itself")


def first_request_latency(
    profile: str, rate: float, episodes: int, seconds: float, seed: int = DEFAULT_SEED
) -> dict[str, np.ndarray]:
    """Latency per token so far of the first request of an idle expert, as others join it.

    The environment shows the expert at every arrival only. So arrivals come at a high rate and all
    but a random share are dropped: what is left is again Poisson, at the rate asked for.

    Args:
        profile: Latency profile of the expert.
        rate: Rate of the requests that are sent to it, requests/s, at most `CLOCK`.
        episodes: Episodes to average over.
        seconds: How long to follow the first request.
        seed: Seed of the first episode and of the thinning.

    Returns:
        ``age_s`` (K,) seconds since the first request arrived, ``latency_s_per_token`` (K,) mean
        over the episodes whose first request is still served, ``share`` (K,) of these.
    """
    ticks = int(CLOCK * seconds)
    envs = make_envs(
        ENV_ID,
        episodes,
        {
            "profiles": profile,
            "num_experts": 1,
            "rate": CLOCK,
            "split": "eval",
            "episode_requests": ticks,
            "running_capacity": 16,
            "waiting_capacity": 16,
        },
    )
    rng = np.random.default_rng(seed)
    observation, _ = envs.reset(seed=[seed + i for i in range(episodes)])
    first = observation["request"][:, 0].copy()  # prompt tokens, predicted score and length
    latency = np.full((episodes, ticks), np.nan)
    tokens, served = np.full(episodes, -1.0), np.ones(episodes, dtype=bool)
    for tick in range(ticks):
        action = (rng.random(episodes) < rate / CLOCK).astype(np.int64)
        if tick == 0:
            action[:] = 1
        else:
            head = observation["running"][:, 0, 0]
            is_first = (observation["running_mask"][:, 0, 0] != 0) & (head[:, :3] == first).all(-1)
            waits = (observation["waiting_mask"][:, 0, 0] != 0) & (tokens < 0)
            # Another request may look the same; the first one's tokens never go back.
            served &= (is_first & (head[:, 4] >= tokens)) | waits
            seen = served & is_first
            tokens[seen] = head[seen, 4]
            latency[seen, tick] = head[seen, 5]
        observation, _, ended, _, info = envs.step(action)
    log = [envs.unwrapped.request_log(row)["arrival_s"] for row in range(episodes)]
    envs.close()
    age = np.array(log) - np.array([arrivals[0] for arrivals in log])[:, None]
    grid = np.arange(0.05, seconds, 0.1)
    index = np.floor(age / 0.1).astype(int)
    keep = np.isfinite(latency) & (index < len(grid))
    total = np.bincount(index[keep], latency[keep], len(grid))
    count = np.bincount(index[keep], minlength=len(grid))
    alive = np.bincount(index[index < len(grid)], minlength=len(grid))
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "age_s": grid,
            "latency_s_per_token": total / count,
            "share": count / np.maximum(alive, 1),
        }


def fig5(options: Options) -> None:
    """Latency per token of the first request against time, by the rate at which others join it."""
    seconds, episodes = (2.0, 8) if options.quick else (6.0, max(options.episodes, 400))
    rows: list[dict[str, Any]] = []
    plt = pyplot()
    figure, axes = plt.subplots(1, len(EXPERTS), figsize=(11, 3.8), layout="constrained")
    for axis, (name, profile) in zip(axes, EXPERTS.items(), strict=True):
        for rate in RATES:
            found = first_request_latency(profile, rate, episodes, seconds)
            # A mean over the few requests that are served longest would be one over others.
            shown = found["share"] >= 0.3
            shown &= np.isfinite(found["latency_s_per_token"])
            axis.plot(
                found["age_s"][shown],
                1e3 * found["latency_s_per_token"][shown],
                label=f"{rate:g} requests/s",
            )
            rows += [
                {
                    "expert": name,
                    "rate": rate,
                    "age_s": round(float(t), 3),
                    "latency_ms_per_token": round(1e3 * float(value), 4),
                    "share_still_served": round(float(share), 4),
                }
                for t, value, share in zip(*(found[key][shown] for key in found), strict=True)
            ]
        axis.set(title=name, xlabel="seconds since the first request arrived")
        tidy(axis)
    axes[0].set(ylabel="its latency per token so far, ms")
    legend(figure, axes[0])
    note = (
        f"{episodes} episodes; one expert with 16 running slots; rates are those of the "
        "requests sent to it; shown while 30 % of the first requests are served"
    )
    save(options, "fig5_interference", rows, figure, note)


def _hourly(path: Path | None) -> np.ndarray | None:
    """Requests of every hour of the trace, requests/s, or None without the file."""
    if path is None or not path.exists():
        return None
    with open(path, newline="", encoding="utf-8") as stream:
        found = list(csv.DictReader(stream))
    try:
        hour = np.array([int(float(row["hour_start_s"])) // 3600 for row in found])
        counts = np.array([float(row["requests"]) for row in found])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedFileError(
            path, None, None, f"has no numbers hour_start_s, requests ({error})", "see its source"
        ) from error
    rates = np.zeros(int(hour.max()) + 1)
    np.add.at(rates, hour, counts / 3600)
    return rates


def fig8(options: Options) -> None:
    """Arrival intensity: the trace's hours, and one episode of each arrival process."""
    requests = 500 if options.quick else 5000
    hours = _hourly(measured_data(*HOURLY))
    rows: list[dict[str, Any]] = []
    plt = pyplot()
    panels = 3 if hours is not None else 2
    figure, axes = plt.subplots(1, panels, figsize=(4.6 * panels, 3.4), layout="constrained")
    if hours is not None:
        axes[0].plot(np.arange(len(hours)) / 24, hours, linewidth=0.8)
        axes[0].axhspan(4, 6, color="grey", alpha=0.3)
        axes[0].set(xlabel="day of the trace", ylabel="requests/s, by the hour", title="BurstGPT")
    for axis, kind in zip(axes[-2:], ("burstgpt", "poisson"), strict=True):
        times = make_arrivals(kind, 5.0).sample(requests, np.random.default_rng(DEFAULT_SEED))
        counts = np.histogram(times, np.arange(0, times[-1] + 10, 10.0))[0] / 10
        axis.step(10 * np.arange(len(counts)), counts, where="post", linewidth=1)
        axis.axhline(5.0, color="grey", linestyle=":")
        gaps = np.diff(times)
        axis.set(
            xlabel="seconds",
            ylabel="requests/s, by 10 s",
            title=f"{kind}: gaps' CV {gaps.std() / gaps.mean():.1f}",
        )
        rows += [
            {"series": kind, "time_s": 10 * k, "requests_per_s": round(float(c), 3)}
            for k, c in enumerate(counts)
        ]
    for axis in axes:
        tidy(axis)
    note = (
        "hours of BurstGPT (CC-BY-4.0) in the picture alone; grey: 4 to 6 requests/s"
        if hours is not None
        else "without the trace's hours: set SERVEGYM_DATA"
    )
    save(options, "fig8_trace", rows, figure, note, f"processes: {requests} requests at 5/s")


FIGURES = {"fig4": fig4, "fig5": fig5, "fig8": fig8}


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print and save; see ``--help``."""
    return run_figures(FIGURES, argv, __doc__, MODULE, episodes=400)


if __name__ == "__main__":
    run_main(main)
