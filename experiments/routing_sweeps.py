"""Routers against load, burstiness, number of experts and latency requirement (Fig. 7, 9, 11-13).

``python -m servegym.experiments.routing_sweeps --checkpoints runs/routing`` measures every
baseline and every finished training below the folder on the same evaluation episodes, with
``--shipped`` the shipped routers too; without ``--checkpoints`` these alone. Each fleet has its own
panels: what holds on one regime need not hold on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servegym.experiments.routing_common import (
    Options,
    best_trained,
    chosen,
    claim,
    measure,
    plot_bars,
    plot_lines,
    print_rows,
    run_figures,
    save,
)
from servegym.hardware_profiles import load_fleet
from servegym.hardware_profiles.script import run

__all__ = ["main"]

MODULE = "servegym.experiments.routing_sweeps"
RATES = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0)
LIMITS_MS = (20.0, 25.0, 30.0, 35.0, 40.0, 45.0)
POINTS = {"edge-6-heterogeneous": (5.0, 8.0), "paper-linear": (3.0, 5.0)}
"""Rates of the comparisons: the paper's, and the one where a fleet is loaded but not lost."""


def _few(options: Options, values: Sequence[Any]) -> Sequence[Any]:
    return values[:: max(len(values) - 1, 1)] if options.quick else values


def claims(rows: Sequence[dict[str, Any]], paper: str) -> list[str]:
    """What the paper's claim comes to, and who is best, at every point.

    A baseline that is below shortest_queue at any point of a fleet counts as undertrained at all.
    """
    lines = []
    for fleet in dict.fromkeys(row.get("panel", row.get("profiles")) for row in rows):
        part = [row for row in rows if row.get("panel", row.get("profiles")) == fleet]
        points = {
            point: [row for row in part if row["point"] == point]
            for point in dict.fromkeys(row["point"] for row in part)
        }
        trained = {row["policy"] for row in part}
        kinds = [k for k in ("", " (general)") if {f"sac_han{k}", f"baseline_rl{k}"} <= trained]
        if not kinds:
            lines += [f"{fleet}: {one}" for one in claim([], "sac_han", "baseline_rl", paper)]
        for kind in kinds:
            found = {
                point: claim(own, f"sac_han{kind}", f"baseline_rl{kind}", paper)[0]
                for point, own in points.items()
            }
            weak = [line for line in found.values() if "undertrained" in line]
            if weak:
                count = f"at {len(weak)} of {len(found)} points, as at the first of them"
                lines.append(f"{fleet}: undertrained {count}: {weak[0]}")
            else:
                lines += [f"{point}: {line}" for point, line in found.items()]
        for point, own in points.items():
            lines += [f"{point}: {line}" for line in best_trained(own)]
    print("\n".join(lines))
    return lines


def _comparison(options: Options, stem: str, arrivals: str, paper: str, requests: int) -> None:
    rows = []
    for fleet in options.fleets:
        for rate in POINTS.get(fleet, (5.0,)):
            point = {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
            kwargs = {"profiles": fleet, "rate": rate, "arrivals": arrivals}
            if not options.quick:
                kwargs["episode_requests"] = requests
            rows += measure(options, kwargs, point, chosen(options, fleet))
    print_rows(f"{stem}: {arrivals} arrivals", rows, ["point"])
    lines = claims(rows, paper)
    save(options, stem, rows, plot_bars(rows, "point", f"{arrivals} arrivals"), *lines)


def fig7(options: Options) -> None:
    """QoS and latency per token under Poisson arrivals."""
    _comparison(options, "fig7_poisson", "poisson", "+35.78 %, -5.45 %", 1000)


def fig9(options: Options) -> None:
    """QoS and latency per token over long episodes with the bursts of a published trace."""
    _comparison(options, "fig9_burstgpt", "burstgpt", "at least +33.47 %, -3.35 %", 5000)


def fig12(options: Options) -> None:
    """QoS and latency per token against the arrival rate."""
    rows = []
    for fleet in options.fleets:
        for rate in _few(options, RATES):
            point = {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
            kwargs = {"profiles": fleet, "rate": rate}
            rows += measure(options, kwargs, point, chosen(options, fleet))
    print_rows("fig12: arrival rate", rows, ["point"])
    lines = claims(rows, "at least +34.11 %, -4.17 %")
    title = "Poisson arrivals, six experts, L = 30 ms"
    figure = plot_lines(rows, "rate", "arrival rate, requests/s", "profiles", title)
    save(options, "fig12_rate", rows, figure, *lines)


def fig11(options: Options) -> None:
    """QoS and latency per token against the number of experts."""
    rows = []
    for fleet in options.fleets:
        largest = len(load_fleet(fleet).profiles)
        counts = (3, 6, 9, 12) if largest >= 12 else (3, 4, 5, 6)
        for count in _few(options, [n for n in counts if n <= largest]):
            point = {"point": f"{fleet}, N={count}", "profiles": fleet, "experts": count}
            kwargs = {"profiles": fleet, "rate": 5.0, "num_experts": count}
            made = [
                run._replace(label=f"{run.variant.partition('_n')[0]} (trained at N)")
                for run in chosen(options, fleet, ("experts",))
                if run.group == "experts" and run.experts == count
            ]
            rows += measure(options, kwargs, point, [*chosen(options, fleet), *made])
    print_rows("fig11: number of experts", rows, ["point"])
    title = "Poisson arrivals at 5 requests/s, L = 30 ms"
    figure = plot_lines(rows, "experts", "experts", "profiles", title)
    note = "a router over the graph serves any N; 'trained at N' are trainings of their own"
    lines = claims(rows, "above the baselines at every N")
    save(options, "fig11_experts", rows, figure, note, *lines)


def fig13(options: Options) -> None:
    """QoS and latency per token against the latency requirement."""
    rows = []
    for fleet in options.fleets:
        rate = 8.0 if fleet == "edge-6-heterogeneous" else 5.0
        for limit in _few(options, LIMITS_MS):
            name = f"{fleet}, {rate:g}/s"
            point = {"point": f"{name}, L={limit:g} ms", "panel": name, "limit_ms": limit}
            kwargs = {"profiles": fleet, "rate": rate, "latency_requirement_s": limit / 1e3}
            trained = chosen(options, fleet, ("paper", "general", "limits", "other"))
            rows += measure(options, kwargs, point, trained)
    print_rows("fig13: latency requirement", rows, ["point"])
    lines = claims(rows, "at least +18.31 %, -4.63 %")
    title = "Poisson arrivals, six experts"
    figure = plot_lines(rows, "limit_ms", "latency requirement L, ms/token", "panel", title)
    save(options, "fig13_requirement", rows, figure, *lines)


FIGURES = {"fig7": fig7, "fig9": fig9, "fig11": fig11, "fig12": fig12, "fig13": fig13}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, argv, __doc__, MODULE, episodes=50)


if __name__ == "__main__":
    run(main)
