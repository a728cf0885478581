"""Evaluate policies on the same episodes and summarise what the served users got.

Episode ``i`` is the one of seed ``seed + i``, whatever runs side by side. Latency is never reported
without drop and reject rates: refusing requests buys any latency.
"""

from __future__ import annotations

import copy
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import whole
from servegym.agents.lib.parallel import SERIAL, Executor
from servegym.baselines.protocol import Policy
from servegym.envs.families import Family, family_of
from servegym.experiments.evaluation.guest import APART, Guests
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.play import (
    DEFAULT_SEED,
    PACKAGE,
    EvaluatedPolicy,
    open_envs,
    play,
    problem_of,
)
from servegym.experiments.evaluation.reporting import number, report_of
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.evaluation.stats import Interval, iqm, stratified_bootstrap


def fresh_seed() -> int:
    """A seed that nobody knew before, below 2**62."""
    return secrets.randbits(62)


def derived_seed(seed: int, *names: str) -> int:
    """The seed of a part of a measurement, below 2**62; ValueError if ``seed`` is out of range.

    Parts of other names have other episodes: what a guest remembers of one is of no use in another.
    """
    root, key = whole("seed", seed, 0, 1 << 62), tuple("\n".join(names).encode())
    return int(np.random.SeedSequence(root, spawn_key=key).generate_state(1, np.uint64)[0] >> 2)


class Results(list[dict[str, Any]]):
    """The rows of an evaluation, a dict a policy and episode.

    Attributes:
        logs: The request logs of a policy's episodes, by its name, where its family has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, list[NDArray[Any]]] = {}


def evaluate(
    env_id: str,
    policies: Sequence[str | os.PathLike[str] | Policy],
    episodes: int = 20,
    seed: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    num_envs: int | None = None,
    executor: Executor = SERIAL,
    guests: Guests = APART,
) -> Results:
    """Run every policy on the same episodes.

    Policies whose code is not the package's (``.py`` files, ``.zip`` files that Stable-Baselines3
    saved, objects of other classes or with its ``predict``, functions) are guests. Each runs in a
    process of its own, a new one for every block of episodes, and gets no number that they are
    drawn from.

    A job of the executor is one policy's block. The chance in an episode is drawn from its own seed
    and a policy starts afresh with every block, so that the rows are equal wherever the blocks run.
    Checkpoints and policy files need to lie on this machine only; files that ``env_kwargs`` names
    must lie where the blocks run.

    Args:
        env_id: An id of one of the families; a policy that reads another view gets that one, and
            one that does not say which gets that of the id.
        policies: Registered names, checkpoint paths, policy files, policy objects, objects with
            ``predict``, or what `servegym.experiments.evaluation.resolve.resolve` made of one.
        episodes: Episodes a policy; episode i is drawn with ``seed + i``.
        seed: Seed of the first episode; by default `DEFAULT_SEED`, and with a guest, whose author
            knows that one, a `fresh_seed` that the rows tell.
        env_kwargs: Arguments of the environment; ``split`` is "eval" unless set.
        num_envs: Episodes of a block, which run side by side: up to 16 by default, and one of a
            guest in a process of its own, whose time is that of single decisions then. It changes
            only the order in which a randomised policy draws.
        executor: Where the blocks run.
        guests: How guests run; rows of those in the evaluator's process say so.

    Returns:
        One dict a policy and episode: ``policy``, ``seed``, ``episode``, the episode's KPIs with
        their units in the name, what the family adds (routing: latency percentiles,
        ``share_<expert>`` of all requests and ``ceiling``, the mean over requests of the best true
        score), ``return`` (NaN for a policy that asks for another reward than the environment's),
        ``clairvoyant``, ``source`` (``servegym``, ``guest`` or ``guest in process``), ``env_id``
        and ``env_kwargs``; of a guest in a process of its own also ``decision_s``, the seconds of
        all its decisions over their number, and ``slowest_decision_s``. What is undefined (the
        latency of a policy that drops everything) is NaN.

    Raises:
        ValueError: If an argument, a policy's name or an environment's argument is not valid, or
            a policy asks for an argument that changes the world, before the first episode.
        PolicyError: If a guest fails, ends its process, takes too long or acts wrongly.
    """
    whole("episodes", episodes, 1)
    whole("seed", seed or 0, 0, 1 << 62)
    whole("num_envs", 1 if num_envs is None else num_envs, 1)
    if not policies:
        raise ValueError("policies is empty; name at least one")
    family, kwargs = family_of(env_id), {"split": "eval", **(env_kwargs or {})}
    problem = problem_of(family.env_id, kwargs)
    # All names are looked up before the first episode: a typo must not cost the others' work.
    how: dict[str, Any] = {"view": family.view_of(env_id), "guests": guests}
    resolved = [resolve(policy, problem, family, **how) for policy in policies]
    if seed is None:
        seed = DEFAULT_SEED if all(policy.knows_seed for policy in resolved) else fresh_seed()
    # Every row names its system and load, set or default; what an episode draws is no argument.
    reported, arguments = report_of(family).reported_arguments.split(), dict(problem.arguments)
    reported = {key: arguments[key] for key in reported if key in arguments}
    settings = json.dumps({**reported, **kwargs}, sort_keys=True)
    jobs, names = [], Counter[str]()
    for policy in resolved:
        names[policy.name] += 1
        if (number := names[policy.name]) > 1:  # rows of policies of one name are not pooled
            policy = copy.copy(policy)
            policy.name = f"{policy.name} #{number}"
        size = min(num_envs or policy.side_by_side, episodes)
        for start in range(0, episodes, size):
            block = range(start, min(start + size, episodes))
            jobs.append((policy, family, kwargs, settings, seed, block, size))
    titles = [f"{job[0].name}, episodes {job[5][0]} to {job[5][-1]}" for job in jobs]
    blocks = dict(executor(evaluate_block, jobs, titles))
    results = Results()
    for block in (blocks[index] for index in range(len(jobs))):
        results += block
        for name, logs in block.logs.items():
            results.logs.setdefault(name, []).extend(logs)
    return results


def evaluate_block(
    policy: EvaluatedPolicy,
    family: Family,
    env_kwargs: Mapping[str, Any],
    settings: str,
    seed: int,
    episodes: range,
    num_envs: int,
) -> Results:
    """Play episodes of a policy side by side; the first one of all is drawn with ``seed``."""
    reward, results = env_kwargs.get("reward"), Results()
    same_reward = policy.env_kwargs.get("reward", reward) == reward
    envs = open_envs(family, policy, num_envs, env_kwargs)
    with closing(envs), closing(policy):
        returns, info = np.zeros(num_envs), {}
        for step in play(envs, policy, seed + episodes[0], episodes[0]):
            returns, info = returns + step.reward, step.info
        times = policy.times()
        # The last block runs to its end like the others; what is beyond its episodes is left out.
        for row, episode in enumerate(episodes):
            kpis = {k: float(v[row]) for k, v in info["episode_kpis"].items() if k[0] != "_"}
            total, log = float(returns[row]), None
            if hasattr(envs.unwrapped, "request_log"):
                log = envs.unwrapped.request_log(row)
                results.logs.setdefault(policy.name, []).append(log)
            results.append(
                {
                    "policy": policy.name,
                    "seed": seed + episode,
                    "episode": episode,
                    **kpis,
                    **report_of(family).episode_statistics(log, envs.unwrapped.problem),
                    "return": total if same_reward else math.nan,
                    "clairvoyant": policy.clairvoyant,
                    "source": policy.source,
                    **{k: v for k, v in times.items() if not math.isnan(kpis.get(k, 0.0))},
                    "env_id": family.env_id,
                    "env_kwargs": settings,
                }
            )
    return results


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One dict a policy from the rows of `evaluate`, in the order of the rows.

    Returns:
        ``policy``, ``clairvoyant``, ``source``, ``episodes``, the family's headline (routing:
        ``avg_qos``) as an `Interval` of the interquartile mean with its bootstrap 95 % interval,
        and the mean over episodes of every other number. A mean leaves out the episodes where the
        number is undefined and is NaN where it is undefined in all of them.
    """
    report, summaries = report_of(family_of(rows[0]["env_id"])), []
    by_policy: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row)
    for name, episodes in by_policy.items():
        first, headline = episodes[0], [row[report.headline] for row in episodes]
        summary: dict[str, Any] = {
            "policy": name,
            "clairvoyant": first["clairvoyant"],
            "source": first["source"],
            "episodes": len(episodes),
            report.headline: stratified_bootstrap(headline, iqm),
        }
        for key, value in first.items():
            if key in summary or key in ("seed", "episode") or not isinstance(value, float | int):
                continue
            values = np.array([row[key] for row in episodes], dtype=np.float64)
            values = values[np.isfinite(values)]
            summary[key] = float(values.mean()) if values.size else math.nan
        summaries.append(summary)
    return summaries


