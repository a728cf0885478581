"""What a better cache, and a router that sees the future, would gain: bounds cell by cell.

``bounds``: rules with published constants and Dynamo's cost with one set of tuned ones, in cells of
`tuned_rules`, with vLLM's cache, with an infinite cache for each replica and with one pooled
infinite cache; the SLO attainment (%) with 95 % intervals over episodes, and what the better caches
gain on the same episodes. ``bounds_rollout``: the clairvoyant `rollout` beside the rule that it
looks ahead with, in shorter episodes::

    OMP_NUM_THREADS=1 python -m servegym.experiments.figures.prefix.bounds
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.prefix_routing import RULES
from servegym.baselines.prefix_routing.dynamo import DynamoRows
from servegym.baselines.prefix_routing.rollout import CONSTANTS, Rollout
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.envs.prefix_routing.config import STORES
from servegym.envs.prefix_routing.vector_env import PrefixRoutingVectorEnv
from servegym.experiments.figures.prefix.tuned_rules import CELLS, SIZE, play_with
from servegym.experiments.figures.run import (
    FigureOptions,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.tables import note

Row = dict[str, Any]

CHOSEN = ("hot-tenant", "drift", "mixed-cards", "mooncake", "small-memory", "chat")
RULED = ("round_robin", "least_load", "llm_d", "lmetric", "mooncake")
TUNED = "dynamo, tuned"
SEED = 60_000
AHEAD: Mapping[str, Any] = {"episode_requests": 300, "warmup_requests": 600}
AHEAD_CELLS = ("hot-tenant", "mixed-cards", "mooncake")


def _rounded(interval: Sequence[float]) -> list[float]:
    return [round(100 * float(value), 2) for value in interval]


def caches(options: FigureOptions) -> None:
    """``bounds``: every rule with every cache."""
    rows: list[Row] = []
    seeds = range(SEED, SEED + options.episodes)
    constants = dict(zip(("prefill_scale", "credit", "request_weight"), CONSTANTS, strict=True))
    for cell in CHOSEN[: 1 if options.quick else None]:
        reached: dict[str, NDArray[np.float64]] = {}
        for cache in STORES:
            rules = [RULES[name][0]() for name in RULED] + [RULES["dynamo"][0](**constants)]
            reached[cache] = play_with(CELLS[cell] | {"prefix_cache": cache}, rules, seeds)
        for k, name in enumerate((*RULED, TUNED)):
            for cache, values in reached.items():
                row: Row = {"cell": cell, "rule": name, "prefix_cache": cache}
                found = _rounded(stratified_bootstrap(values[k], mean))
                row |= dict(zip(("attainment", "low", "high"), found, strict=True))
                gain = _rounded(paired_difference(values[k], reached["vllm"][k], mean))
                rows.append(row | dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True)))
        print(f"{cell}: {[row['attainment'] for row in rows[-3 * len(RULED) - 3 :]]}", flush=True)
    save(options, "bounds", rows, *_notes(rows), settings={"seed": SEED, **SIZE})


def _notes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        best = {}
        for cache in STORES:
            own = [r for r in rows if (r["cell"], r["prefix_cache"]) == (cell, cache)]
            best[cache] = max(own, key=lambda row: row["attainment"])
        texts = [
            f"{row['rule']} {row['attainment']:.1f} % [{row['low']:.1f}, {row['high']:.1f}] "
            f"({cache})"
            for cache, row in best.items()
        ]
        found.append(note(f"{cell}, the best with each cache: {', '.join(texts)}."))
    return found


def rollout(options: FigureOptions) -> None:
    """``bounds_rollout``: the clairvoyant rollout beside the rule that it looks ahead with."""
    rows: list[Row] = []
    episodes = 1 if options.quick else max(options.episodes // 2, 2)
    for cell in AHEAD_CELLS[: 1 if options.quick else None]:
        arguments: dict[str, Any] = {**SIZE, **CELLS[cell], **AHEAD}
        if options.quick:
            arguments |= {"episode_requests": 20}
        values = np.zeros((2, episodes))
        for column in range(episodes):
            for row, looks in enumerate((False, True)):
                env = PrefixRoutingVectorEnv(num_envs=1, autoreset_mode="Disabled", **arguments)
                system = PrefixSystem.from_problem(env.problem)
                policy: Any = DynamoRows(np.array([CONSTANTS]), system.block_size)
                if looks:
                    ahead = Rollout(system)
                    ahead.bind(env)
                    policy = ahead.act
                seen, info = env.reset(seed=SEED + column)
                ended = np.zeros(1, np.bool_)
                while not ended.all():
                    seen, _, ended, _, info = env.step(policy(seen, info["action_mask"]))
                values[row, column] = info["episode_kpis"]["attainment"][0]
                env.close()
        gain = _rounded(paired_difference(values[1], values[0], mean))
        rows.append(
            {
                "cell": cell,
                "rule": round(100 * float(values[0].mean()), 2),
                "rollout": round(100 * float(values[1].mean()), 2),
                **dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True)),
                "episodes": episodes,
            }
        )
        print(rows[-1], flush=True)
    texts = [
        note(
            f"{r['cell']}: looking ahead {r['rollout']:.1f} %, the rule alone {r['rule']:.1f} %: "
            f"{r['gain']:+.1f} [{r['gain_low']:.1f}, {r['gain_high']:.1f}] points."
        )
        for r in rows
    ]
    save(options, "bounds_rollout", rows, *texts, settings={"seed": SEED, **AHEAD})


FIGURES = {"bounds": caches, "rollout": rollout}
PICTURES: dict[str, Any] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; see the module's docstring."""
    module = "servegym.experiments.figures.prefix.bounds"
    parser = figure_parser(list(FIGURES), __doc__, module, 10)
    return run_chosen(FIGURES, PICTURES, command_line(parser, argv, FigureOptions()))


if __name__ == "__main__":
    sys.exit(main())
