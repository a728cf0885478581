"""Routers against load, burstiness, number of experts and latency requirement (Fig. 7, 9, 11-13).

::

    python -m servegym.experiments.papers.routing.load_sweeps --checkpoints runs/learning

measures every baseline and every training below the folder on the same evaluation
episodes, with ``--shipped`` the shipped routers too; without ``--checkpoints`` these alone. Each
fleet has its own panels: what holds on one regime need not hold on another.
"""

from __future__ import annotations

from collections.abc import Sequence

from servegym._command_line import run_main
from servegym.experiments.papers.routing.claims import AT_N, OVER_L, PRINTED, Change, claims
from servegym.experiments.papers.routing.common import (
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
from servegym.experiments.papers.run import Pictures, first_and_last
from servegym.hardware_profiles import load_fleet

__all__ = ["main"]

MODULE = "servegym.experiments.papers.routing.load_sweeps"
RATES = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0)
FIG11_RATE = 5.0
LIMITS_MS = (20.0, 25.0, 30.0, 35.0, 40.0, 45.0)
POINTS = {"edge-6-heterogeneous": (5.0, 8.0), "paper-linear": (3.0, 5.0)}
"""Rates of the comparisons: the paper's, and the one where a fleet is loaded but not lost."""


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
    save(options, stem, rows, *lines)


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
        for rate in first_and_last(options, RATES):
            point = {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
            kwargs = {"profiles": fleet, "rate": rate}
            rows += measure(options, kwargs, point, chosen(options, fleet))
    rows = with_earlier(options, "fig12_rate", rows, "point")
    print_rows("fig12: arrival rate", rows, ["point"])
    lines = claims(rows, PRINTED["Fig. 12"])
    save(options, "fig12_rate", rows, *lines)


def fig11(options: Options) -> None:
    """QoS and latency per token against the number of experts."""
    rows = []
    for fleet in options.fleets:
        largest = len(load_fleet(fleet).profiles)
        counts = (3, 6, 9, 12) if largest >= 12 else (3, 4, 5, 6)
        for count in first_and_last(options, [n for n in counts if n <= largest]):
            point = {"point": f"{fleet}, N={count}", "profiles": fleet, "experts": count}
            kwargs = {"profiles": fleet, "rate": FIG11_RATE, "num_experts": count}
            made = [
                run
                for run in chosen(options, fleet, AT_N)
                if run.label.endswith(AT_N) and run.experts == count
            ]
            rows += measure(options, kwargs, point, [*chosen(options, fleet), *made])
    rows = with_earlier(options, "fig11_experts", rows, "point")
    print_rows("fig11: number of experts", rows, ["point"])
    note = (
        "A router that reads the graph serves any number of experts N. Routers labelled 'trained "
        "at N' are trained for each N."
    )
    lines = claims(rows, "above the baselines at every N")
    save(options, "fig11_experts", rows, note, *lines)


def fig13(options: Options) -> None:
    """QoS and latency per token against the latency requirement."""
    rows = []
    for fleet in options.fleets:
        rate = 8.0 if fleet == "edge-6-heterogeneous" else 5.0
        for limit in first_and_last(options, LIMITS_MS):
            name = f"{fleet}, {rate:g}/s"
            point = {"point": f"{name}, L={limit:g} ms", "panel": name, "limit_ms": limit}
            kwargs = {"profiles": fleet, "rate": rate, "latency_requirement_s": limit / 1e3}
            rows += measure(options, kwargs, point, chosen(options, fleet, OVER_L))
    rows = with_earlier(options, "fig13_requirement", rows, "point")
    print_rows("fig13: latency requirement", rows, ["point"])
    lines = claims(rows, PRINTED["Fig. 13"])
    note = (
        "Routers labelled 'trained over L' saw a range of L in training; the others saw 30 ms "
        "alone. The state of Baseline RL has no L."
    )
    save(options, "fig13_requirement", rows, note, *lines)


FIGURES = {"fig7": fig7, "fig9": fig9, "fig11": fig11, "fig12": fig12, "fig13": fig13}
PICTURES: Pictures = {
    "fig7_poisson": lambda rows: plot_bars(rows, "point", "poisson arrivals"),
    "fig9_burstgpt": lambda rows: plot_bars(rows, "point", "burstgpt arrivals"),
    "fig11_experts": lambda rows: plot_lines(
        rows,
        "experts",
        "experts",
        "profiles",
        f"Poisson arrivals at {FIG11_RATE:g} requests/s, L = 30 ms",
    ),
    "fig12_rate": lambda rows: plot_lines(
        rows,
        "rate",
        "arrival rate, requests/s",
        "profiles",
        "Poisson arrivals, six experts, L = 30 ms",
    ),
    "fig13_requirement": lambda rows: plot_lines(
        rows,
        "limit_ms",
        "latency requirement L, ms/token",
        "panel",
        "Poisson arrivals, six experts",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=50, mergeable=True)


if __name__ == "__main__":
    run_main(main)
