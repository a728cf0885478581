"""What the router faces: answers of different models, interference, arrivals (Fig. 4, 5 and 8).

``python -m servegym.experiments.papers.routing.workload`` needs no trained router. With the data
folder (``SERVEGYM_DATA``) Fig. 8 shows the hourly requests of the published trace, too.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import MalformedFileError, measured_data
from servegym.envs.workloads import load_catalog, make_arrivals
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.play import DEFAULT_SEED, make_envs
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.plotting import legend, pyplot, tidy
from servegym.experiments.papers.routing.common import (
    ENV_ID,
    Options,
    run_figures,
    save,
)
from servegym.experiments.papers.run import Pictures
from servegym.hardware_profiles import load_fleet

__all__ = ["first_request_latency", "main"]

MODULE = "servegym.experiments.papers.routing.workload"
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
        for quantity, found in values.items():
            grid = edges[quantity]
            share = np.histogram(np.clip(found, grid[0], grid[-1]), grid)[0] / len(found)
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
    parts = [f"{q} {s}" for q in ("score", "tokens") for s in ("mean", "P10", "P50", "P90")]
    title = f"fig4: {catalog.num_prompts} prompts of {catalog.name}, all splits"
    print_table(title, ["model", *parts], body)
    text = (
        f"Scores and lengths of the catalog {catalog.name}, {catalog.num_prompts} prompts of all "
        "splits; the environment adds nothing to them."
    )
    save(options, "fig4_distributions", rows, text)


def _plot_distributions(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for axis, quantity in zip(axes, ("score", "output_tokens"), strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            own = [row for row in rows if (row["model"], row["quantity"]) == (model, quantity)]
            edges = [own[0]["bin_low"], *(row["bin_high"] for row in own)]
            axis.stairs([100 * row["share"] for row in own], edges, label=model, linewidth=1.5)
        axis.set(xlabel=quantity.replace("_", " "), ylabel="share of prompts, %")
        tidy(axis)
    legend(figure, axes[0])
    return figure


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
    seen = np.isfinite(latency) & (index < len(grid))
    total = np.bincount(index[seen], latency[seen], len(grid))
    count = np.bincount(index[seen], minlength=len(grid))
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
    for name, profile in EXPERTS.items():
        for rate in RATES:
            found = first_request_latency(profile, rate, episodes, seconds)
            # A mean over the few requests that are served longest would be one over others.
            shown = found["share"] >= 0.3
            shown &= np.isfinite(found["latency_s_per_token"])
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
    text = (
        f"Means of {episodes} episodes of one expert with 16 running slots. A rate is that of the "
        "requests sent to the expert. A curve ends where fewer than 30 % of the first requests "
        "are still served."
    )
    save(options, "fig5_interference", rows, text)


def _plot_interference(rows: Sequence[Mapping[str, Any]]) -> Any:
    names = list(dict.fromkeys(row["expert"] for row in rows))
    figure, axes = pyplot().subplots(1, len(names), figsize=(11, 3.8), layout="constrained")
    for axis, name in zip(np.atleast_1d(axes), names, strict=True):
        for rate in dict.fromkeys(row["rate"] for row in rows):
            own = [row for row in rows if (row["expert"], row["rate"]) == (name, rate)]
            axis.plot(
                [row["age_s"] for row in own],
                [row["latency_ms_per_token"] for row in own],
                label=f"{rate:g} requests/s",
            )
        axis.set(title=name, xlabel="seconds since the first request arrived")
        tidy(axis)
    figure.axes[0].set(ylabel="its latency per token so far, ms")
    legend(figure, figure.axes[0])
    return figure


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
    """Arrival intensity of one episode of each arrival process."""
    requests = 500 if options.quick else 5000
    rows: list[dict[str, Any]] = []
    notes: list[Note] = [f"Each process draws {requests} requests at 5 requests/s on average."]
    for kind in ("burstgpt", "poisson"):
        times = make_arrivals(kind, 5.0).sample(requests, np.random.default_rng(DEFAULT_SEED))
        counts = np.histogram(times, np.arange(0, times[-1] + 10, 10.0))[0] / 10
        gaps = np.diff(times)
        variation = gaps.std() / gaps.mean()
        rows += [
            {"series": kind, "time_s": 10 * k, "requests_per_s": round(float(c), 3)}
            for k, c in enumerate(counts)
        ]
        text = f"{kind}: the coefficient of variation of the gaps between arrivals is"
        notes.append(note(f"{text} {variation:.1f}.", series=kind, variation=variation))
    save(options, "fig8_trace", rows, *notes)


def _plot_arrivals(rows: Sequence[Mapping[str, Any]]) -> Any:
    """One panel a process, and the hours of the published trace where the data folder has them."""
    hours = _hourly(measured_data(*HOURLY))
    series = list(dict.fromkeys(row["series"] for row in rows))
    panels = len(series) + (hours is not None)
    figure, axes = pyplot().subplots(1, panels, figsize=(4.6 * panels, 3.4), layout="constrained")
    if hours is not None:
        axes[0].plot(np.arange(len(hours)) / 24, hours, linewidth=0.8)
        axes[0].axhspan(4, 6, color="grey", alpha=0.3)
        axes[0].set(xlabel="day of the trace", ylabel="requests/s, by the hour", title="BurstGPT")
    for axis, kind in zip(axes[-len(series) :], series, strict=True):
        own = [row for row in rows if row["series"] == kind]
        at, counts = ([row[key] for row in own] for key in ("time_s", "requests_per_s"))
        axis.step(at, counts, where="post", linewidth=1)
        axis.axhline(5.0, color="grey", linestyle=":")
        axis.set(xlabel="seconds", ylabel="requests/s, by 10 s", title=kind)
    for axis in axes:
        tidy(axis)
    return figure


FIGURES = {"fig4": fig4, "fig5": fig5, "fig8": fig8}
PICTURES: Pictures = {
    "fig4_distributions": _plot_distributions,
    "fig5_interference": _plot_interference,
    "fig8_trace": _plot_arrivals,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=400)


if __name__ == "__main__":
    run_main(main)
