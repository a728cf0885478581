"""What the router faces: answers of different models, interference, arrivals (Fig. 4, 5 and 8).

``python -m servegym.experiments.papers.routing.workload`` needs no trained router.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.workloads import load_catalog, make_arrivals
from servegym.experiments.evaluation.play import DEFAULT_SEED, make_envs
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.routing.measuring import ENV_ID
from servegym.experiments.papers.study import Options, Study, command
from servegym.hardware_profiles import load_fleet

EXPERTS = {"RTX 4090": "rtx4090-llama-3.1-8b", "paper-linear": "paper-linear-01"}
"""Single experts of Fig. 5."""
RATES = (0.5, 1.0, 2.0, 3.0)
CLOCK = 40.0
"""Arrivals a second that look at the expert; all but a share of them are dropped."""


def _fig4(*_: Any) -> Iterator[dict[str, Any]]:
    """Distributions of scores and lengths of the default fleet's models."""
    catalog = load_catalog("alpaca_eval_7b")
    models = load_fleet("edge-6-heterogeneous").models[:6]
    quantities = {
        "score": (catalog.scores, 1),
        "output_tokens": (catalog.output_tokens, catalog.max_output_tokens),
    }
    for model, column in zip(models, catalog.columns(list(models)), strict=True):
        for quantity, (table, most) in quantities.items():
            grid = np.linspace(0, most, 21)
            values = table[:, column].astype(np.float64)
            share = np.histogram(np.clip(values, grid[0], grid[-1]), grid)[0] / len(values)
            for low, high, part in zip(grid[:-1], grid[1:], share, strict=True):
                yield {
                    "model": model,
                    "quantity": quantity,
                    "bin_low": round(low, 4),
                    "bin_high": round(high, 4),
                    "share": round(float(part), 6),
                }


def first_request_latency(
    profile: str, rate: float, episodes: int, seconds: float
) -> dict[str, np.ndarray]:
    """Latency per token so far of the first request of an idle expert, as others join it.

    The environment shows the expert at every arrival only. So arrivals come at a high rate and all
    but a random share are dropped: what is left is again Poisson, at the rate asked for.

    Args:
        profile: Latency profile of the expert.
        rate: Rate of the requests that are sent to it, requests/s, at most `CLOCK`.
        episodes: Episodes to average over.
        seconds: How long to follow the first request.

    Returns:
        ``age_s`` (K,) seconds since the first request arrived, ``latency_s_per_token`` (K,) mean
        over the episodes whose first request is still served, ``share`` (K,) of these.
    """
    ticks = int(CLOCK * seconds)
    kwargs = {"profiles": profile, "num_experts": 1, "rate": CLOCK, "split": "eval"}
    kwargs |= {"episode_requests": ticks, "running_capacity": 16, "waiting_capacity": 16}
    envs = make_envs(ENV_ID, episodes, kwargs)
    rng = np.random.default_rng(DEFAULT_SEED)
    observation, _ = envs.reset(seed=[DEFAULT_SEED + i for i in range(episodes)])
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
            valid = served & is_first
            tokens[valid] = head[valid, 4]
            latency[valid, tick] = head[valid, 5]
        observation, _, ended, _, info = envs.step(action)
    log = [envs.unwrapped.request_log(row)["arrival_s"] for row in range(episodes)]
    envs.close()
    age = np.array(log) - np.array([arrivals[0] for arrivals in log])[:, None]
    grid = np.arange(0.05, seconds, 0.1)
    index = np.floor(age / 0.1).astype(int)
    valid = np.isfinite(latency) & (index < len(grid))
    total = np.bincount(index[valid], latency[valid], len(grid))
    count = np.bincount(index[valid], minlength=len(grid))
    alive = np.bincount(index[index < len(grid)], minlength=len(grid))
    with np.errstate(invalid="ignore", divide="ignore"):
        latency = total / count
    return {"age_s": grid, "latency_s_per_token": latency, "share": count / np.maximum(alive, 1)}


def _length(options: Options) -> tuple[float, int]:
    """Seconds and episodes of Fig. 5."""
    return (2.0, 8) if options.quick else (6.0, max(options.episodes, 400))


def _fig5(options: Options, at: Mapping[str, Any], _: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Latency per token of the first request against time, by the rate at which others join it."""
    seconds, episodes = _length(options)
    columns = first_request_latency(EXPERTS[at["expert"]], at["rate"], episodes, seconds)
    # A mean over the few requests that are served longest would be one over others.
    shown = (columns["share"] >= 0.3) & np.isfinite(columns["latency_s_per_token"])
    for t, value, share in zip(*(column[shown] for column in columns.values()), strict=True):
        yield {
            **at,
            "age_s": round(float(t), 3),
            "latency_ms_per_token": round(1e3 * float(value), 4),
            "share_still_served": round(float(share), 4),
        }


def _gaps(options: Options, kind: str) -> np.ndarray:
    """Arrival times of an episode."""
    count = 500 if options.quick else 5000
    return make_arrivals(kind).sample(count, np.random.default_rng(DEFAULT_SEED), 5.0)


def _fig8(options: Options, at: Mapping[str, Any], _: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Arrival intensity of one episode."""
    times = _gaps(options, at["series"])
    counts = np.histogram(times, np.arange(0, times[-1] + 10, 10.0))[0] / 10
    for k, count in enumerate(counts):
        yield {**at, "time_s": 10 * k, "requests_per_s": round(float(count), 3)}


PROCESSES = ("burstgpt", "poisson")


def _fig8_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "Each process draws its requests at 5 requests/s on average."
    for kind in PROCESSES:
        gaps = np.diff(_gaps(options, kind))
        yield (
            f"{kind}: the coefficient of variation of the gaps between arrivals is "
            f"{gaps.std() / gaps.mean():.1f}."
        )


STUDIES = (
    Study(
        "fig4_distributions",
        "fig4",
        _fig4,
        notes=lambda options, rows: [
            "Scores and lengths of the catalog alpaca_eval_7b, prompts of all splits; the "
            "environment adds nothing to them."
        ],
        picture=Lines(x="bin_low", y="share", line="model", panels="quantity"),
    ),
    Study(
        "fig5_interference",
        "fig5",
        _fig5,
        lambda options: [{"expert": name, "rate": rate} for name in EXPERTS for rate in RATES],
        notes=lambda options, rows: [
            f"Means of {_length(options)[1]} episodes of one expert with 16 running slots. A rate "
            "is that of the requests sent to the expert. A curve ends where fewer than 30 % of the "
            "first requests are still served."
        ],
        picture=Lines(x="age_s", y="latency_ms_per_token", line="rate", panels="expert"),
    ),
    Study(
        "fig8_trace",
        "fig8",
        _fig8,
        lambda options: [{"series": kind} for kind in PROCESSES],
        notes=_fig8_notes,
        picture=Lines(x="time_s", y="requests_per_s", panels="series", level=5.0),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=400)

if __name__ == "__main__":
    run_main(main)
