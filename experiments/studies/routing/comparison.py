"""What state, network and reward of the learner are worth, one thing changed at a time.

``comparison``: soft actor-critic from random weights at 8 requests/s, with three states (the
paper's 18 numbers, its Eq. 6-12, all features), two networks (`agents.baseline_rl` over the
experts' rows, `agents.sac_han` over the graph; 18 numbers have no requests to make a graph of) and
three rewards (completed QoS, Eq. 16, both as the environment pays them, and Eq. 16 with shaping).

Trainings whose folders in ``--runs`` hold the same arguments are not made again, and ``--seeds``
makes some alone, so that processes can share the work. The last policies play the same evaluation
episodes; intervals are over trainings and episodes together.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from servegym._command_line import run_main
from servegym.experiments.evaluation.stats import contrast, mean, over_trainings
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.study import Study, command, interval_columns
from servegym.experiments.studies.routing.learning_curves import SEEDS, played, train

__all__ = ["EFFECTS", "SETTINGS", "STUDIES", "effects_of", "main"]

RATE = 8.0
STEPS = "--total_timesteps 160000 --eval_every 160000"
STATES = {"18 numbers": "experts", "Eq. 6-12": "paper", "features": "features"}
REWARDS = {
    "completed": "--set rate=8 reward=completed_qos --shaping False",
    "Eq. 16": "--set rate=8 reward=qos_aware --shaping False",
    "Eq. 16, shaped": "--set rate=8 reward=qos_aware",
}
NETWORKS = {"rows": ("baseline_rl", "--rows"), "HAN": ("sac_han", "--nodes")}
Setting = tuple[str, str, str]
SETTINGS: dict[Setting, tuple[str, str]] = {
    (state, network, reward): (agent, f"{flag} {name} {flags} {STEPS} --eval_rates 8")
    for state, name in STATES.items()
    for network, (agent, flag) in NETWORKS.items()
    for reward, flags in REWARDS.items()
    if (state, network) != ("18 numbers", "HAN")
}
"""State, network and reward -> agent and its flags."""

_COMPLETED, _PAID, _SHAPED = REWARDS
EFFECTS: dict[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Any], bool]] = {
    ("graph", "Eq. 6-12"): (
        {"state": "Eq. 6-12", "network": "HAN"},
        {"state": "Eq. 6-12", "network": "rows"},
        False,
    ),
    ("graph", "features"): (
        {"state": "features", "network": "HAN"},
        {"state": "features", "network": "rows"},
        False,
    ),
    ("graph", "features, shaped"): (
        {"state": "features", "network": "HAN", "reward": _SHAPED},
        {"state": "features", "network": "rows", "reward": _SHAPED},
        False,
    ),
    ("state", "Eq. 6-12 over 18 numbers, rows"): (
        {"state": "Eq. 6-12", "network": "rows"},
        {"state": "18 numbers"},
        False,
    ),
    ("state", "features over Eq. 6-12"): ({"state": "features"}, {"state": "Eq. 6-12"}, False),
    ("state", "Baseline RL + DSA over Baseline RL"): (
        {"state": "Eq. 6-12", "network": "HAN", "reward": _COMPLETED},
        {"state": "18 numbers", "reward": _COMPLETED},
        True,
    ),
    ("reward", "Eq. 16 over completed"): ({"reward": _PAID}, {"reward": _COMPLETED}, False),
    ("reward", "shaping over none"): ({"reward": _SHAPED}, {"reward": _PAID}, False),
    ("reward", "SAC-HAN over Baseline RL + DSA"): (
        {"state": "Eq. 6-12", "network": "HAN", "reward": _PAID},
        {"state": "Eq. 6-12", "network": "HAN", "reward": _COMPLETED},
        True,
    ),
    ("both", "SAC-HAN over Baseline RL"): (
        {"state": "Eq. 6-12", "network": "HAN", "reward": _PAID},
        {"state": "18 numbers", "reward": _COMPLETED},
        False,
    ),
}
"""Factor and level -> the settings whose mean is compared, with those of which, and whether the
paper claims it."""
LONG = {"rate": 50.0, "running_capacity": 64}
"""Where rows cannot sum up the queues: an expert runs up to 64 requests of unequal contexts."""
LONG_FLAGS = "--set rate=50 running_capacity=64 episode_requests=2000 max_episode_steps=1999 "
LONG_FLAGS += "--num_envs 64 --total_timesteps 160000 --eval_every 160000 --eval_rates 50"
BESIDE = ("shortest_queue", "least_outstanding", "priced_greedy", "expected_qos", "sac_han_paper")
"""Heuristics whose level is told, and the paper's own agent as shipped."""


class Options(study.Options):
    """The command line.

    Attributes:
        runs: Folder of the trainings, with a folder a setting.
        seeds: Those to train now, without a table; none: all, and measure them.
    """

    runs: Path
    seeds: Sequence[int]


