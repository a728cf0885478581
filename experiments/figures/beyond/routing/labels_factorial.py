"""What labels by rollouts of its own policy, and SAC's own steps, are worth to SAC-HAN.

::

    python -m servegym.experiments.figures.routing.training --only labels_ --runs DIR
    python -m servegym.experiments.figures.beyond.routing.labels_factorial --checkpoints DIR

trains the group ``labels`` of `training_runs`, each cell with five seeds and from nothing, and
plays every training, `priced_greedy` and `expected_qos` on the same evaluation episodes, whose
seeds no other table has. A training's policy is its last one, which no evaluation chose. A gain is
the QoS of a cell less that of a heuristic as registered, with its interval over trainings and
episodes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servegym.agents import load_policy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs._command_line import run_main
from servegym.experiments.evaluate import evaluate
from servegym.experiments.figures.routing.common import (
    ENV_ID,
    Options,
    gain,
    run_figures,
    save,
    summarise_parts,
)
from servegym.experiments.figures.routing.training_runs import LABELS
from servegym.experiments.output import print_table
from servegym.experiments.tables import Note, note

__all__ = ["main"]

MODULE = "servegym.experiments.figures.beyond.routing.labels_factorial"
FLEET = "edge-6-heterogeneous"
RATES = (5.0, 8.0, 9.0, 10.0)
SEED = 8_200_000
"""Seed of the first evaluation episode."""
HEURISTICS = ("priced_greedy", "expected_qos")


def labels_factorial(options: Options) -> None:
    """QoS of every cell at four rates, and what it gains over two heuristics."""
    cells: dict[str, list[Any]] = {}
    for one in options.trained:
        group, _, rest = one.path.parent.name.partition("_")
        cell = rest.partition("_het")[0]
        if group == "labels" and cell in LABELS:
            cells.setdefault(cell, []).append(one)
    if not cells:
        print("labels_factorial: no trainings of the group labels (--checkpoints FOLDER), left out")
        return
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    for rate in RATES[::2] if options.quick else RATES:
        kwargs = {"profiles": FLEET, "rate": rate, "episode_requests": options.requests}
        system = RoutingSystem.from_kwargs(**kwargs)

        def played(policy: Any, kwargs: dict[str, Any] = kwargs) -> list[dict[str, Any]]:
            number = options.episodes
            return evaluate(ENV_ID, [policy], number, SEED, kwargs, num_envs=min(number, 64))

        parts = {name: [played(name)] for name in HEURISTICS}
        for cell, trained in cells.items():
            parts[cell] = [
                played(load_policy(one.path.with_name("last.safetensors"), system))
                for one in trained
            ]
        for name, each in parts.items():
            row = {"rate": rate, "policy": name, "trainings": len(each) * (name in cells)}
            row |= summarise_parts(each)
            for heuristic in HEURISTICS:
                row |= gain(f"over_{heuristic}", each, parts[heuristic][0])
            rows.append(row)
            if name in cells:
                notes += [_finding(row, heuristic) for heuristic in HEURISTICS]
    print_table(
        "SAC-HAN from nothing, with and without labels by rollouts of its own policy",
        ["rate", "policy", "seeds", "QoS", *(f"over {name}" for name in HEURISTICS)],
        [
            [f"{row['rate']:g}", row["policy"], str(row["trainings"]), f"{row['qos']:.4f}"]
            + [_interval(row, name) for name in HEURISTICS]
            for row in rows
        ],
    )
    save(options, "labels_factorial", rows, *notes)


def _interval(row: dict[str, Any], heuristic: str) -> str:
    value, low, high = (row[f"over_{heuristic}{end}"] for end in ("", "_low", "_high"))
    return f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"


def _finding(row: dict[str, Any], heuristic: str) -> Note:
    above, below = row[f"over_{heuristic}_low"] > 0, row[f"over_{heuristic}_high"] < 0
    verdict = "above" if above else "below" if below else "not distinguished from"
    text = (
        f"{row['rate']:g} requests/s: SAC-HAN ({row['policy']}) is {verdict} {heuristic}: "
        f"QoS {_interval(row, heuristic)}, {row['trainings']} trainings."
    )
    return note(text, verdict=verdict, rate=row["rate"], policy=row["policy"], rival=heuristic)


FIGURES = {"labels_factorial": labels_factorial}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, {}, argv, __doc__, MODULE, episodes=50)


if __name__ == "__main__":
    run_main(main)
