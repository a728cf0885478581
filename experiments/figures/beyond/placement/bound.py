"""How much a controller of placements can gain at all in ``edge_hetero`` and ``drift``.

::

    python -m servegym.experiments.figures.beyond.placement.bound

* ``phases``: ``drift`` gives the servers other tasks every quarter of an hour. Each of its phases
  is played for ever, with whole layers, with the one placement that ``best_start`` found for all
  phases together, and with the one that it finds for the phase. The last is what a controller
  would have that knows every change beforehand and moves experts in no time; the seconds that the
  moves between two phases take on the links are in the table, too.
* ``climb``: a local search in the simulator (exchanges of experts and layers, see
  `latency_local_search`) that begins with the placement of ``best_start``, ``--climb-calls`` expert
  calls long, on training requests.

Placements are found on prompts of the training split and played on those of the evaluation split.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym.baselines.expert_placement.heuristics import whole_layer
from servegym.baselines.expert_placement.initial_placement import best_start
from servegym.baselines.expert_placement.link_queues import LinkQueueModel
from servegym.baselines.expert_placement.simulation_search import (
    SimulatedLatency,
    latency_local_search,
)
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.envs.expert_placement.decode import assign_gpus
from servegym.experiments.figures.placement.common import SEED, interval, setting, versus
from servegym.experiments.figures.plotting import error_bars, legend, pyplot, tidy
from servegym.experiments.figures.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.output import print_table

__all__ = ["main", "play"]

MODULE = "servegym.experiments.figures.beyond.placement.bound"
EPISODES = 6
PHASES = 4
STEPS, TRIES = 2_000_000, 1
SEARCH: dict[str, Any] = {"tries": 3, "steps": 3_000_000, "seed": 1}
QUICK_SEARCH: dict[str, Any] = {"tries": 1, "steps": 1_000, "swaps": 4, "seed": 1}
ALL_PHASES_S = 75.0
"""Seconds between moves of the tasks where one placement is for all phases: an epoch has all."""


class Options(FigureOptions):
    """The command line.

    Attributes:
        climb_calls: Expert calls of the local search.
    """

    climb_calls: float


def play(problem: Problem, held: Any, episodes: int, seed: int = SEED) -> np.ndarray:
    """Mean latency in seconds of each episode under one placement.

    Args:
        problem: The problem; episodes have its number of epochs.
        held: Bool (N, L, E), experts of each server.
        episodes: Episodes to play.
        seed: Of the first; the same episodes for every placement.
    """
    c, system, found = problem.cluster, PlacementEpisode(problem), []
    none = np.zeros((c.num_gpus, c.layers, c.experts), np.uint8)
    for k in range(episodes):
        system.begin(np.random.default_rng(seed + k))
        plan = assign_gpus(c, held, system.counts().sum(axis=0).astype(np.float64), none)
        system.simulator.begin(system.requests, plan)
        system.simulator.run()
        found.append(system.simulator.latencies().mean())
    return np.array(found)


def _start(quick: bool, **kwargs: Any) -> Any:
    """The placement that ``best_start`` finds for a scenario."""
    known = PlacementSystem.from_problem(build_problem(**kwargs), own=True)
    return best_start(known, **(QUICK_SEARCH if quick else SEARCH))


def phases(options: Options) -> None:
    """Every phase of ``drift`` for ever: what knowing it is worth."""
    drift = build_problem(scenario="drift")
    tasks, servers = drift.tasks, drift.cluster.num_servers
    mixture = _start(options.quick, scenario="drift", rotate_s=ALL_PHASES_S).held
    rows, plans, gained = [], [], []
    epochs = 1 if options.quick else 6
    for phase in range(2 if options.quick else PHASES):
        turned = [tasks[(n + phase) % len(tasks)] for n in range(servers)]
        kwargs: dict[str, Any] = {"scenario": "edge_hetero", "tasks": turned, "epochs": epochs}
        known = PlacementSystem.from_problem(build_problem(**kwargs), own=True)
        new = build_problem(**kwargs, split="eval")
        c = new.cluster
        found = best_start(known, tries=TRIES, steps=1_000 if options.quick else STEPS, seed=phase)
        plans.append(found.held)
        counts = np.ones(found.held.shape)
        layers = c.server_view(whole_layer(counts, c.slots, c.gpu_server))
        seconds = {
            name: play(new, held, options.episodes)
            for name, held in (
                ("whole_layer", layers),
                ("for all phases", mixture),
                ("for this phase", found.held),
            )
        }
        moved = plans[-1] & ~plans[-2] if phase else np.zeros_like(found.held)
        # Each server loads over the slowest link to it, all servers at once.
        rate = np.where(np.eye(servers, dtype=bool), np.inf, c.link_bytes_s).min(axis=0)
        move_s = float((moved.sum(axis=(1, 2)) * c.expert_bytes / rate).max())
        for name, values in seconds.items():
            rows.append(
                {
                    "phase": phase,
                    "tasks": " ".join(turned),
                    "placement": name,
                    **interval(values, "mean_latency_s"),
                    "loads": float(moved.sum()),
                    "loads_network_s": move_s,
                }
            )
        gained.append(seconds)
        print(f"phase {phase}: " + ", ".join(f"{n} {v.mean():.2f} s" for n, v in seconds.items()))
    every = {name: np.concatenate([g[name] for g in gained]) for name in gained[0]}
    loads = [row["loads"] for row in rows if row["phase"] and row["placement"] == "for this phase"]
    spent = [row["loads_network_s"] for row in rows if row["phase"]]
    notes = [
        f"all phases: against whole_layer, the placement for all of them takes "
        f"{_change(every, 'for all phases')}, the one for each phase "
        f"{_change(every, 'for this phase')}",
        "knowing every phase beforehand and moving in no time changes latency by "
        f"{versus(every['for this phase'], every['for all phases'])} against one placement for "
        f"all phases; the moves are {min(loads):.0f} to {max(loads):.0f} loads a change, "
        f"{min(spent):.0f} to {max(spent):.0f} s of a link's time in a phase of "
        f"{drift.rotate_s:.0f} s",
    ]
    settings = {"setting": setting(drift), "epochs": epochs, "annealing_steps": STEPS}
    save(options, "bound_phases", rows, *notes, settings=settings)
    print_table(
        "Phases of drift",
        ["phase", "placement", "mean", "low", "high"],
        [
            [
                str(r["phase"]),
                r["placement"],
                *(
                    f"{r[k]:.2f}"
                    for k in ("mean_latency_s", "mean_latency_s_low", "mean_latency_s_high")
                ),
            ]
            for r in rows
        ],
    )


def _change(seconds: dict[str, np.ndarray], name: str) -> str:
    return versus(seconds[name], seconds["whole_layer"])


def climb(options: Options) -> None:
    """Whether a search in the simulator gets below `best_start`."""
    known = build_problem(scenario="edge_hetero", action_mode="placement")
    new = build_problem(scenario="edge_hetero", split="eval", epochs=1 if options.quick else 12)
    described = PlacementSystem.from_problem(known, own=True)
    c, counts = known.cluster, LinkQueueModel(described).counts
    start = _start(options.quick, scenario="edge_hetero").held
    plan = assign_gpus(c, start, counts.sum(axis=0), np.zeros((c.num_gpus, *start.shape[1:])))
    calls = min(options.climb_calls, 1e6) if options.quick else options.climb_calls
    rehearsal = SimulatedLatency.of_counts(
        described, counts, round(3 * known.expected_arrivals), seed=SEED
    )
    before = rehearsal.latency_s(plan)
    found = latency_local_search(
        rehearsal,
        counts,
        c.slots,
        c.gpu_server,
        [plan],
        steps=10**9,
        budget_calls=int(calls),
        seed=SEED,
    )
    after = rehearsal.latency_s(found)
    layers = whole_layer(counts, c.slots, c.gpu_server)
    seconds = {
        name: play(new, c.server_view(z), options.episodes)
        for name, z in (("whole_layer", layers), ("start", plan), ("start, climbed", found))
    }
    rows = [
        {"placement": name, **interval(values, "mean_latency_s")}
        for name, values in seconds.items()
    ]
    changed = int((c.server_view(found) & ~start).sum())
    notes = [
        f"{calls:.2g} calls of local search from the start change its latency "
        f"on the requests searched on by {100 * (after / before - 1):+.1f} % ({changed} experts "
        f"loaded), on evaluation episodes by {versus(seconds['start, climbed'], seconds['start'])}",
        f"whole_layer {seconds['whole_layer'].mean():.2f} s; against it, the start "
        f"takes {_change(seconds, 'start')}, climbed {_change(seconds, 'start, climbed')}",
    ]
    save(options, "bound_climb", rows, *notes, settings={"setting": setting(known)})
    print_table(
        "edge_hetero",
        ["placement", "mean", "low", "high"],
        [
            [
                r["placement"],
                *(
                    f"{r[k]:.3f}"
                    for k in ("mean_latency_s", "mean_latency_s_low", "mean_latency_s_high")
                ),
            ]
            for r in rows
        ],
    )


def _plot_phases(rows: Sequence[Mapping[str, Any]]) -> Any:
    names = list(dict.fromkeys(row["placement"] for row in rows))
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for k, name in enumerate(names):
        own = [row for row in rows if row["placement"] == name]
        values, bars = error_bars(own, "mean_latency_s")
        at = np.arange(len(own)) + 0.27 * (k - 1)
        axis.bar(
            at,
            values,
            0.25,
            yerr=bars,
            label=name,
            error_kw={"lw": 1},
            color=("0.7", "tab:blue", "tab:red")[k],
        )
    axis.set(
        ylabel="mean latency, s",
        xlabel="tasks of the servers",
        title="Each phase of drift, played for ever",
    )
    labels = [row["tasks"].replace(" ", "\n") for row in rows if row["placement"] == names[0]]
    axis.set_xticks(np.arange(len(labels)), labels, fontsize=8)
    tidy(axis)
    legend(figure, axis)
    return figure


FIGURES: dict[str, Any] = {"phases": phases, "climb": climb}
PICTURES: Pictures = {"bound_phases": _plot_phases}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures that the command line names."""
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, EPISODES)
    parser.add_argument(
        "--climb-calls",
        type=float,
        default=5e8,
        dest="climb_calls",
        help="expert calls of the local search (5e8)",
    )
    options = command_line(parser, argv, Options())
    if not options.climb_calls >= 1:
        raise ValueError(f"climb_calls is {options.climb_calls}; allowed is 1 or more")
    return run_chosen(FIGURES, PICTURES, options)


if __name__ == "__main__":
    sys.exit(main())
