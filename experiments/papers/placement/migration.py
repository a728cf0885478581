"""Migration when the requests change: Fig. 7 of Prism.

Every server gets 200 requests of the longer workload and then 200 of the shorter one. The first
placement knows the counts of all servers pooled; from then on it stays, or is planned again every
five minutes and changed when Eq. 4 says so. A placement that never moves either, but was planned
for each server's requests of both phases, says how much of that is moving and how much knowing
which server has which requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.simulator import Requests
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.papers.placement.common import (
    SEED,
    band,
    change_columns,
    drive,
    interval,
    run_figures,
    setting,
    versus,
)
from servegym.experiments.papers.plotting import legend, pyplot, tidy
from servegym.experiments.papers.run import FigureOptions, Pictures, save

__all__ = ["main", "two_phases"]

MODULE = "servegym.experiments.papers.placement.migration"
EACH = 200
PHASES = (("paper_testbed_multi", 20.0, 20), ("paper_testbed", 10.0, 5))
"""Scenario of the tasks, seconds between requests, tokens of an answer."""

VARIANTS = {
    "kept": {"static": True},
    "kept, planned for both phases": {"static": True, "known": True},
    "migrating": {},
    "migrating, weights over the network": {"migration_source": "network"},
}
LOOKS = 2


def two_phases(each: int) -> Any:
    """A maker of requests: ``each`` per server of the first phase, then of the second.

    Returns:
        A function of a problem and a generator.
    """
    found = [build_problem(scenario=name, split="eval") for name, _, _ in PHASES]

    def make(problem: Problem, rng: np.random.Generator) -> Requests:
        parts = []
        for n in range(problem.cluster.num_servers):
            start = 0.0
            for phase, (_, gap, outputs) in zip(found, PHASES, strict=True):
                # Sorted uniform times are those of a Poisson process with this many arrivals.
                at = start + np.sort(rng.uniform(0.0, each * gap, each))
                rows = phase.rows[n % len(phase.rows)]
                parts.append((np.full(each, n), at, rng.choice(rows, each), np.full(each, outputs)))
                start += each * gap
        home, arrival, prompt, tokens = (np.concatenate(x) for x in zip(*parts, strict=True))
        order = np.argsort(arrival, kind="stable")
        offset = rng.integers(0, 1 << 16, len(order))
        return Requests(home[order], arrival[order], prompt[order], tokens[order], offset)

    return make


def both_phases() -> np.ndarray:
    """(N, L, E) assignments that a server's requests of both phases make, by recorded prompts."""
    counts = []
    for name, _, outputs in PHASES:
        problem = build_problem(scenario=name, split="eval", output_tokens=outputs)
        described = PlacementSystem.from_problem(problem)
        tasks = np.arange(problem.cluster.num_servers) % len(described.task_counts)
        counts.append(EACH * described.task_counts[tasks])
    return np.rint(sum(counts)).astype(np.int64)


def fig7(options: FigureOptions) -> None:
    """Local share and latency with and without migration across a change of the requests."""
    each = 30 if options.quick else EACH
    change = each * PHASES[0][1]
    span = change + each * PHASES[1][1]
    epochs = int(np.ceil(span / 300.0))
    make = two_phases(each)
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    latency: dict[str, np.ndarray] = {}
    for name, given in VARIANTS.items():
        kwargs: dict[str, Any] = {"scenario": "paper_testbed_multi", "epochs": epochs}
        kwargs |= {key: x for key, x in given.items() if key not in ("static", "known")}
        history = both_phases() if given.get("known") else None
        runs = []
        for s in range(options.episodes):
            system, looks = drive(
                kwargs,
                "prism",
                SEED + s,
                LOOKS,
                make,
                history is None,
                bool(given.get("static")),
                history,
            )
            runs.append((system.request_log(), looks, system.kpis()))
        row: dict[str, Any] = {"variant": name, "episodes": options.episodes}
        seconds = [log["finish_s"] - log["arrival_s"] for log, _, _ in runs]
        late = [log["arrival_s"] >= change for log, _, _ in runs]
        latency[name] = np.array([x.mean() for x in seconds])
        row |= interval(latency[name], "mean_latency_s")
        for phase, after in (("first", False), ("second", True)):
            part = [x[flag == after].mean() for x, flag in zip(seconds, late, strict=True)]
            row |= interval(part, f"{phase}_phase_s")
        row |= interval([kpis["migrations"] for _, _, kpis in runs], "migrations")
        row |= interval([kpis["expert_loads"] for _, _, kpis in runs], "expert_loads")
        summary.append(row)
        for looks in zip(*(looks for _, looks, _ in runs), strict=True):
            point: dict[str, Any] = {"variant": name, "minute": looks[0]["end_s"] / 60}
            for unit in ("tokens", "calls"):
                here = np.array([look[f"all_local_{unit}"] for look in looks], dtype=np.float64)
                away = np.array([look[f"all_remote_{unit}"] for look in looks])
                point |= interval(here / np.maximum(here + away, 1), f"local_{unit}")
            begin, end = looks[0]["start_s"], looks[0]["end_s"]
            means = []
            for (log, _, _), x in zip(runs, seconds, strict=True):
                inside = (log["arrival_s"] >= begin) & (log["arrival_s"] < end)
                means.append(x[inside].mean() if inside.any() else np.nan)
            known = [value for value in means if not np.isnan(value)] or [np.nan]
            point |= interval(known, "latency_s")
            point["adopted"] = float(np.mean([look["adopted"] for look in looks]))
            rows.append(point)
        print(f"{name}: {row['mean_latency_s']:.2f} s, {row['migrations']:.1f} changes")
    print_table(
        "200 + 200 requests a server",
        ["", "all, s", "first phase", "second phase", "changes", "experts loaded"],
        [
            [
                r["variant"],
                *(
                    f"{r[key]:.2f} [{r[f'{key}_low']:.2f}, {r[f'{key}_high']:.2f}]"
                    for key in (
                        "mean_latency_s",
                        "first_phase_s",
                        "second_phase_s",
                        "migrations",
                        "expert_loads",
                    )
                ),
            ]
            for r in summary
        ],
    )
    for row in summary:
        for other in (name for name, given in VARIANTS.items() if given.get("static")):
            row |= change_columns(latency[row["variant"]], latency[other], other)
    notes = _findings(summary, latency, _answer(rows, change))
    kwargs = {"scenario": "paper_testbed_multi", "split": "eval"}
    settings = {
        "setting": setting(build_problem(**kwargs)),
        "requests of a server": f"{each} + {each}",
    }
    save(options, "fig7_migration", rows, *notes, settings=settings)
    save(options, "fig7_summary", summary, *notes, settings=settings)