def effects_of(
    settings: Mapping[Setting, Sequence[ArrayLike]], shortest_queue: float = 0.0
) -> list[dict[str, Any]]:
    """The effects of graph, state and reward.

    Args:
        settings: QoS (episodes,) of every training of each of `SETTINGS`, on the same episodes.
        shortest_queue: QoS of that heuristic; what is compared with a setting below it is marked
            ``undertrained``.

    Returns:
        Rows of ``factor``, ``level``, ``change_pct`` with its interval, ``trainings`` (the fewest
        of a setting), ``claimed`` and ``undertrained``.
    """

    def chosen(wanted: Mapping[str, str]) -> list[bool]:
        keys = ("state", "network", "reward")
        return [
            all(wanted.get(key, name) == name for key, name in zip(keys, setting, strict=True))
            for setting in settings
        ]

    named = {", ".join(setting): own for setting, own in settings.items()}
    level = [over_trainings(own, statistic=mean).value for own in named.values()]
    rows = []
    for (factor, held), (over, under, claimed) in EFFECTS.items():
        above, below = np.array(chosen(over)), np.array(chosen(under))
        weights = above / above.sum() - below / below.sum()
        change = contrast(named, weights.tolist(), mean)
        low = any(below & (np.array(level) < shortest_queue))
        rows.append(
            {"factor": factor, "level": held, "claimed": claimed, "undertrained": bool(low)}
            | {"trainings": min(map(len, named.values()))}
            | interval_columns("change_pct", [round(value, 3) for value in change])
        )
    return rows


def _trained(options: Options, folder: str, agent: str, flags: str) -> list[Path]:
    """Checkpoints of a setting's trainings, made if they are not there."""
    words = shlex.split(flags) + ["--total_timesteps", "2000"] * options.quick
    seeds = options.seeds or (SEEDS[:2] if options.quick else SEEDS)
    runs = [train(agent, words, seed, options.runs / folder, shuffled=False) for seed in seeds]
    return [run / "last.safetensors" for run in runs]


def _more(options: Options) -> dict[str, Any]:
    return {"episode_requests": 50} if options.quick else {}


def _comparison(options: Options, *_: Any) -> list[dict[str, Any]]:
    """Play the last policies of all settings beside the heuristics."""
    runs = {
        setting: _trained(options, "_".join(setting).replace(" ", ""), *how)
        for setting, how in SETTINGS.items()
    }
    long = {
        agent: _trained(options, f"long_{network}", agent, LONG_FLAGS)
        for network, (agent, _) in NETWORKS.items()
    }
    if options.seeds:
        return []
    scores: dict[Any, list[Any]] = {
        setting: [played(run, RATE, options.episodes, **_more(options)) for run in own]
        for setting, own in runs.items()
    }
    effects = dict(scores)
    scores |= {
        (name, "", ""): [played(name, RATE, options.episodes, **_more(options))] for name in BESIDE
    }
    levels = {key: over_trainings(own, statistic=mean) for key, own in scores.items()}
    point = {"point": f"edge-6-heterogeneous, {RATE:g}/s", "episodes": options.episodes}
    rows = effects_of(effects, levels["shortest_queue", "", ""].value)
    rows.append(_long_queues(options, long))
    blank = dict.fromkeys(("state", "network", "reward", "qos", "qos_low", "qos_high"), "")
    table = [point | row | blank for row in rows]
    empty = dict.fromkeys(table[0], "")
    for (state, network, reward), qos in levels.items():
        row = {"state": state, "network": network, "reward": reward}
        row |= {"trainings": len(scores[state, network, reward])}
        row |= interval_columns("qos", [round(value, 5) for value in qos])
        table.append(empty | point | {"factor": "level"} | row)
    return table


def _long_queues(options: Options, runs: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """The graph's effect with queues of `LONG`."""
    kwargs = {**LONG, **_more(options)}
    rate = kwargs.pop("rate")
    own = {
        agent: [played(run, rate, options.episodes, **kwargs) for run in runs[agent]]
        for agent in ("sac_han", "baseline_rl")
    }
    change = contrast(own, (1.0, -1.0), mean)
    row = {"factor": "graph", "level": "features, shaped, 64 running slots, 50/s"}
    row |= {"claimed": False, "undertrained": False, "trainings": len(own["sac_han"])}
    return row | interval_columns("change_pct", [round(value, 3) for value in change])


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    for row in rows:
        if row["factor"] == "level":
            name = ", ".join(filter(None, (row["state"], row["network"], row["reward"])))
            numbers = (row["qos"], row["qos_low"], row["qos_high"])
            qos, low, high = (round(value, 3) for value in numbers)
            yield note(f"{name}: QoS {qos} [{low}, {high}].", policy=name, qos=qos)
        else:
            change, low, high = (row[f"change_pct{end}"] for end in ("", "_low", "_high"))
            yield f"{row['factor']}, {row['level']}: QoS {change:+.1f} [{low:+.1f}, {high:+.1f}] %."


STUDIES = (Study("comparison", "comparison", _comparison, notes=_notes, packages=("torch",)),)


def _add(parser: argparse.ArgumentParser) -> None:
    words = "folder with the trainings of every setting (runs/learning)"
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help=words)
    words = "train these alone and write no table"
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=(), help=words)


main = command(__spec__.name, __doc__, STUDIES, 20, _add)

if __name__ == "__main__":
    run_main(main)