def print_summary(rows: Sequence[Mapping[str, Any]], every: bool = False) -> None:
    """Print the comparison of the rows of `evaluate`: one table of the metrics that decide.

    With ``every`` it has all metrics, the return, and the share of each expert.
    """
    summaries, first = summarise(rows), rows[0]
    report, arguments = report_of(family_of(first["env_id"])), json.loads(first["env_kwargs"])
    columns = {
        "policy": [_label(s) for s in summaries],
        report.heading: [_interval(s[report.headline]) for s in summaries],
    }
    for column in report.shown(every):
        columns[column.title] = [column.text(s[column.key]) for s in summaries]
    if every:
        columns["return"] = [number(s["return"], 1) for s in summaries]
    body = [list(row) for row in zip(*columns.values(), strict=True)]
    if "ceiling" in first:
        ceiling = number(float(np.mean([row["ceiling"] for row in rows])), 3)
        body.append(["ceiling (mean best score)", ceiling, *[""] * (len(columns) - 2)])
    settings = ", ".join(f"{k}={v}" for k, v in arguments.items())
    seeds = sorted({row["seed"] for row in rows})
    title = f"{first['env_id']} ({settings}): {len(seeds)} episodes, seeds {seeds[0]}..{seeds[-1]}"
    print_table(title, list(columns), body, report.notes)
    shares = [key for key in summaries[0] if key.startswith("share_")]
    if shares and every:
        heads = ["policy", *(key.removeprefix("share_") for key in shares)]
        cells = [[_label(s), *(number(s[key], 1, 100) for key in shares)] for s in summaries]
        print_table("Share of all requests sent to each expert, %", heads, cells)


def _interval(interval: Interval) -> str:
    value, low, high = (number(end, 3) for end in interval)
    return f"{value} [{low}, {high}]"


def _label(summary: Mapping[str, Any]) -> str:
    marks = [summary["source"]] if summary["source"] != PACKAGE else []
    marks += ["clairvoyant"] if summary["clairvoyant"] else []
    return summary["policy"] + (f" ({', '.join(marks)})" if marks else "")
