"""One trained router over loads, requirements, fleet sizes, fleets and bursts.

::

    python -m servegym.experiments.figures.beyond.routing.generalization

measures the shipped router that was trained over a range (``--routers rpi``, the default) with
greedy_qos and priced_greedy on the same evaluation episodes, at every point of the sweeps over the
arrival rate, the latency requirement L and the number of experts of each fleet, and under bursts;
with ``--checkpoints FOLDER --figure seeds`` the trainings below a folder instead. ``--sweeps
bursts`` measures the points of that sweep anew and leaves the other rows of the table in the
folder. The differences are paired by episode.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.figures.plotting import legend, pyplot, tidy
from servegym.experiments.figures.routing.common import (
    Options,
    TrainedRun,
    gain,
    play,
    run_figures,
    save,
    summarise_parts,
)
from servegym.experiments.output import print_table
from servegym.experiments.tables import Table, note

__all__ = ["Point", "findings", "main", "points"]

MODULE = "servegym.experiments.figures.beyond.routing.generalization"
ROUTER = "rpi"
FLEETS = ("edge-6-heterogeneous", "edge-6-homogeneous", "paper-linear")
HEURISTICS = ("greedy_qos", "priced_greedy")
RATES = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 14.0, 20.0)
LIMITS_MS = (15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0)
COUNTS = (3, 6, 9, 12)
LOADED = {"paper-linear": 5.0}
"""Rate of the sweep over L where it is not 8 requests/s."""
BURSTS = (
    ("edge-6-heterogeneous", 5.0),
    ("edge-6-heterogeneous", 8.0),
    ("edge-6-homogeneous", 8.0),
    ("paper-linear", 5.0),
)
AXES = {
    "rate": "arrival rate, requests/s",
    "limit_ms": "latency requirement L, ms/token",
    "experts": "experts",
}


POINT = ("sweep", "profiles", "value")
TEXT = ("sweep", "profiles", "policy", "interval_over")


class Point(NamedTuple):
    """One point of a sweep.

    Attributes:
        sweep: Key of `AXES`, or ``bursts``.
        fleet: Fleet of the experts.
        value: Where on the sweep's axis.
        kwargs: Arguments of the environment.
    """

    sweep: str
    fleet: str
    value: float
    kwargs: dict[str, Any]


def points(quick: bool = False) -> list[Point]:
    """All points in the order of the table; a smoke run has the ends of the sweeps of one fleet."""
    found = []
    for fleet in FLEETS[:1] if quick else FLEETS:
        loaded = LOADED.get(fleet, 8.0)
        found += [Point("rate", fleet, rate, {"rate": rate}) for rate in RATES]
        found += [
            Point("limit_ms", fleet, limit, {"rate": loaded, "latency_requirement_s": limit / 1e3})
            for limit in LIMITS_MS
        ]
        found += [
            Point("experts", fleet, count, {"rate": 5.0, "num_experts": count}) for count in COUNTS
        ]
        found += [
            Point("bursts", fleet, rate, {"rate": rate, "arrivals": "burstgpt"})
            for own, rate in BURSTS
            if own == fleet
        ]
    if quick:
        found = [one for k, one in enumerate(found) if one.sweep == "bursts" or k % 8 == 0]
    return found


def _measure(options: Options, point: Point, routers: Sequence[TrainedRun]) -> list[dict[str, Any]]:
    from servegym.agents import load_policy
    from servegym.baselines.llm_routing.system import RoutingSystem

    kwargs = {"profiles": point.fleet, "episode_requests": options.requests, **point.kwargs}
    system = RoutingSystem.from_kwargs(**kwargs)

    def measured(policy: Any) -> list[dict[str, Any]]:
        return play([policy], options.episodes, kwargs)

    parts = {(name, 0): measured(name) for name in HEURISTICS}
    for one in routers:
        policy = load_policy(one.path, system)
        policy.name = one.label
        parts[one.label, one.seed] = measured(policy)
    rows = []
    for (name, seed), part in parts.items():
        row = {
            "sweep": point.sweep,
            "profiles": point.fleet,
            "value": point.value,
            "policy": name,
            "training_seed": seed or "",
        } | summarise_parts([part])
        for other in HEURISTICS:
            row |= gain(f"over_{other}", [part], parts[other, 0])
        rows.append(row)
    return rows


def findings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """At how many points each router is above and below each heuristic, and where it is below."""
    notes = []
    trained = [row for row in rows if row["training_seed"] != ""]
    for name, seed in dict.fromkeys((row["policy"], row["training_seed"]) for row in trained):
        own = [row for row in trained if (row["policy"], row["training_seed"]) == (name, seed)]
        for other in HEURISTICS:
            more, low, high = (
                np.array([row[f"over_{other}{end}"] for row in own])
                for end in ("", "_low", "_high")
            )
            at = int(more.argmin())
            below = [_where(row) for row, end in zip(own, high, strict=True) if end < 0]
            text = (
                f"{name}, training seed {seed}: above {other} at {(more > 0).sum()} of {len(own)} "
                f"points (interval above zero at {(low > 0).sum()}), below at {(more < 0).sum()} "
                f"(interval below zero at {len(below)}), mean difference of the QoS "
                f"{more.mean():+.4f}; the worst is {more[at]:+.4f} [{low[at]:+.4f}, "
                f"{high[at]:+.4f}] at {_where(own[at])}; {own[0]['episodes']} episodes a point."
            )
            if below:
                text += f" The interval is below zero at: {'; '.join(below)}."
            data = {
                "policy": name,
                "training_seed": seed,
                "reference": other,
                "points": len(own),
                "above": int((more > 0).sum()),
                "below": int((more < 0).sum()),
                "interval_above": int((low > 0).sum()),
                "interval_below": below,
                "mean": more.mean(),
                "worst": more[at],
            }
            notes.append(note(text, **data))
    return notes


def _where(row: Mapping[str, Any]) -> str:
    what = {
        "rate": "{:g} requests/s",
        "limit_ms": "L = {:g} ms",
        "experts": "{:g} experts",
        "bursts": "bursts of {:g} requests/s",
    }[row["sweep"]]
    return f"{row['profiles']}, {what.format(row['value'])}"


def general(options: Options) -> None:
    """QoS of the shipped router at every point, and the differences to the heuristics."""
    routers = [one for one in options.trained if one.name == ROUTER and one.shipped]
    _everywhere(options, routers, "general_router")


def seeds(options: Options) -> None:
    """The same for trainings with other seeds, those below the folder of --checkpoints."""
    routers = [one for one in options.trained if one.name == ROUTER and not one.shipped]
    if not routers:
        print("seeds: no other trainings (--checkpoints FOLDER), left out")
        return
    _everywhere(options, routers, "general_router_seeds")


def _everywhere(options: Options, routers: Sequence[TrainedRun], stem: str) -> None:
    sweeps: Sequence[str] = vars(options).get("sweeps", ())
    table = Table(options.out / f"{stem}.csv", POINT, text=TEXT, load=bool(sweeps))
    order = {(one.sweep, one.fleet, one.value): k for k, one in enumerate(points(options.quick))}
    table.discard(lambda row: table.key_of(row) not in order)
    for point in points(options.quick):
        if not sweeps or point.sweep in sweeps:
            fresh = _measure(options, point, routers)
            table.update(fresh, lambda row: order[table.key_of(row)])
            print(f"{_where(fresh[-1])}: {len(table.rows)} rows", flush=True)
    rows = table.rows
    keys = ("over_greedy_qos", "over_priced_greedy")
    body = [
        [_where(row), row["policy"], str(row["training_seed"]), f"{row['qos']:.4f}"]
        + [f"{row[key]:+.4f} [{row[key + '_low']:+.4f}, {row[key + '_high']:+.4f}]" for key in keys]
        for row in rows
    ]
    print_table("one router everywhere", ["point", "policy", "seed", "QoS", *keys], body)
    setting = (
        "Sweeps: over the arrival rate with six experts and L = 30 ms; over L with six experts and "
        "8 requests/s (5 on paper-linear); over the number of experts with 5 requests/s and "
        "L = 30 ms; bursts are the arrivals of BurstGPT."
    )
    save(options, stem, rows, setting, *findings(rows))


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, grid = pyplot().subplots(
        2, len(AXES), figsize=(12, 6.4), squeeze=False, sharex="col", layout="constrained"
    )
    colours = dict(zip(FLEETS, ("#b30000", "#08519c", "#238b45"), strict=True))
    trained = [row for row in rows if row["training_seed"] != ""]
    order = list(dict.fromkeys((row["policy"], row["training_seed"]) for row in trained))
    styles = ("-", "--", ":")
    for axes, other in zip(grid, HEURISTICS[::-1], strict=True):
        for axis, (sweep, label) in zip(axes, AXES.items(), strict=True):
            axis.axhline(0, color="black", linewidth=1)
            for fleet, colour in colours.items():
                for k, (name, seed) in enumerate(order):
                    own = [
                        row
                        for row in trained
                        if (row["policy"], row["training_seed"]) == (name, seed)
                        and (row["sweep"], row["profiles"]) == (sweep, fleet)
                    ]
                    at = [row["value"] for row in own]
                    more, low, high = (
                        [row[f"over_{other}{end}"] for row in own] for end in ("", "_low", "_high")
                    )
                    axis.plot(
                        at,
                        more,
                        styles[k % 3],
                        color=colour,
                        linewidth=1.6,
                        marker="o",
                        markersize=3.5,
                        label=None if k else fleet,
                    )
                    axis.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
            tidy(axis)
            if other == HEURISTICS[0]:
                axis.set_xlabel(label)
        axes[0].set_ylabel(f"QoS minus {other}")
    legend(figure, grid[0, 0])
    names = ", ".join(f"{name}, seed {seed}" for name, seed in order)
    figure.suptitle(
        f"{names}: one set of weights at every point, 95 % interval paired by episode", fontsize=11
    )
    return figure


FIGURES = {"general": general, "seeds": seeds}
PICTURES = {"general_router": _plot, "general_router_seeds": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""

    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--sweeps",
            nargs="+",
            default=(),
            choices=[*AXES, "bursts"],
            help="measure these anew and leave the rest of the table in the folder (all)",
        )

    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=50, own=own)


if __name__ == "__main__":
    run_main(main)
