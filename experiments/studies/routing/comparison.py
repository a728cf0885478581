r"""What the paper's state and reward are worth: four cells of one learner, five trainings each.

Every cell is soft actor-critic from random weights at 8 requests/s, with the graph
(`agents.sac_han`) or the experts' rows (`agents.baseline_rl`) as its state and the reward
``qos_aware`` (Eq. 16) or ``completed_qos``. The paper's SAC-HAN, Baseline RL + DSA and Baseline RL
are three of them. The trainings come first, with their curves and controls::

    alias curves="python -m servegym.experiments.studies.routing.learning_curves"
    curves --agent sac_han --table learning_sac_han \
        --flags="--set rate=8 --eval_rates 8"
    curves --agent sac_han --table learning_baseline_rl_dsa \
        --flags="--set rate=8 reward=completed_qos --eval_rates 8"
    curves --agent baseline_rl --table learning_baseline_rl \
        --flags="--set rate=8 --eval_rates 8"
    curves --agent baseline_rl --table learning_baseline_rl_qos_aware \
        --flags="--set rate=8 reward=qos_aware --eval_rates 8"
    python -m servegym.experiments.studies.routing.comparison

``--flags`` also takes each cell's budget, as in ``--total_timesteps 600000``, and ``--seeds``
shares a cell between processes. One SAC-HAN for all loads is not part of the comparison::

    curves --agent sac_han --table learning_sac_han_rates --rates 5 8 10

The last policies play the same evaluation episodes. An effect is a change of the mean QoS; its
interval is over trainings and episodes together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.stats import contrast, mean, over_trainings
from servegym.experiments.evaluation.tables import note
from servegym.experiments.papers.run import (
    FigureOptions,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.studies.routing.learning_curves import FILE, SHUFFLED, played

__all__ = ["CELLS", "EFFECTS", "effects_of", "main"]

MODULE = "servegym.experiments.studies.routing.comparison"
RATE = 8.0
CELLS = {
    ("graph", "qos_aware"): "learning_sac_han",
    ("graph", "completed_qos"): "learning_baseline_rl_dsa",
    ("rows", "qos_aware"): "learning_baseline_rl_qos_aware",
    ("rows", "completed_qos"): "learning_baseline_rl",
}
"""State and reward of a cell -> folder of its trainings in ``--runs``."""
BESIDE = ("shortest_queue", "least_outstanding", "priced_greedy", "expected_qos")
"""Heuristics whose level is told."""
EFFECTS = {
    ("state", "completed_qos"): ((0, 1, 0, -1), True),
    ("state", "qos_aware"): ((1, 0, -1, 0), False),
    ("state", "mean over the rewards"): ((0.5, 0.5, -0.5, -0.5), False),
    ("reward", "graph"): ((1, -1, 0, 0), True),
    ("reward", "rows"): ((0, 0, 1, -1), False),
    ("reward", "mean over the states"): ((0.5, -0.5, 0.5, -0.5), False),
    ("interaction", "reward's effect on the graph over that on the rows"): ((1, -1, -1, 1), False),
    ("both", "SAC-HAN over Baseline RL"): ((1, 0, 0, -1), False),
}
"""Factor and level -> weights of the logarithms of the cells, and whether the paper claims it."""


class Options(FigureOptions):
    """The command line.

    Attributes:
        runs: Folder with the trainings of every cell in a folder of their own.
    """

    runs: Path


def effects_of(
    cells: Mapping[tuple[str, str], Sequence[ArrayLike]], shortest_queue: float = 0.0
) -> list[dict[str, Any]]:
    """The effects of state and reward, and their interaction.

    Args:
        cells: QoS (episodes,) of every training of every cell of `CELLS`, on the same episodes.
        shortest_queue: QoS of that heuristic; what is compared with a cell below it is marked
            ``undertrained``.

    Returns:
        Rows of ``factor``, ``level``, ``change_pct`` with its interval, ``trainings`` (the fewest
        of a cell), ``claimed`` and ``undertrained``.
    """
    named = {f"{state}, {reward}": cells[state, reward] for state, reward in CELLS}
    level = [over_trainings(cell, statistic=mean).value for cell in named.values()]
    rows = []
    for (factor, held), (weights, claimed) in EFFECTS.items():
        change = contrast(named, weights, mean)
        low = any(w < 0 and q < shortest_queue for w, q in zip(weights, level, strict=True))
        rows.append(
            {"factor": factor, "level": held, "claimed": claimed, "undertrained": low}
            | {"trainings": min(map(len, named.values()))}
            | {
                f"change_pct{end}": round(value, 3)
                for end, value in zip(("", "_low", "_high"), change, strict=True)
            }
        )
    return rows


def _trainings(folder: Path) -> list[Path]:
    """The finished trainings of a cell, without its control."""
    found = sorted(path.parent for path in folder.glob(f"*/{FILE}"))
    return [run for run in found if SHUFFLED not in run.name]


def comparison(options: Options) -> None:
    """Play the last policies of all cells and write the effects."""
    more = {"episode_requests": 50} if options.quick else {}
    runs = {cell: _trainings(options.runs / name) for cell, name in CELLS.items()}
    missing = [CELLS[cell] for cell, own in runs.items() if not own]
    if missing:
        print(f"comparison: no trainings of {', '.join(missing)} in {options.runs}, left out")
        return
    cells = {
        cell: [played(run / "last.safetensors", RATE, options.episodes, **more) for run in own]
        for cell, own in runs.items()
    }
    beside = {name: [played(name, RATE, options.episodes, **more)] for name in BESIDE}
    found = {name: over_trainings(own, statistic=mean) for name, own in beside.items()}
    rows = effects_of(cells, found["shortest_queue"].value)
    point = {"point": f"edge-6-heterogeneous, {RATE:g}/s", "episodes": options.episodes}
    rows = [point | row for row in rows]
    changes = [
        "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(row[f"change_pct{e}"] for e in ("", "_low", "_high")))
        for row in rows
    ]
    body = [[row["factor"], row["level"], one] for row, one in zip(rows, changes, strict=True)]
    print_table("effects on QoS, %", ["factor", "level", "change"], body, left=3)
    levels = {
        f"{state} with {reward} ({len(runs[state, reward])} trainings)": over_trainings(
            own, statistic=mean
        )
        for (state, reward), own in cells.items()
    }
    notes = [
        note(
            f"{name}: QoS {qos.value:.3f} [{qos.low:.3f}, {qos.high:.3f}].",
            policy=name,
            qos=qos.value,
            low=qos.low,
            high=qos.high,
        )
        for name, qos in (levels | found).items()
    ]
    notes += [
        note(f"{row['factor']}, {row['level']}: QoS {one} %.", **row)
        for row, one in zip(rows, changes, strict=True)
    ]
    arguments = {
        CELLS[cell]: json.loads((own[0] / FILE).read_text(encoding="utf-8"))
        for cell, own in runs.items()
    }
    save(options, "comparison", rows, *notes, settings=arguments, packages=["torch"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    parser: argparse.ArgumentParser = figure_parser(("comparison",), __doc__, MODULE, episodes=20)
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/learning"),
        help="folder with the trainings of every cell (runs/learning)",
    )
    return run_chosen({"comparison": comparison}, {}, command_line(parser, argv, Options()))


if __name__ == "__main__":
    run_main(main)
