"""Routers against load, burstiness, number of experts and latency requirement (Fig. 7, 9-13).

Every baseline and every training below ``--checkpoints`` (without: the shipped routers) plays the
same episodes. Each fleet has its own panels: what holds on one regime need not on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servegym._command_line import run_main
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.routing.claims import AT_N, CLAIMS, OVER_L
from servegym.experiments.papers.routing.measuring import (
    BASELINES,
    LOADED,
    Options,
    Study,
    TrainedRun,
    at_rates,
    chosen,
    command,
    compared,
    measure,
)
from servegym.experiments.papers.study import ends
from servegym.experiments.papers.verdicts import found_for
from servegym.hardware_profiles import load_fleet

Row = dict[str, Any]
RATES = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0)
FIG11_RATE = 5.0
LIMITS_MS = (20.0, 25.0, 30.0, 35.0, 40.0, 45.0)
POINTS = {"edge-6-heterogeneous": (5.0, 8.0), "paper-linear": (3.0, 5.0)}
"""Rates of the comparisons: the paper's, and the one where a fleet is loaded but not lost."""
SHOWN = ("qos", "latency_ms_per_token", "drop_rate")
PARTS = ("communication_s", "routing_s", "waiting_s", "inference_s")
"""Of the time from end to end."""


def _comparison(name: str, figure: str, arrivals: str, requests: int) -> Any:
    """QoS and latency per token under an arrival process."""
    return Study(
        name,
        figure,
        measure,
        at_rates(
            lambda options, fleet: POINTS.get(fleet, (5.0,)),
            arrivals=arrivals,
            episode_requests=requests,
        ),
        compared(),
        found_for(CLAIMS, name),
        Bars(x="policy", y=SHOWN, panels="point", reference="ceiling"),
    )


def _counts(options: Options) -> list[Row]:
    """Settings of Fig. 11: numbers of experts that a fleet has."""
    settings = []
    for fleet in options.fleets:
        largest = len(load_fleet(fleet).profiles)
        counts = (3, 6, 9, 12) if largest >= 12 else (3, 4, 5, 6)
        env = {"profiles": fleet, "rate": FIG11_RATE}
        settings += [
            {"point": f"{fleet}, N={count}", "profiles": fleet, "experts": count}
            | {"_env": {**env, "num_experts": count}}
            for count in ends(options, [n for n in counts if n <= largest])
        ]
    return settings


def _made_for(options: Options, at: Mapping[str, Any]) -> Sequence[str | TrainedRun]:
    """Heuristics, the fleet's routers, and those that were trained for this number of experts."""
    every = chosen(options, at["profiles"], AT_N)
    trained = [run for run in every if run.label.endswith(AT_N) and run.experts == at["experts"]]
    return [*BASELINES, *chosen(options, at["profiles"]), *trained]


def _limits(options: Options) -> list[Row]:
    """Settings of Fig. 13: latency requirements."""
    settings = []
    for fleet in options.fleets:
        rate = LOADED.get(fleet, 5.0)
        name, env = f"{fleet}, {rate:g}/s", {"profiles": fleet, "rate": rate}
        settings += [
            {"point": f"{name}, L={limit:g} ms", "panel": name, "limit_ms": limit}
            | {"_env": {**env, "latency_requirement_s": limit / 1e3}}
            for limit in ends(options, LIMITS_MS)
        ]
    return settings


STUDIES = (
    _comparison("fig7_poisson", "fig7", "poisson", 1000),
    _comparison("fig9_burstgpt", "fig9", "burstgpt", 2000),
    Study(
        "fig10_end_to_end",
        "fig10",
        measure,
        at_rates(lambda options, fleet: (LOADED.get(fleet, 5.0),)),
        compared(),
        found_for(
            CLAIMS,
            "fig10_end_to_end",
            "The mean is over served requests, and a request is shorter on a model with short "
            "answers: compare latencies together with the QoS and the share of refused requests.",
        ),
        Bars(x="policy", y=(*PARTS, "e2e_s"), panels="point"),
    ),
    Study(
        "fig11_experts",
        "fig11",
        measure,
        _counts,
        _made_for,
        found_for(
            CLAIMS,
            "fig11_experts",
            "A router that reads the graph serves any number of experts N. Routers labelled "
            "'trained at N' are trained for each N.",
        ),
        Lines(x="experts", y=SHOWN, line="policy", panels="profiles", reference="ceiling"),
    ),
    Study(
        "fig12_rate",
        "fig12",
        measure,
        at_rates(lambda options, fleet: ends(options, RATES)),
        compared(),
        found_for(CLAIMS, "fig12_rate"),
        Lines(x="rate", y=SHOWN, line="policy", panels="profiles", reference="ceiling"),
    ),
    Study(
        "fig13_requirement",
        "fig13",
        measure,
        _limits,
        compared(OVER_L),
        found_for(
            CLAIMS,
            "fig13_requirement",
            "Routers labelled 'trained over L' saw a range of L in training; the others saw 30 ms "
            "alone. The state of Baseline RL has no L.",
        ),
        Lines(x="limit_ms", y=SHOWN, line="policy", panels="panel", reference="ceiling"),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=50)

if __name__ == "__main__":
    run_main(main)
