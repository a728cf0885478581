"""Which learning algorithm fits: SAC, PPO, Q-learning and rollouts for the same processor time.

``python -m servegym.experiments.figures.beyond.routing.zoo --checkpoints runs/routing`` compares
the trainings of the group ``zoo`` of `training_runs`, one policy each for 4 to 11 requests/s, with
the heuristic that most of them start at and with greedy_qos. The score of a training at a rate is
its QoS minus that of priced_greedy on the same evaluation episodes, the interquartile mean over
them; an algorithm has the mean over all rates and its seeds, with Student's interval over seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym.agents import load_policy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs._command_line import run_main
from servegym.experiments.figures.plotting import pyplot, tidy
from servegym.experiments.figures.routing.common import (
    Options,
    play,
    run_figures,
    save,
    summarise_parts,
)
from servegym.experiments.figures.routing.training import RESULT
from servegym.experiments.output import print_table
from servegym.experiments.stats import Interval, iqm, student_interval
from servegym.experiments.tables import note

__all__ = ["gains", "main"]

MODULE = "servegym.experiments.figures.beyond.routing.zoo"
FLEET = "edge-6-heterogeneous"
RATES = (5.0, 8.0, 10.0)
REFERENCE, BELOW = "priced_greedy", "greedy_qos"


def gains(
    scores: Mapping[float, Sequence[np.ndarray]], reference: Mapping[float, np.ndarray]
) -> Interval:
    """Gain of an algorithm over a reference, over its trainings and all rates.

    Args:
        scores: Rate -> QoS by episode of each training, in one order of trainings.
        reference: Rate -> QoS of the reference on the same episodes.

    Returns:
        Mean over trainings of their interquartile means, averaged over the rates. The interval is
        over trainings: one serves all rates, so that its rates are no independent trials.
    """
    table = [[iqm(one - reference[rate]) for one in each] for rate, each in scores.items()]
    return student_interval(np.mean(table, axis=0))


def zoo(options: Options) -> None:
    """QoS of every algorithm at three rates, and its gain over where it starts."""
    chosen = [one for one in options.trained if one.group == "zoo"]
    if not chosen:
        print("zoo: no trainings of the group zoo (--checkpoints FOLDER), left out")
        return
    results = {one.path: json.loads((one.path.parent / RESULT).read_text()) for one in chosen}
    labels = list(dict.fromkeys(one.variant for one in chosen))
    rows: list[dict[str, Any]] = []
    qos: dict[str, dict[float, list[np.ndarray]]] = {}
    for rate in RATES[::2] if options.quick else RATES:
        kwargs = {"profiles": FLEET, "rate": rate, "episode_requests": options.requests}
        system = RoutingSystem.from_kwargs(**kwargs)
        parts = {name: [play([name], options.episodes, kwargs)] for name in (BELOW, REFERENCE)}
        for one in chosen:
            policy = load_policy(one.path, system)
            parts.setdefault(one.variant, []).append(play([policy], options.episodes, kwargs))
        for name, each in parts.items():
            found = [np.array([row["avg_qos"] for row in part]) for part in each]
            qos.setdefault(name, {})[rate] = found
            rows.append(
                {"policy": name, "rate": rate, "trainings": len(each) * (name in labels)}
                | summarise_parts(each)
            )
    reference = {rate: each[0] for rate, each in qos[REFERENCE].items()}
    table = []
    for name in labels:
        own = [results[one.path] for one in chosen if one.variant == name]
        gain = gains(qos[name], reference)
        table.append(
            {
                "policy": name,
                "agent": own[0]["agent"],
                "network": own[0]["state"],
                "starts_at": REFERENCE if own[0]["prior"] else "nothing",
                "trainings": len(own),
                "steps": own[0]["steps"],
                "minutes": np.mean([one["seconds"] for one in own]) / 60,
                "gain": gain.value,
                "gain_low": gain.low,
                "gain_high": gain.high,
            }
        )
    table.sort(key=lambda row: -row["gain"])
    for row in rows:
        row |= next((other for other in table if other["policy"] == row["policy"]), {})
    _print(table, rows)
    notes = _findings(table, {rate: each[0] for rate, each in qos[BELOW].items()}, reference)
    save(options, "zoo", rows, *notes)


def _print(table: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> None:
    rates = sorted({row["rate"] for row in rows})
    by = {(row["policy"], row["rate"]): row["qos"] for row in rows}
    print_table(
        "which algorithm fits: one policy for 4 to 11 requests/s",
        [
            "policy",
            "network",
            "starts at",
            "seeds",
            "steps",
            "minutes",
            *(f"QoS at {rate:g}/s" for rate in rates),
            f"over {REFERENCE}",
        ],
        [
            [
                row["policy"],
                row["network"],
                row["starts_at"],
                str(row["trainings"]),
                f"{row['steps']:,}",
                f"{row['minutes']:.1f}",
                *(f"{by[row['policy'], rate]:.3f}" for rate in rates),
                f"{row['gain']:+.4f} [{row['gain_low']:+.4f}, {row['gain_high']:+.4f}]",
            ]
            for row in table
        ],
    )


def _findings(
    table: Sequence[Mapping[str, Any]],
    below: Mapping[float, np.ndarray],
    reference: Mapping[float, np.ndarray],
) -> list[dict[str, Any]]:
    """A note a policy: whether its interval lies above or below the reference."""
    notes = []
    for row in table:
        above, under = row["gain_low"] > 0, row["gain_high"] < 0
        verdict = "above" if above else "below" if under else "not distinguished from"
        text = (
            f"{row['policy']} is {verdict} {REFERENCE}: QoS {row['gain']:+.4f} "
            f"[{row['gain_low']:+.4f}, {row['gain_high']:+.4f}] ({row['network']}, starts at "
            f"{row['starts_at']}, {row['trainings']} seed(s), {row['steps']:,} steps, "
            f"{row['minutes']:.1f} minutes)."
        )
        found = {key: row[key] for key in ("policy", "gain", "gain_low", "gain_high")}
        notes.append(note(text, verdict=verdict, **found))
    gap = gains({rate: [each] for rate, each in below.items()}, reference).value
    notes.append(note(f"{BELOW} over {REFERENCE}: QoS {gap:+.4f}.", policy=BELOW, gain=gap))
    return [*notes, note("Steps of rpi are labelled states, those of the others decisions.")]


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Two panels with scales of their own: what starts at nothing ends ten times as far off."""
    table = list({row["policy"]: row for row in rows if row["trainings"]}.values())
    table.sort(key=lambda row: -row["gain"])
    starts = [
        name for name in (REFERENCE, "nothing") if any(row["starts_at"] == name for row in table)
    ]
    parts = [[row for row in table[::-1] if row["starts_at"] == name] for name in starts]
    figure, axes = pyplot().subplots(
        len(parts),
        1,
        figsize=(7, 0.42 * len(table) + 1.2 * len(parts)),
        squeeze=False,
        layout="constrained",
        height_ratios=[len(part) for part in parts],
    )
    for axis, name, part in zip(axes[:, 0], starts, parts, strict=True):
        at = np.arange(len(part))
        gain, low, high = (
            np.array([row[key] for row in part]) for key in ("gain", "gain_low", "gain_high")
        )
        axis.barh(at, gain, color="tab:blue" if name == REFERENCE else "0.5", height=0.65)
        axis.errorbar(
            gain,
            at,
            xerr=np.nan_to_num([gain - low, high - gain]),
            fmt="none",
            ecolor="0.2",
            capsize=3,
        )
        axis.axvline(0, color="black", linewidth=1)
        axis.set_yticks(at, [f"{row['policy']}, {row['minutes']:.1f} min" for row in part])
        axis.set_title(f"starts at {name}", fontsize=10)
        tidy(axis)
    axes[-1, 0].set_xlabel(f"QoS minus {REFERENCE}, mean over seeds and rates")
    return figure


FIGURES = {"zoo": zoo}
PICTURES = {"zoo": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=50)


if __name__ == "__main__":
    run_main(main)
