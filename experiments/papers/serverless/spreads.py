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
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.heuristics import GreedyWarm
from servegym.baselines.serverless_moe.system import SPREADS, ServerlessSystem
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.stats import mean, paired_difference
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.serverless.common import MODELS, with_interval
from servegym.experiments.papers.study import Options, Study, command, ends, interval_columns
from servegym.experiments.papers.verdicts import pick, split

__all__ = ["STUDIES", "main", "measure"]

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


def _spreads(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """Mean reward on validation prompts with every pair of spreads."""
    requests = 4 if options.quick else REQUESTS
    pairs = list(itertools.product(ends(options, LOADS), ends(options, TIMES)))
    if options.quick:
        pairs.append(SPREADS["default"])
    rows = [measure(at["model"], *pair, options.episodes, requests) for pair in pairs]
    rewards = {pair: row.pop("rewards") for pair, row in zip(pairs, rows, strict=True)}
    for pair, row in zip(pairs, rows, strict=True):
        own = rewards[pair]
        row |= with_interval("mean_reward", own) | {"episodes": len(own), "requests": requests}
        found = paired_difference(own, rewards[SPREADS["default"]], mean)
        row |= interval_columns("gain", found)
    return rows


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    load, time = SPREADS["default"]
    for at, own in split(rows, "model"):
        best = max(own, key=lambda row: row["mean_reward"])
        (default,) = pick(own, load_spread=load, time_spread=time)
        taken = best if best["gain_low"] > 0.0 else default
        pair = [taken["load_spread"], taken["time_spread"]]
        text = (
            f"{at['model']}: greatest reward with ({best['load_spread']}, {best['time_spread']}), "
            f"{best['gain']:+.4f} [{best['gain_low']:+.4f}, {best['gain_high']:+.4f}] against the "
            f"default pair {SPREADS['default']}; taken: ({pair[0]}, {pair[1]}), "
            f"{100 * taken['infeasible_rate']:.1f} % of its plans are infeasible"
        )
        yield note(f"{text}.", **at, spreads=pair)


STUDIES = (
    Study(
        "spreads",
        "spreads",
        _spreads,
        lambda options: [{"model": model} for model in MODELS],
        notes=_notes,
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=8)

if __name__ == "__main__":
    run_main(main)
