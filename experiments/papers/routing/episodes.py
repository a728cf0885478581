"""Inside the episodes: where the time goes, and the long run (Fig. 10, 14 and 15).

``python -m servegym.experiments.papers.routing.episodes --checkpoints runs/routing`` takes every
finished training below the folder; without it, the baselines and the shipped routers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.families import family_of
from servegym.envs.llm_routing.core import OUTCOMES
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.play import open_envs, play, problem_of
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.evaluation.tables import note
from servegym.experiments.papers.plotting import legend, pyplot, tidy
from servegym.experiments.papers.routing.common import (
    ENV_ID,
    Options,
    chosen,
    measure,
    policies_of,
    run_figures,
    save,
    style,
    with_earlier,
)
from servegym.experiments.papers.run import Pictures

__all__ = ["long_run", "main"]

MODULE = "servegym.experiments.papers.routing.episodes"
PARTS = ("communication_s", "routing_s", "waiting_s", "inference_s")
LONG_RUN = ("round_robin", "shortest_queue", "bert_router", "greedy_qos", "priced_greedy")
WINDOW_S = 30.0


def fig10(options: Options) -> None:
    """End-to-end latency by its four parts."""
    rows: list[dict[str, Any]] = []
    for fleet in options.fleets:
        rate = 8.0 if fleet == "edge-6-heterogeneous" else 5.0
        point = {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
        rows += measure(options, {"profiles": fleet, "rate": rate}, point, chosen(options, fleet))
    keys = ("policy", "point", *PARTS, "e2e_s", "qos", "drop_rate", "reject_rate")
    rows = [{key: row[key] for key in keys} for row in rows]
    rows = with_earlier(options, "fig10_end_to_end", rows, "point")
    body = [
        [row["policy"], row["point"], *(f"{1e3 * row[part]:.1f}" for part in PARTS)]
        + [f"{row['e2e_s']:.3f}", f"{row['qos']:.3f}"]
        + [f"{100 * (row['drop_rate'] + row['reject_rate']):.1f}"]
        for row in rows
    ]
    print_table(
        "fig10: mean end-to-end latency of served requests",
        [
            "policy",
            "point",
            "communication ms",
            "routing ms",
            "waiting ms",
            "inference ms",
            "sum s",
            "QoS",
            "refused %",
        ],
        body,
    )
    note = (
        "The mean is over served requests, and a request is shorter on a model with short "
        "answers: compare latencies together with the QoS and the share of refused requests."
    )
    save(options, "fig10_end_to_end", rows, note)


def _plot_parts(rows: Sequence[Mapping[str, Any]]) -> Any:
    points = list(dict.fromkeys(row["point"] for row in rows))
    figure, axes = pyplot().subplots(
        1, len(points), figsize=(6.2 * len(points), 4), squeeze=False, layout="constrained"
    )
    for axis, point_name in zip(axes[0], points, strict=True):
        own = [row for row in rows if row["point"] == point_name]
        at, left = np.arange(len(own))[::-1], np.zeros(len(own))
        for part in PARTS:
            width = np.array([row[part] for row in own])
            axis.barh(at, width, left=left, label=part.removesuffix("_s"))
            left += width
        axis.set_yticks(at, [row["policy"] for row in own], fontsize=8)
        axis.set(title=point_name, xlabel="mean end-to-end latency of served requests, s")
        tidy(axis)
    legend(figure, axes[0, 0])
    return figure


def long_run(
    policy: Any, env_kwargs: dict[str, Any], episodes: int, window_s: float = WINDOW_S
) -> dict[str, np.ndarray]:
    """QoS and GPU memory use over the time of long episodes.

    Args:
        policy: Registered name or policy object.
        env_kwargs: Arguments of the environment.
        episodes: Episodes to average over; the same for every policy.
        window_s: Length of a window.

    Returns:
        By window: ``time_s`` (its begin), ``requests`` that arrived in it a second, ``qos`` per
        request that arrived in it and ``memory_use``, the mean share of the experts' KV memory
        seen at these arrivals; NaN without arrivals. Means over the episodes' requests.
    """
    kwargs, family = {"split": "eval", **env_kwargs}, family_of(ENV_ID)
    entered = resolve(policy, problem_of(ENV_ID, kwargs), family)
    if entered.env_view != "graph":
        raise ValueError(f"policy is {entered.name!r}, which does not read the graph observation")
    envs = open_envs(family, entered, episodes, kwargs)
    memory = [step.observation["experts"][:, :, 0].mean(1) for step in play(envs, entered)]
    limit = float(envs.unwrapped.problem.latency_requirement_s[0])
    sums: dict[str, Any] = {}
    logs = [envs.unwrapped.request_log(row) for row in range(episodes)]
    envs.close()
    last = 1 + max(int(log["arrival_s"][-1] / window_s) for log in logs)
    for log, use in zip(logs, np.array(memory).T, strict=True):
        window = (log["arrival_s"] / window_s).astype(int)
        done = log["outcome"] == OUTCOMES.index("completed")
        latency = (log["finish_s"] - log["arrival_s"]) / np.maximum(log["output_tokens"], 1)
        qos = np.where(done & (latency <= limit), log["score"], 0.0)
        for key, values in (("requests", None), ("qos", qos), ("memory_use", use)):
            part = np.bincount(window, values, last)
            sums[key] = sums.get(key, 0) + part
    with np.errstate(invalid="ignore"):
        return {
            "time_s": window_s * np.arange(last),
            "requests": sums["requests"] / (episodes * window_s),
            "qos": sums["qos"] / sums["requests"],
            "memory_use": sums["memory_use"] / sums["requests"],
        }


def fig14(options: Options) -> None:
    """QoS and GPU memory use over one long run of bursty arrivals (Fig. 14 and 15)."""
    from servegym.agents import load_policy

    rows: list[dict[str, Any]] = []
    for fleet in options.fleets:
        kwargs = {
            "profiles": fleet,
            "rate": 5.0,
            "arrivals": "burstgpt",
            "episode_requests": 300 if options.quick else 6000,
        }
        policies: list[Any] = list(LONG_RUN)
        labels: set[str] = set()
        for one in chosen(options, fleet):  # one training of each kind: a run, not a mean
            if one.label not in labels:
                labels.add(one.label)
                policy = load_policy(one.path)
                if getattr(policy, "experts", 0) not in (0, 6):
                    continue
                policy.name = one.label
                policies.append(policy)
        for policy in policies:
            found = long_run(policy, kwargs, 1)
            name = policy if isinstance(policy, str) else policy.name
            rows += [
                {"profiles": fleet, "policy": name}
                | {key: round(float(values[k]), 5) for key, values in found.items()}
                for k in range(len(found["time_s"]))
            ]
    rows = with_earlier(options, "fig14_15_long_run", rows, "profiles")
    fleets = list(dict.fromkeys(row["profiles"] for row in rows))
    body, notes = [], []
    for fleet in fleets:
        for name in policies_of([row for row in rows if row["profiles"] == fleet]):
            own = [r for r in rows if r["policy"] == name and r["profiles"] == fleet]
            weight = np.array([row["requests"] for row in own])
            means = [
                np.nansum(weight * [row[key] for row in own]) / weight.sum()
                for key in ("qos", "memory_use")
            ]
            body.append([name, fleet, f"{means[0]:.3f}", f"{100 * means[1]:.1f}"])
            notes.append(
                note(
                    f"{name} on {fleet}: QoS {means[0]:.3f} and {100 * means[1]:.1f} % of the KV "
                    "memory in use, over the whole run.",
                    policy=name,
                    profiles=fleet,
                    qos=means[0],
                    memory_use=means[1],
                )
            )
    print_table("fig14, fig15: long run", ["policy", "fleet", "QoS", "memory %"], body)
    setting = (
        f"One episode in windows of {WINDOW_S:g} s; arrivals with bursts fitted to BurstGPT, 5 "
        "requests/s on average."
    )
    save(options, "fig14_15_long_run", rows, setting, *notes)


def _plot_long_run(rows: Sequence[Mapping[str, Any]]) -> Any:
    fleets = list(dict.fromkeys(row["profiles"] for row in rows))
    figure, grid = pyplot().subplots(
        3,
        len(fleets),
        figsize=(6.5 * len(fleets), 7.5),
        squeeze=False,
        sharex="col",
        layout="constrained",
    )
    for axes, fleet in zip(grid.T, fleets, strict=True):
        names = policies_of([row for row in rows if row["profiles"] == fleet])
        for name in names:
            own = [row for row in rows if (row["policy"], row["profiles"]) == (name, fleet)]
            time, requests, qos, use = (
                np.array([row[key] for row in own])
                for key in ("time_s", "requests", "qos", "memory_use")
            )
            # Averages from the start on: a window of a few requests says little.
            with np.errstate(invalid="ignore"):
                running = (np.nan_to_num(qos) * requests).cumsum() / requests.cumsum()
            look = style(name, names) | {"marker": ""}
            axes[1].plot(time, running, label=name, **look)
            axes[2].plot(time, 100 * use, **look)
            if name == names[0]:
                axes[0].fill_between(time, requests, step="post", color="grey")
        axes[0].set(ylabel="arrivals/s", title=fleet)
        axes[1].set(ylabel="average QoS so far", ylim=(0, None))
        axes[2].set(ylabel="GPU memory for KV in use, %", xlabel="seconds", ylim=(0, None))
        for axis in axes:
            tidy(axis)
    legend(figure, grid[1, 0])
    return figure


FIGURES = {"fig10": fig10, "fig14": fig14}
PICTURES: Pictures = {"fig10_end_to_end": _plot_parts, "fig14_15_long_run": _plot_long_run}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=50, mergeable=True)


if __name__ == "__main__":
    run_main(main)
