"""The gateways' rules with published and with tuned constants, cell by cell.

A cell is a setting at a rate at which the best rules have begun to miss their objectives. For each
cell and each rule with constants a search tries the published constants and 59 others, drawn evenly
(a scrambled Sobol sequence) from the ranges in `SPACES`, on common episodes: all on one, the best
twelve on two more, the best four of those on three more. Then published and tuned constants play
the same ten episodes that no search saw::

    OMP_NUM_THREADS=1 python -m servegym.experiments.studies.prefix.tuned_rules

Sessions of recorded workloads are those of the split ``val`` in the search and of ``eval`` in the
end. The table ``tuned_rules`` has SLO attainment (%) with 95 % intervals over episodes;
``tuned_rules_trials`` what each point of a search reached. Of the kind ``joint`` are the constants
that are best over all cells together, by the first stage of the searches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from servegym._command_line import run_main
from servegym.baselines.prefix_routing import RULES, Rule
from servegym.baselines.prefix_routing.policy import view_of
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.prefix_routing.view import NOWHERE
from servegym.envs.prefix_routing.vector_env import PrefixRoutingVectorEnv
from servegym.experiments.evaluation.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.evaluation.tables import Table, note
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import pick, split

__all__ = ["CELLS", "SPACES", "STUDIES", "main", "play", "points"]

Row = dict[str, Any]

SIZE = {"episode_requests": 1000, "warmup_requests": 300}
CELLS: dict[str, dict[str, Any]] = {
    "hot-tenant": {"scenario": "hot-tenant", "rate": 75.0},
    "drift": {"scenario": "drift", "rate": 72.0},
    "mixed-cards": {"scenario": "mixed-cards", "rate": 45.0},
    "mooncake": {"scenario": "mooncake", "rate": 11.5},
    "stale": {"scenario": "hot-tenant", "rate": 75.0, "scrape_s": 2.0},
    "small-memory": {"scenario": "hot-tenant", "rate": 70.0, "kv_tokens": 200_000},
    "llm-d-8": {"scenario": "llm-d-8", "rate": 18.0, "warmup_requests": 800},
    "chat": {"scenario": "chat", "rate": 10.0},
}
"""Arguments of the environment. ``stale`` reads the metrics every 2 s instead of every 50 ms, and
``small-memory`` has .45 of the KV memory, of which the index knows nothing. ``mooncake``
and ``chat`` begin nearly cold, so that less is reused in them than in the long run."""
RECORDED = ("mooncake",)

LINEAR, LOG = "linear", "log"
Space = Mapping[str, tuple[float, float, str]]
SPACES: dict[str, Space] = {
    "llm_d": {"queue": (0.0, 4.0, LINEAR), "kv": (0.0, 4.0, LINEAR), "prefix": (0.0, 4.0, LINEAR)},
    "llm_d_affinity": {
        "threshold": (0.1, 1.0, LINEAR),
        "max_penalty_s": (0.01, 30.0, LOG),
        "prefill_rate": (5e3, 1e5, LOG),
    },
    "sglang_cache_aware": {
        "cache_threshold": (0.0, 1.0, LINEAR),
        "balance_abs": (1.0, 64.0, LOG),
        "balance_rel": (1.0, 3.0, LINEAR),
    },
    "dynamo": {
        "prefill_scale": (0.1, 100.0, LOG),
        "credit": (0.2, 3.0, LINEAR),
        "request_weight": (0.1, 1000.0, LOG),
    },
    "aibrix": {
        "factor": (0.0, 4.0, LINEAR),
        "min_gap": (1.0, 64.0, LOG),
        "sigma": (0.0, 3.0, LINEAR),
    },
    "preble": {"window_s": (1.0, 300.0, LOG), "seconds_per_token": (1e-3, 0.3, LOG)},
}
"""Constants that are searched, with their ranges; those of other rules are none."""
PLAIN = ("least_load", "session_hash", "lmetric", "mooncake", "production_stack_prefix")
"""Rules without constants, and those whose constants do not matter here."""

TRIALS = 60
STAGES = ((60, 1), (12, 2), (4, 3))
"""Points that go on, and episodes that each of them plays."""
SEARCH_SEED, EVAL_SEED = 10_000, 20_000


def points(rule: str, trials: int = TRIALS) -> list[dict[str, float]]:
    """Keywords of a rule: none, which are the published constants, then points of its space."""
    space = SPACES[rule]
    sequence = qmc.Sobol(len(space), seed=0).random(64)[: trials - 1]  # pyright: ignore
    found: list[dict[str, float]] = [{}]
    for row in sequence:
        own = {}
        for (name, (low, high, scale)), at in zip(space.items(), row, strict=True):
            value = low * (high / low) ** at if scale == LOG else low + at * (high - low)
            own[name] = float(f"{value:.4g}")
        found.append(own)
    return found


def play(cell: str, rules: Sequence[Rule], seeds: Sequence[int], split: str) -> NDArray[np.float64]:
    """SLO attainment (R, S) of R rules in the episodes of S seeds of a cell."""
    arguments: dict[str, Any] = SIZE | CELLS[cell]
    arguments |= {"split": split} if cell in RECORDED else {}
    found = np.zeros((len(rules), len(seeds)))
    env = PrefixRoutingVectorEnv(
        num_envs=len(rules), autoreset_mode="Disabled", copy=False, **arguments
    )
    system = PrefixSystem.from_problem(env.problem)
    for column, seed in enumerate(seeds):
        chances = [np.random.default_rng(seed) for _ in rules]
        for rule in rules:
            rule.reset()
        same: list[int | None] = [seed] * len(rules)
        observation, info = env.reset(seed=same)
        ended = np.zeros(len(rules), np.bool_)
        actions = np.zeros(len(rules), np.int64)
        while not ended.all():
            mask = info["action_mask"]
            for row, rule in enumerate(rules):
                chosen = rule.choose(view_of(observation, row, mask[row], system, chances[row]))
                actions[row] = 0 if chosen == NOWHERE else chosen
            observation, _, ended, _, info = env.step(actions)
        found[:, column] = info["episode_kpis"]["attainment"]
    env.close()
    return found


def search(cell: str, rule: str) -> tuple[list[Row], int]:
    """Rows of the trials, and the number of the best point."""
    make = RULES[rule][0]
    chosen = points(rule)
    alive = list(range(len(chosen)))
    reached: list[list[float]] = [[] for _ in chosen]
    seed = SEARCH_SEED
    for keep, episodes in STAGES:
        alive = sorted(alive, key=lambda k: -np.mean(reached[k] or [0.0]))[:keep]
        seeds = list(range(seed, seed + episodes))
        values = play(cell, [make(**chosen[k]) for k in alive], seeds, "val")
        for k, row in zip(alive, values, strict=True):
            reached[k] += row.tolist()
        seed += episodes
    best = max(alive, key=lambda k: np.mean(reached[k]))
    rows = [
        {
            "cell": cell,
            "rule": rule,
            "trial": k,
            "constants": json.dumps(own),
            "first": round(100 * reached[k][0], 2),
            "mean": round(100 * float(np.mean(reached[k])), 2),
            "episodes": len(reached[k]),
        }
        for k, own in enumerate(chosen)
    ]
    return rows, best


def _percent(interval: tuple[float, float, float]) -> list[float]:
    return [round(100 * value, 2) for value in interval]


def _evaluated(
    cell: str, contestants: Mapping[tuple[str, str], Mapping[str, float]], episodes: int
) -> list[Row]:
    """Rows of (rule, constants' kind) -> keywords on the episodes that no search saw."""
    seeds = range(EVAL_SEED, EVAL_SEED + episodes)
    rules = [RULES[rule][0](**own) for (rule, _), own in contestants.items()]
    reached = dict(zip(contestants, play(cell, rules, seeds, "eval"), strict=True))
    rows = []
    for (rule, kind), own in contestants.items():
        values = reached[rule, kind]
        value, low, high = _percent(stratified_bootstrap(values, mean))
        row = {
            "cell": cell,
            "rule": rule,
            "constants": kind,
            "attainment": value,
            "low": low,
            "high": high,
            "gain": "",
            "gain_low": "",
            "gain_high": "",
            "episodes": episodes,
            "values": json.dumps(dict(own)),
        }
        if kind == "tuned":
            gain = paired_difference(values, reached[rule, "published"], mean)
            row |= dict(zip(("gain", "gain_low", "gain_high"), _percent(gain), strict=True))
        rows.append(row)
    return rows


def _joint(trials: Sequence[Row]) -> dict[str, tuple[int, float]]:
    """Rule -> the point that is best in the mean of the cells' first episodes, and that mean."""
    found = {}
    for rule in SPACES:
        own = [row for row in trials if row["rule"] == rule]
        means = {
            k: float(np.mean([row["first"] for row in own if row["trial"] == k]))
            for k in {row["trial"] for row in own}
        }
        if means:
            best = max(means, key=lambda k: (means[k], -k))
            found[rule] = best, means[best]
    return found


def _cells(options: Options) -> list[str]:
    return list(CELLS)[:1] if options.quick else list(CELLS)


def _tuned(options: Options, *_: Any) -> list[Row]:
    """The searches, then all rules in every cell; ``_trials`` are the points of the searches."""
    path, cells = options.out / "tuned_rules_trials.csv", _cells(options)
    table = Table(path, ("cell", "rule"), load=not options.quick)
    for cell, rule in table.missing([(cell, rule) for cell in cells for rule in SPACES]):
        rows, _best = search(cell, rule)
        table.update(rows)
        print(f"{cell} {rule}: {max(row['mean'] for row in rows if row['episodes'] > 3)}")
    joint = _joint(table.rows)
    rows = []
    for cell in cells:
        contestants: dict[tuple[str, str], Mapping[str, float]] = {
            (rule, "published"): {} for rule in (*PLAIN, *SPACES)
        }
        for rule in SPACES:
            own = pick(table.rows, cell=cell, rule=rule)
            top = max(own, key=lambda row: (row["episodes"], row["mean"]))
            contestants[rule, "tuned"] = json.loads(top["constants"])
            contestants[rule, "joint"] = points(rule)[joint[rule][0]]
        rows += _evaluated(cell, contestants, options.episodes)
        print(f"{cell}: evaluated")
    return rows


def _findings(options: Options, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the table says: the best of each kind, and what is lost by not tuning in the cell."""
    found, best = [], []
    for at, own in split(rows, "cell"):
        top = {
            kind: max(pick(own, constants=kind), key=lambda row: row["attainment"])
            for kind in ("published", "tuned", "joint")
        }
        best.append(top["tuned"]["attainment"])
        texts = [
            f"{kind} {row['rule']} {row['attainment']:.1f} [{row['low']:.1f}, {row['high']:.1f}]"
            for kind, row in top.items()
        ]
        found.append(note(f"{at['cell']}, best of each kind: {'; '.join(texts)}."))
    bound = float(np.mean(best))
    for kind in ("published", "joint"):
        means = {
            at["rule"]: float(np.mean([row["attainment"] for row in own]))
            for at, own in split(pick(rows, constants=kind), "rule")
        }
        top = max(means, key=means.__getitem__)
        found.append(
            note(
                f"One rule with its {kind} constants in all cells: {top} reaches "
                f"{means[top]:.1f} % in the mean, the best rule tuned in each cell {bound:.1f} %.",
                means=means,
                best_per_cell=bound,
            )
        )
    return found


STUDIES = (
    Study(
        "tuned_rules",
        "tuned_rules",
        _tuned,
        notes=_findings,
        facts=lambda options: {
            "cells": CELLS,
            "spaces": SPACES,
            "trials": TRIALS,
            "stages": STAGES,
            "seeds": [SEARCH_SEED, EVAL_SEED],
            **SIZE,
        },
    ),
)

main = command(__spec__.name, __doc__, STUDIES, 10)

if __name__ == "__main__":
    run_main(main)
