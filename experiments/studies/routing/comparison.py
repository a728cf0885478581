r"""What the paper's state and reward are worth: one learner in four settings, five trainings each.

Each is soft actor-critic from random weights at 8 requests/s, with the graph
(`agents.sac_han`) or the experts' rows (`agents.baseline_rl`) as its state and the reward
``qos_aware`` (Eq. 16) or ``completed_qos``. The paper's SAC-HAN, Baseline RL + DSA and Baseline RL
are three of them. The trainings come first, with their curves and controls::

    python -m servegym.experiments.studies.routing.learning_curves --figure learning_sac_han \
        learning_baseline_rl_dsa learning_baseline_rl learning_baseline_rl_qos_aware
    python -m servegym.experiments.studies.routing.comparison

The last policies play the same evaluation episodes. An effect is a change of the mean QoS; its
interval is over trainings and episodes together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from servegym._command_line import run_main
from servegym.experiments.evaluation.stats import contrast, mean, over_trainings
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.study import Study, command, interval_columns
from servegym.experiments.studies.routing.learning_curves import FILE, SHUFFLED, played

__all__ = ["SETTINGS", "EFFECTS", "STUDIES", "effects_of", "main"]

RATE = 8.0
SETTINGS = {
    ("graph", "qos_aware"): "learning_sac_han",
    ("graph", "completed_qos"): "learning_baseline_rl_dsa",
    ("rows", "qos_aware"): "learning_baseline_rl_qos_aware",
    ("rows", "completed_qos"): "learning_baseline_rl",
}
"""State and reward of a setting -> folder of its trainings in ``--runs``."""
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
"""Factor and level -> weights of the settings' logarithms, and whether the paper claims it."""


class Options(study.Options):
    """The command line.

    Attributes:
        runs: Folder with the trainings of every setting in a folder of their own.
    """

    runs: Path


def effects_of(
    settings: Mapping[tuple[str, str], Sequence[ArrayLike]], shortest_queue: float = 0.0
) -> list[dict[str, Any]]:
    """The effects of state and reward, and their interaction.

    Args:
        settings: QoS (episodes,) of every training of each of `SETTINGS`, on the same episodes.
        shortest_queue: QoS of that heuristic; what is compared with a setting below it is marked
            ``undertrained``.

    Returns:
        Rows of ``factor``, ``level``, ``change_pct`` with its interval, ``trainings`` (the fewest
        of a setting), ``claimed`` and ``undertrained``.
    """
    named = {f"{state}, {reward}": settings[state, reward] for state, reward in SETTINGS}
    level = [over_trainings(setting, statistic=mean).value for setting in named.values()]
    rows = []
    for (factor, held), (weights, claimed) in EFFECTS.items():
        change = contrast(named, weights, mean)
        low = any(w < 0 and q < shortest_queue for w, q in zip(weights, level, strict=True))
        rows.append(
            {"factor": factor, "level": held, "claimed": claimed, "undertrained": low}
            | {"trainings": min(map(len, named.values()))}
            | interval_columns("change_pct", [round(value, 3) for value in change])
        )
    return rows


def _trainings(folder: Path) -> list[Path]:
    """The finished trainings of a setting, without its control."""
    found = sorted(path.parent for path in folder.glob(f"*/{FILE}"))
    return [run for run in found if SHUFFLED not in run.name]


def _comparison(options: Options, *_: Any) -> list[dict[str, Any]]:
    """Play the last policies of all settings; ``_levels`` are their QoS and the heuristics'."""
    more = {"episode_requests": 50} if options.quick else {}
    runs = {setting: _trainings(options.runs / name) for setting, name in SETTINGS.items()}
    missing = [SETTINGS[setting] for setting, own in runs.items() if not own]
    if missing:
        print(f"comparison: no trainings of {', '.join(missing)} in {options.runs}, left out")
        return []
    settings = {
        setting: [played(run / "last.safetensors", RATE, options.episodes, **more) for run in own]
        for setting, own in runs.items()
    }
    scores = {
        f"{state} with {reward} ({len(own)} trainings)": own
        for (state, reward), own in settings.items()
    }
    scores |= {name: [played(name, RATE, options.episodes, **more)] for name in BESIDE}
    levels = {name: over_trainings(own, statistic=mean) for name, own in scores.items()}
    point = {"point": f"edge-6-heterogeneous, {RATE:g}/s", "episodes": options.episodes}
    rows = effects_of(settings, levels["shortest_queue"].value)
    return [point | row | {"_levels": levels} for row in rows]


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    for name, qos in rows[0]["_levels"].items():
        text = f"{name}: QoS {qos.value:.3f} [{qos.low:.3f}, {qos.high:.3f}]."
        yield note(text, policy=name, qos=qos.value, low=qos.low, high=qos.high)
    for row in rows:
        change, low, high = (row[f"change_pct{end}"] for end in ("", "_low", "_high"))
        yield (f"{row['factor']}, {row['level']}: QoS {change:+.1f} [{low:+.1f}, {high:+.1f}] %.")


def _facts(options: Options) -> dict[str, Any]:
    """The arguments of each setting's first training."""
    found = {name: _trainings(options.runs / name)[0] / FILE for name in SETTINGS.values()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items()}


STUDIES = (
    Study("comparison", "comparison", _comparison, notes=_notes, facts=_facts, packages=("torch",)),
)


def _add(parser: argparse.ArgumentParser) -> None:
    words = "folder with the trainings of every setting (runs/learning)"
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help=words)


main = command(__spec__.name, __doc__, STUDIES, 20, _add)

if __name__ == "__main__":
    run_main(main)