def _answer(rows: Sequence[dict[str, Any]], change: float) -> float:
    """Minutes until the plan of most runs has changed after the requests have, over the network."""
    length = 60 * rows[0]["minute"]
    for row in rows:
        start = 60 * row["minute"] - length
        if "network" in row["variant"] and start > change and row["adopted"] > 0.5:
            return (start - change) / 60
    return float("nan")


def _findings(
    summary: Sequence[dict[str, Any]], latency: dict[str, np.ndarray], late: float
) -> list[str]:
    static, known, moving, network = (row["mean_latency_s"] for row in summary)
    change = versus(latency["migrating"], latency["kept"])
    other = versus(latency["migrating, weights over the network"], latency["kept"])
    against, over_network = (
        versus(latency[name], latency["kept, planned for both phases"])
        for name in ("migrating", "migrating, weights over the network")
    )
    number = [f"{row['migrations'] - 1:.1f}" for row in summary[2:]]
    return [
        f"Migrating changes the mean latency of all requests by {change}, from {static:.2f} to "
        f"{moving:.2f} s; the paper has -10 %, from 7.48 to 6.73 s.",
        f"One placement for both phases, never moved, takes {known:.2f} s; migrating changes that "
        f"by {against}.",
        f"With weights over the network it is {network:.2f} s, {other}, against the placement for "
        f"both phases {over_network}.",
        f"Changes after the first placement: {number[0]} with weights from the host's memory, "
        f"{number[1]} over the network; the paper: 3. From the host an expert takes 1.4 ms, so "
        "that Eq. 4 lets nearly every new plan through; an expert takes 0.28 s over the network.",
        "Over the network the placement changes "
        + (f"{late:.0f} minutes after the requests do" if late == late else "not at all")
        + ", when the new counts outweigh the old ones: the mixture that the paper blames for its "
        "third migration.",
    ]


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    # Both phases have as many requests, so that their lengths are as their gaps.
    gaps = [gap for _, gap, _ in PHASES]
    change = max(row["minute"] for row in rows) * gaps[0] / sum(gaps)
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    panels = (
        ("local_tokens", "share of tokens served at home"),
        ("local_calls", "share of calls served at home"),
        ("latency_s", "mean latency of arrivals, s"),
    )
    for axis, (key, label) in zip(axes, panels, strict=True):
        for name in VARIANTS:
            part = [row for row in rows if row["variant"] == name]
            band(axis, part, "minute", key, label=name)
        axis.axvline(change, color="black", lw=0.8, ls=":")
        axis.set_xlabel("minutes (dotted: the requests change)")
        axis.set_ylabel(label)
        tidy(axis)
    figure.suptitle(
        "Prism, DeepSeek-V2-Lite, link model nic, per-expert messages, h = 1.5 ms", fontsize=10
    )
    legend(figure, axes[0])
    return figure


FIGURES = {"fig7": fig7}
PICTURES: Pictures = {"fig7_migration": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=8)


if __name__ == "__main__":
    run_main(main)
