"""Routers against load, burstiness, number of experts and latency requirement (Fig. 7, 9, 11-13).

``python -m servegym.experiments.figures.routing.sweeps --checkpoints runs/routing`` measures every
baseline and every finished training below the folder on the same evaluation episodes, with
``--shipped`` the shipped routers too; without ``--checkpoints`` these alone. Each fleet has its own
panels: what holds on one regime need not hold on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servegym.envs._command_line import run_main
from servegym.experiments.figures.routing.claims import OVER_BASELINE, PRINTED, Change, claims
from servegym.experiments.figures.routing.common import (
    Options,
    chosen,
    measure,
    plot_bars,
    plot_lines,
    print_rows,
    run_figures,
    save,
    with_earlier,
)
from servegym.hardware_profiles import load_fleet

__all__ = ["main"]

MODULE = "servegym.experiments.figures.routing.sweeps"
RATES = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0)
FIG11_RATE = 5.0
LIMITS_MS = (20.0, 25.0, 30.0, 35.0, 40.0, 45.0)
POINTS = {"edge-6-heterogeneous": (5.0, 8.0), "paper-linear": (3.0, 5.0)}
"""Rates of the comparisons: the paper's, and the one where a fleet is loaded but not lost."""


def _few(options: Options, values: Sequence[Any]) -> Sequence[Any]:
    return values[:: max(len(values) - 1, 1)] if options.quick else values


def _comparison(options: Options, stem: str, arrivals: str, paper: Change, requests: int) -> None:
    rows = []
    for fleet in options.fleets:
        for rate in POINTS.get(fleet, (5.0,)):
            point = {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
            kwargs = {"profiles": fleet, "rate": rate, "arrivals": arrivals}
            if not options.quick:
                kwargs["episode_requests"] = requests
            rows += measure(options, kwargs, point, chosen(options, fleet))
    rows = with_earlier(options, stem, rows, "point")
    print_rows(f"{stem}: {arrivals} arrivals", rows, ["point"])
    lines = claims(rows, paper)
    save(options, stem, rows, plot_bars(rows, "point", f"{arrivals} arrivals"), *lines)


def fig7(options: Options) -> None:
    """QoS and latency per token under Poisson arrivals."""
    _comparison(options, "fig7_poisson", "poisson", PRINTED["Fig. 7"], 1000)


def fig9(options: Options) -> None:
    """QoS and latency per token over long episodes with the bursts of a published trace."""
    _comparison(options, "fig9_burstgpt", "burstgpt", PRINTED["Fig. 9"], 2000)


def fig12(options: Options) -> None:
    """QoS and latency per token against the arrival rate."""
    rows = []
    for fleet in options.fleets:
        for rate in _few(options, RATES):
            point = {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
            kwargs = {"profiles": fleet, "rate": rate}
            rows += measure(options, kwargs, point, chosen(options, fleet))
    rows = with_earlier(options, "fig12_rate", rows, "point")
    print_rows("fig12: arrival rate", rows, ["point"])
    lines = claims(rows, PRINTED["Fig. 12"])
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
            kwargs = {"profiles": fleet, "rate": FIG11_RATE, "num_experts": count}
            made = [
                run._replace(label=f"{base} (trained at N)")
                for base in OVER_BASELINE
                for run in chosen(options, fleet, ("experts", "paper"))
                if run.variant in (base, f"{base}_n{count}")
                and (run.experts, *run.rates) == (count, FIG11_RATE, FIG11_RATE)
            ]
            rows += measure(options, kwargs, point, [*chosen(options, fleet), *made])
    rows = with_earlier(options, "fig11_experts", rows, "point")
    print_rows("fig11: number of experts", rows, ["point"])
    title = f"Poisson arrivals at {FIG11_RATE:g} requests/s, L = 30 ms"
    figure = plot_lines(rows, "experts", "experts", "profiles", title)
    note = (
        "a router over the graph serves any N; 'trained at N' are trainings of their own, at N = 6 "
        "on paper-linear the long ones"
    )
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
            rows += measure(options, kwargs, point, chosen(options, fleet))
    rows = with_earlier(options, "fig13_requirement", rows, "point")
    print_rows("fig13: latency requirement", rows, ["point"])
    lines = claims(rows, PRINTED["Fig. 13"])
    title = "Poisson arrivals, six experts"
    figure = plot_lines(rows, "limit_ms", "latency requirement L, ms/token", "panel", title)
    save(options, "fig13_requirement", rows, figure, *lines)


FIGURES = {"fig7": fig7, "fig9": fig9, "fig11": fig11, "fig12": fig12, "fig13": fig13}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, argv, __doc__, MODULE, episodes=50, keeps=True)


if __name__ == "__main__":
    run_main(main)
