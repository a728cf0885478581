"""Spreads of the prediction error that the planners assume, chosen by model on validation prompts.

Run it with::

    python -m servegym.experiments.papers.serverless.spreads

A planner does not know the routing of a request. It takes the tokens of a replica to be normal
about the expected ones, and the times of a request likewise; both relative standard deviations are
constants of a model (`servegym.baselines.serverless_moe.system.SPREADS`). ``greedy_warm`` plays the
same episodes of the ``val`` split with every pair. The pair of greatest mean reward is taken if its
paired 95 % interval over episodes against the default pair lies above 0, else the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.heuristics import GreedyWarm
from servegym.baselines.serverless_moe.system import SPREADS, ServerlessSystem
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.stats import mean, paired_difference
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.run import first_and_last, save
from servegym.experiments.papers.serverless.common import (
    MODELS,
    Options,
    run_figures,
    with_interval,
)

__all__ = ["main", "measure"]

MODULE = "servegym.experiments.papers.serverless.spreads"
ENV_ID = "servegym/ServerlessMoE-v0"
LOADS = (0.06, 0.12, 0.25, 0.5, 0.8, 1.2, 2.0)
TIMES = (0.05, 0.08, 0.12)
FIRST_SEED = 70_000
REQUESTS = 40


def measure(model: str, load: float, time: float, episodes: int, requests: int) -> dict[str, Any]:
    """Rewards of the episodes with a pair of spreads, and how often a plan is infeasible or late.

    Args:
        model: Name of the model.
        load: Relative standard deviation of a replica's tokens.
        time: The same of a request's times.
        episodes: Episodes.
        requests: Requests of an episode.
    """
    kwargs = {"model": model, "split": "val", "episode_requests": requests}
    system = ServerlessSystem.from_kwargs(**kwargs)
    policy = GreedyWarm(dataclasses.replace(system, load_spread=load, time_spread=time))
    rows = evaluate(ENV_ID, [policy], episodes, FIRST_SEED, kwargs, num_envs=episodes)
    found = {"model": model, "load_spread": load, "time_spread": time}
    found["rewards"] = [row["mean_reward"] for row in rows]
    for key in ("infeasible_rate", "ttft_violation_rate", "tpot_violation_rate", "cost_over_mix"):
        found[key] = sum(row[key] for row in rows) / len(rows)
    return found


def spreads(options: Options) -> None:
    """Mean reward on validation prompts with every pair of spreads."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    requests = 4 if options.quick else REQUESTS
    for model in MODELS:
        found = [
            measure(model, load, time, options.episodes, requests)
            for load in first_and_last(options, LOADS)
            for time in first_and_last(options, TIMES)
        ]
        if options.quick:
            found.append(measure(model, *SPREADS["default"], options.episodes, requests))
        pairs = {(row["load_spread"], row["time_spread"]): row.pop("rewards") for row in found}
        default = pairs[SPREADS["default"]]
        for row in found:
            own = pairs[row["load_spread"], row["time_spread"]]
            row |= with_interval("mean_reward", own) | {"episodes": len(own), "requests": requests}
            ends = paired_difference(own, default, mean)
            row |= dict(zip(("gain", "gain_low", "gain_high"), ends, strict=True))
        rows += found
        best = max(found, key=lambda row: row["mean_reward"])
        default_row = next(
            row for row in found if (row["load_spread"], row["time_spread"]) == SPREADS["default"]
        )
        taken = best if best["gain_low"] > 0.0 else default_row
        pair = [taken["load_spread"], taken["time_spread"]]
        text = (
            f"{model}: greatest reward with ({best['load_spread']}, {best['time_spread']}), "
            f"{best['gain']:+.4f} [{best['gain_low']:+.4f}, {best['gain_high']:+.4f}] against the "
            f"default pair {SPREADS['default']}; taken: ({pair[0]}, {pair[1]}), "
            f"{100 * taken['infeasible_rate']:.1f} % of its plans are infeasible"
        )
        notes.append(note(f"{text}.", model=model, spreads=pair))
    columns = ("model", "load_spread", "time_spread", "mean_reward", "gain", "infeasible_rate")
    body = [[f"{r[c]:.4f}" if c[-1] != "l" else r[c] for c in columns] for r in rows]
    print_table("Reward on validation prompts", list(columns), body)
    save(options, "spreads", rows, *notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line, see ``--help``. Returns 0."""
    return run_figures({"spreads": spreads}, {}, argv, __doc__, MODULE, prompts=8)


if __name__ == "__main__":
    run_main(main)
