"""llm-d's default file tuned by `servegym tune`'s search, several times, beside published rules.

::

    python -m servegym.experiments.studies.prefix.tuned_files --resume

Each search has episodes and candidates of its own seed and `Case.budget` seconds on all cores; all
are judged on the same episodes, which no search and no choice has seen, at `Case.judged`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servegym._command_line import run_main
from servegym.agents.lib.parallel import Workers
from servegym.baselines.prefix_routing.gateway_files import default_file
from servegym.experiments.evaluation import tuning
from servegym.experiments.evaluation.stats import student_interval
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.evaluation.targets import GatewayTarget, Player
from servegym.experiments.papers.study import Options, Study, command

__all__ = ["STUDIES", "main"]

RULES = "rules"
"""In the place of a seed: the rules that are not searched."""


class Case(NamedTuple):
    """Rates of the search and of the verdict (requests/s), seconds of a search, searches."""

    rates: tuple[float, ...]
    judged: tuple[float, ...]
    budget: float
    searches: int


CASES = {
    "mixed-cards": Case((30.0, 34.0, 37.0, 40.0), (30.0, 33.0, 36.0, 38.0, 40.0), 300.0, 5),
    "mooncake": Case((10.0, 11.5, 13.0), (10.0, 11.5, 13.0), 240.0, 3),
    "hot-tenant": Case((65.0, 70.0, 75.0), (65.0, 70.0, 75.0), 60.0, 3),
}


def _settings(options: Options) -> list[dict[str, Any]]:
    return [
        {"scenario": name, "seed": seed}
        for name, case in CASES.items()
        for seed in (RULES, *range(1 if options.quick else case.searches))
    ]


def _rows(
    options: Options, setting: Mapping[str, Any], _: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    case = CASES[setting["scenario"]]
    target = GatewayTarget(default_file("llm-d"), {"scenario": setting["scenario"]})
    cores = os.cpu_count() or 1
    workers = Workers(cores)
    player = Player(workers, cores)
    if setting["seed"] == RULES:
        values = tuning.compared({"file": (target, target.starts()[0])}, case.judged, workers)
        facts: dict[str, Any] = {}
    else:
        values, facts = _searched(target, case, int(setting["seed"]), player, options.quick)
    workers.close()
    for policy, found in values.items():
        for rate, shares in zip(case.judged, found, strict=True):
            row = {**setting, "policy": policy, "rate": rate, "share": float(shares.mean())}
            yield row | {"worst": float(shares.min()), **facts}


def _searched(
    target: GatewayTarget, case: Case, seed: int, player: Player, quick: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shares of the file that a search found, and facts of it."""
    begin, rates = time.monotonic(), case.rates
    seconds = 1.0 if quick else tuning.SEARCHED * case.budget
    with tempfile.TemporaryDirectory() as folder:
        search = tuning.Search(target, rates, player, Path(folder), seed)
        for _ in search.generations(seconds):
            pass
        candidates = len(search.study.trials)
        finalists = [found for _, found in search.best(tuning.FINALISTS)]
    tuned = tuning.chosen(target, finalists, rates, player)
    took = time.monotonic() - begin
    both = [target.starts()[0], tuned]
    first = tuning.SEARCH_SEED + 1000 * seed
    gains = {
        "gain_searched": player(target, both, rates, "train", range(first, first + 4)),
        "gain": player(target, both, rates, "eval", tuning.VERDICT_SEEDS),
        "gain_drawn": player(target, both, rates, "eval", tuning.VERDICT_SEEDS, draws=True),
    }
    facts: dict[str, Any] = {"candidates": candidates, "seconds": took}
    facts |= {name: float((new - old).mean()) for name, (old, new) in gains.items()}
    facts["file"] = target.text(tuned)
    judged = player(target, [tuned], case.judged, "eval", tuning.VERDICT_SEEDS)[0]
    return {"tuned": judged}, facts


def _of(rows: Sequence[Mapping[str, Any]], scenario: str, policy: str) -> np.ndarray:
    """Shares (seeds, rates)."""
    mine = [r for r in rows if r["scenario"] == scenario and r["policy"] == policy]
    seeds = list(dict.fromkeys(row["seed"] for row in mine))
    return np.array([[r["share"] for r in mine if r["seed"] == seed] for seed in seeds])


def _notes(options: Options, rows: Sequence[Mapping[str, Any]]) -> Iterator[Note]:
    for scenario, case in CASES.items():
        tuned = _of(rows, scenario, "tuned")
        if len(tuned) < 2:
            continue
        each = [student_interval(shares) for shares in tuned.T]
        text = ", ".join(
            f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}] at {rate:g}/s"
            for x, rate in zip(each, case.judged, strict=True)
        )
        facts = [r for r in rows if r["scenario"] == scenario and r["policy"] == "tuned"]
        facts = facts[:: len(case.judged)]
        kept = " and ".join(
            f"{np.mean([r[key] for r in facts]):+.3f} {where}"
            for key, where in (
                ("gain_searched", "on the search's episodes"),
                ("gain", "on others"),
                ("gain_drawn", "in drawn worlds"),
            )
        )
        yield note(f"{scenario}: {text}; over {len(tuned)} searches. Gain over the file: {kept}.")


STUDIES = (
    Study(
        name="tuned_files",
        figure="tuned_files",
        settings=_settings,
        columns=_rows,
        notes=_notes,
        key=("scenario", "seed"),
        packages=("optuna",),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, 10)

if __name__ == "__main__":
    run_main(main)
