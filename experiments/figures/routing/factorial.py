"""What the state, the estimator's features and the reward are each worth: a factorial of trainings.

``python -m servegym.experiments.figures.routing.factorial --checkpoints runs/routing`` measures the
group ``factorial`` of the training queue: PPO over sets from nothing, with the action impact
estimator's features (Eq. 13-15) or without, for the completed QoS alone or with either reading of
the penalty of Eq. 16, for one fleet and rate. Beside them stand the learners on Baseline RL's
state. All are measured from light load to overload and under bursts, on the same episodes.

The effect of a factor is the change of QoS between cells that differ in nothing else, within seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym.envs._command_line import run_main
from servegym.experiments.figures.plotting import error_bars, legend, pyplot, tidy
from servegym.experiments.figures.routing.claims import RIVALS
from servegym.experiments.figures.routing.common import (
    Options,
    TrainedRun,
    play_once,
    play_trained,
    print_rows,
    run_figures,
    save,
    summarise_parts,
)
from servegym.experiments.figures.run import Picture, Pictures, first_and_last
from servegym.experiments.output import print_table
from servegym.experiments.stats import Interval, paired_change, relative_change
from servegym.experiments.tables import note

__all__ = ["effects_of", "main"]

MODULE = "servegym.experiments.figures.routing.factorial"
STATES = {"off": "without the estimator", "on": "with the estimator"}
REWARDS = ("completed", "new_violations", "literal")
HEURISTICS = ("shortest_queue", "greedy_qos", "priced_greedy")
RATES = (3.0, 5.0, 8.0, 9.0, 10.0, 11.0)
TRAINED = {"edge-6-heterogeneous": 8.0, "paper-linear": 5.0}
"""Arrival rate of the training by fleet; under bursts all are measured at that one too."""
HIGHEST = RATES[-1]
REQUESTS = 500
"""Of an episode."""

Episodes = Mapping[int, Sequence[Mapping[str, Any]]]
"""Rows of the episodes by seed of the training."""


def _qos(cells: Sequence[Episodes], seeds: Sequence[int]) -> list[list[list[float]]]:
    return [[[row["avg_qos"] for row in cell[seed]] for seed in seeds] for cell in cells]


def _contrast(
    played: Mapping[str, Episodes], pairs: Sequence[tuple[str, str]]
) -> tuple[Interval, int] | None:
    """Change over pairs of cells (new, old) within the seeds that all have, and their number."""
    labels = [f"factorial: {name}" for pair in pairs for name in pair]
    if not all(label in played for label in labels):
        return None
    seeds = sorted(set.intersection(*(set(played[label]) for label in labels)))
    if not seeds:
        return None
    new, old = (_qos([played[f"factorial: {pair[k]}"] for pair in pairs], seeds) for k in (0, 1))
    return paired_change(new, old), len(seeds)


def effects_of(played: Mapping[str, Episodes], shortest_queue: float = 0.0) -> list[dict[str, Any]]:
    """The effects of state, estimator and reward at one point.

    Args:
        played: Rows of episodes by label, such as ``factorial: on_literal`` or one of `RIVALS`, and
            by seed.
        shortest_queue: QoS of that heuristic; a rival below it is marked ``undertrained``.

    Returns:
        Rows of ``factor``, ``level`` (what is held), ``reference``, ``trainings``, ``episodes`` and
        ``change_pct`` with its interval. ``claimed`` marks those that a claim of the paper is held
        against: the state, each reward on average over the states.
    """
    found: list[tuple[str, str, str, bool, Interval, int]] = []
    undertrained = False
    rivals = {name: list(played[name].values()) for name in RIVALS if name in played}
    if rivals:
        mean = {
            name: np.mean([summarise_parts([part])["qos"] for part in parts])
            for name, parts in rivals.items()
        }
        best = max(mean, key=mean.__getitem__)
        undertrained = bool(mean[best] < shortest_queue)
        theirs = [[row["avg_qos"] for row in part] for part in rivals[best]]
        for state, words in STATES.items():
            own = played.get(f"factorial: {state}_completed")
            if own is not None:
                (cell,) = _qos([own], sorted(own))
                change = relative_change(cell, theirs)
                found.append(("state", f"graph {words}", best, True, change, len(cell)))
    pairs = {reward: [(f"on_{reward}", f"off_{reward}")] for reward in REWARDS}
    pairs["on average over the rewards"] = [one for (one,) in pairs.values()]
    for level, cells in pairs.items():
        effect = _contrast(played, cells)
        if effect is not None:
            found.append(("estimator", level, "", False, *effect))
    for reward in REWARDS[1:]:
        levels = {words: [state] for state, words in STATES.items()}
        levels["on average over the states"] = list(STATES)
        for level, states in levels.items():
            effect = _contrast(played, [(f"{one}_{reward}", f"{one}_completed") for one in states])
            if effect is not None:
                claimed = len(states) > 1
                found.append(("reward", f"{reward}, {level}", "", claimed, *effect))
    episodes = len(next(iter(next(iter(played.values())).values()))) if played else 0
    return [
        {
            "factor": factor,
            "level": level,
            "reference": reference,
            "undertrained": undertrained and factor == "state",
            "claimed": claimed,
            "trainings": count,
            "episodes": episodes,
            "interval_over": "trainings and episodes" if count > 1 else "episodes",
        }
        | {
            f"change_pct{end}": round(value, 3)
            for end, value in zip(("", "_low", "_high"), change, strict=True)
        }
        for factor, level, reference, claimed, change, count in found
    ]


def _change(row: Mapping[str, Any]) -> str:
    ends = (row[f"change_pct{end}"] for end in ("", "_low", "_high"))
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*ends)


def _trained_for(options: Options, fleet: str) -> list[TrainedRun]:
    rate = (TRAINED[fleet], TRAINED[fleet])
    return [
        run
        for run in options.trained
        if run.profiles == fleet
        and run.rates == rate
        and (run.group == "factorial" or (run.group == "paper" and run.variant in RIVALS))
    ]


def factorial(options: Options) -> None:
    """QoS of every cell at every rate and under bursts, and the effects of the factors."""
    rows: list[dict[str, Any]] = []
    effects: list[dict[str, Any]] = []
    for fleet in options.fleets:
        trained = _trained_for(options, fleet)
        if not any(run.group == "factorial" for run in trained):
            print(f"factorial: no trainings for {fleet}, left out")
            continue
        conditions = [("poisson", rate) for rate in first_and_last(options, RATES)]
        for arrivals, rate in (*conditions, ("burstgpt", TRAINED[fleet])):
            name = f"{fleet}, {rate:g}/s{' in bursts' * (arrivals == 'burstgpt')}"
            point = {"point": name, "profiles": fleet, "arrivals": arrivals, "rate": rate}
            kwargs = {"profiles": fleet, "rate": rate, "arrivals": arrivals}
            kwargs["episode_requests"] = options.requests if options.quick else REQUESTS
            number = options.episodes
            played = play_trained(options, trained, kwargs, number)
            series = {
                one: [play_once(options, one, one.encode(), lambda one=one: one, kwargs, number)]
                for one in HEURISTICS
            }
            series |= {label: list(parts.values()) for label, parts in played.items()}
            rows += [
                {**point, "policy": label, "trainings": len(parts) * (label not in HEURISTICS)}
                | summarise_parts(parts)
                for label, parts in series.items()
            ]
            for row in effects_of(played, summarise_parts(series["shortest_queue"])["qos"]):
                # The paper's claims are of the load trained for; the highest shows how they hold.
                row["claimed"] &= arrivals == "burstgpt" or rate in (TRAINED[fleet], HIGHEST)
                effects.append({**point, **row})
    if not rows:
        return
    print_rows("factorial", rows, ["point"])
    body = [
        [row["point"], row["factor"], row["level"], str(row["trainings"])] + [_change(row)]
        for row in effects
    ]
    print_table("effects on QoS, %", ["point", "factor", "level", "seeds", "change"], body, left=3)
    save(options, "factorial", rows)
    notes = [
        note(
            f"{row['point']}: {row['factor']}, {row['level']}: QoS {_change(row)} %"
            + (f" over {row['reference']}" if row["reference"] else "")
            + f", {row['trainings']} seeds.",
            **row,
        )
        for row in effects
        if row["claimed"] or "average" in row["level"]
    ]
    how = (
        "Effects are changes of QoS between cells that differ in one factor, within seeds, with "
        "intervals over seeds and episodes together; 'state' is the graph with the completed QoS "
        "alone over the best learner on Baseline RL's state."
    )
    save(options, "factorial_effects", effects, how, *notes)


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    fleets = list(dict.fromkeys(row["profiles"] for row in rows))
    figure, axes = pyplot().subplots(
        1, len(fleets), figsize=(6.2 * len(fleets), 4.2), squeeze=False, layout="constrained"
    )
    order = list(dict.fromkeys(row["policy"] for row in rows))
    for axis, fleet in zip(axes[0], fleets, strict=True):
        for index, policy in enumerate(order):
            own = [
                row
                for row in rows
                if (row["profiles"], row["policy"], row["arrivals"]) == (fleet, policy, "poisson")
            ]
            if own:
                values, bars = error_bars(own, "qos")
                cell = policy.startswith("factorial")
                look = {"linewidth": 2.0 if cell else 1.0, "linestyle": "-" if cell else "--"}
                label = policy.removeprefix("factorial: ")
                at = [row["rate"] for row in own]
                axis.errorbar(
                    at, values, bars, capsize=2, label=label, color=f"C{index % 10}", **look
                )
        axis.set(title=fleet, xlabel="arrival rate, requests/s", ylabel="average QoS")
        tidy(axis)
    legend(figure, axes[0, 0])
    return figure


def _plot_effects(rows: Sequence[Mapping[str, Any]]) -> Any:
    points = list(dict.fromkeys(row["point"] for row in rows if row["claimed"]))
    figure, axes = pyplot().subplots(
        -(-len(points) // 2),
        2,
        figsize=(13, 2.4 * -(-len(points) // 2)),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(points) :]:
        axis.set_axis_off()
    for axis, point in zip(axes.flat, points, strict=False):
        own = [row for row in rows if row["point"] == point]
        values, bars = error_bars(own, "change_pct")
        at = -np.arange(len(own))
        axis.errorbar(values, at, xerr=bars, fmt="o", capsize=2)
        axis.axvline(0.0, color="black", linewidth=1)
        axis.set_yticks(at, [f"{row['factor']}: {row['level']}" for row in own], fontsize=7)
        axis.set(title=point, xlabel="change of QoS, %")
        tidy(axis)
    return figure


FIGURES = {"factorial": factorial}
PICTURES: Pictures = {
    "factorial": _plot,
    "factorial_effects": Picture(_plot_effects, ("factorial_effects",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=20)


if __name__ == "__main__":
    run_main(main)
