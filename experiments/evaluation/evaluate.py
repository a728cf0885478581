"""Evaluate policies on the same episodes and summarise what the served users got.

Episode ``i`` is the one an environment draws with seed ``seed + i``, for every policy and whatever
the number of environments that run side by side. Latency is never reported without the drop and
reject rates: a router can buy any latency by refusing requests.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import servegym  # noqa: F401  registers the ids
from servegym._checks import whole
from servegym.baselines.protocol import Policy
from servegym.envs.families import Family, family_of
from servegym.experiments.evaluation.executor import Executor, run_serially
from servegym.experiments.evaluation.guest import TIME_LIMIT_S
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.play import (
    DEFAULT_SEED,
    load_engine,
    open_envs,
    play,
    problem_of,
)
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.resolve import GUEST, OWN, Resolved, resolve_all
from servegym.experiments.evaluation.stats import Interval, iqm, stratified_bootstrap

__all__ = [
    "DEFAULT_SEED",
    "Progress",
    "derived_seed",
    "evaluate",
    "fresh_seed",
    "print_summary",
    "summarise",
]

Progress = Callable[[str, int, int], None]
"""Called as ``progress(policy, finished episodes, episodes)``."""


def fresh_seed() -> int:
    """A seed that nobody knew before, below 2**62."""
    return secrets.randbits(62)


def derived_seed(seed: int, *names: str) -> int:
    """The seed of a part of a measurement, below 2**62.

    Parts of other names have other episodes: what a guest remembers of one, on disk for instance,
    is of no use in another.

    Raises:
        ValueError: If the seed is out of range.
    """
    root, key = whole("seed", seed, 0, 1 << 62), tuple("\n".join(names).encode())
    return int(np.random.SeedSequence(root, spawn_key=key).generate_state(1, np.uint64)[0] >> 2)


def evaluate(
    env_id: str,
    policies: Sequence[str | os.PathLike[str] | Policy | Resolved],
    episodes: int = 20,
    seed: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    num_envs: int | None = None,
    progress: Progress | None = None,
    logs: dict[str, list[NDArray[Any]]] | None = None,
    executor: Executor = run_serially,
    in_process: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> list[dict[str, Any]]:
    """Run every policy on the same episodes.

    Policies whose code is not the package's (``.py`` files, objects of other classes, functions)
    are guests. Each runs in a process of its own, a new one for every block, and gets no number
    that the episodes are drawn from.

    A job of the executor is one policy's block of episodes. The chance in an episode is drawn from
    the episode's own seed and a policy starts afresh with every block, so that the rows are equal
    wherever the blocks run. Policies are made here and sent to the executor's workers, so that
    checkpoints and policy files need to lie on this machine only; files that ``env_kwargs`` names
    must lie where the blocks run.

    Args:
        env_id: An id of one of the families; a policy that reads another view gets that one.
        policies: Registered names, checkpoint paths, policy files, policy objects, or what
            `resolve` made of one.
        episodes: Episodes a policy; episode i is drawn with ``seed + i``.
        seed: Seed of the first episode; by default `DEFAULT_SEED`, and with a guest, whose author
            knows that one, a `fresh_seed` that the rows tell.
        env_kwargs: Arguments of the environment; ``split`` is "eval" unless given.
        num_envs: Episodes of a block, which run side by side, by default up to 16, and one of a
            guest in a process of its own, whose time is that of single decisions then. It changes
            neither episodes nor deterministic policies, only the order in which a randomised policy
            draws.
        progress: Called after every block of episodes.
        logs: A dict to fill with the request logs of a policy's episodes, by the policy's name.
        executor: Where the blocks run.
        in_process: Run guests in the evaluator's process: for policies that you trust or that take
            the environment. Their rows say so.
        time_limit_s: Seconds that a guest may take for one answer: to be made, or to decide for
            all rows of a block.

    Returns:
        One dict a policy and episode: ``policy``, ``seed``, ``episode``, the episode's KPIs with
        their units in the name, what the family adds (routing: latency percentiles,
        ``share_<expert>`` of all requests and ``ceiling``, the mean over requests of the best true
        score), ``return`` (NaN for a policy that asks for another reward than the one given),
        ``clairvoyant``, ``source`` (``servegym``, ``guest`` or ``guest in process``), ``env_id``
        and ``env_kwargs``; of a guest in a process of its own also ``decision_s``, the seconds of
        all its decisions over their number, and ``slowest_decision_s``. In routing a request waits
        for a decision of `SLOW_S` or longer. What is undefined (the latency of a policy that drops
        everything) is NaN.

    Raises:
        ValueError: If an argument, a policy's name or an environment's argument is not valid, or
            a policy asks for an argument that changes the world, before the first episode.
        PolicyError: If a guest fails, ends its process, takes too long or too much memory, or acts
            wrongly.
    """
    plan, resolved = make_plan(
        env_id,
        policies,
        episodes,
        seed,
        env_kwargs,
        num_envs,
        logs is not None,
        in_process,
        time_limit_s,
    )
    jobs = [
        (one, policy, start)
        for policy in resolved
        for one in [plan if num_envs or policy.source != GUEST else plan._replace(block_size=1)]
        for start in range(0, episodes, one.block_size)
    ]
    names = [
        f"{policy.name}, episodes {start} to {min(start + one.block_size, episodes) - 1}"
        for one, policy, start in jobs
    ]
    blocks: dict[int, Block] = {}
    finished = {policy.name: 0 for policy in resolved}
    guests: list[Any] = [policy.policy for policy in resolved if policy.source == GUEST]
    folders = {folder for guest in guests for folder in guest.folders}
    path = sys.path[:]
    sys.path[:] = [entry for entry in path if entry not in folders]  # guests may write there
    try:
        for index, block in executor(evaluate_block, jobs, names):
            blocks[index] = block
            name = jobs[index][1].name
            finished[name] += len(block.rows)
            if progress is not None:
                progress(name, finished[name], episodes)
    finally:
        sys.path[:] = path
    rows: list[dict[str, Any]] = []
    for index, (_, policy, _) in enumerate(jobs):
        rows += blocks[index].rows
        if logs is not None and blocks[index].logs:
            logs.setdefault(policy.name, []).extend(blocks[index].logs)
    return rows


class Plan(NamedTuple):
    """The checked arguments of `evaluate`: the same blocks of episodes for every policy.

    Attributes:
        family: The environment family.
        env_kwargs: Arguments of the environment, with the split.
        reported_kwargs: JSON of the system and load that every row names.
        episodes: Episodes a policy.
        seed: Seed of the first episode.
        block_size: Episodes of a block.
        return_logs: Whether request logs are wanted.
    """

    family: Family
    env_kwargs: dict[str, Any]
    reported_kwargs: str
    episodes: int
    seed: int
    block_size: int
    return_logs: bool


class Block(NamedTuple):
    """The rows of a policy's block of episodes, and their request logs where they are wanted."""

    rows: list[dict[str, Any]]
    logs: list[NDArray[Any]]


def make_plan(
    env_id: str,
    policies: Sequence[str | os.PathLike[str] | Policy | Resolved],
    episodes: int,
    seed: int | None,
    env_kwargs: Mapping[str, Any] | None,
    num_envs: int | None,
    return_logs: bool,
    in_process: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> tuple[Plan, list[Resolved]]:
    """Check the arguments of `evaluate` and look up its policies, before the first episode.

    Raises:
        ValueError: If an argument, a policy's name or an environment's argument is not valid.
    """
    for argument, value, low in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value is not None and value < low:
            raise ValueError(f"{argument} is {value}; allowed is {low} or more")
    if num_envs is not None and num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; allowed is 1 or more")
    if not policies:
        raise ValueError("policies is empty; name at least one")
    family = family_of(env_id)
    kwargs = {"split": "eval", **(env_kwargs or {})}
    # All names are looked up before the first episode: a typo must not cost the others' work.
    problem = problem_of(family.env_id, kwargs)
    # Every row names its system and load, given or default.
    # What is drawn with each episode is no argument.
    known = problem.arguments
    reported = {key: known[key] for key in report_of(family).reported_arguments if key in known}

    def prepare(own: list[Resolved]) -> None:  # loads all that is needed later
        load_engine(family.group)
        for one in own:
            with closing(open_envs(family, one, 1, kwargs)) as envs:
                next(play(envs, one))

    options = {"in_process": in_process, "time_limit_s": time_limit_s, "prepare": prepare}
    resolved = _distinct(resolve_all(policies, problem, family, **options))
    if seed is None:
        seed = DEFAULT_SEED if all(one.own for one in resolved) else fresh_seed()
    plan = Plan(
        family,
        kwargs,
        json.dumps({**reported, **kwargs}, sort_keys=True),
        episodes,
        seed,
        min(num_envs or 16, episodes),
        return_logs,
    )
    return plan, resolved


def evaluate_block(plan: Plan, entered: Resolved, start: int) -> Block:
    """Run a policy's block of episodes, the first of which is number ``start``."""
    report = report_of(plan.family)
    reward = plan.env_kwargs.get("reward")
    same_reward = entered.env_kwargs.get("reward", reward) == reward
    guest: Any = entered.policy if entered.source == GUEST else None
    if guest is not None:  # here, too: this may be another process than that of the plan
        load_engine(plan.family.group)
    envs = open_envs(plan.family, entered, plan.block_size, plan.env_kwargs)
    try:
        terms = () if entered.own or entered.clairvoyant else report.feedback_terms
        results = _run_episodes(envs, entered, plan.seed + start, start, terms)
        # The last block runs to its end like the others; what is beyond the episodes is left out.
        results = results[: plan.episodes - start]
        taken = [] if guest is None else guest.taken_s
        timed = (
            {"decision_s": float(np.mean(taken)), "slowest_decision_s": max(taken)} if taken else {}
        )
        rows = [
            {
                "policy": entered.name,
                "seed": plan.seed + episode,
                "episode": episode,
                **result["kpis"],
                **report.episode_statistics(result, envs.unwrapped.problem),
                "return": result["return"] if same_reward else math.nan,
                "clairvoyant": entered.clairvoyant,
                "source": entered.source,
                **timed,
                "env_id": plan.family.env_id,
                "env_kwargs": plan.reported_kwargs,
            }
            for episode, result in enumerate(results, start)
        ]
    finally:
        envs.close()
        if guest is not None:
            guest.close()
    logs = [result["log"] for result in results if result["log"] is not None]
    return Block(rows, logs if plan.return_logs else [])


def _distinct(resolved: list[Resolved]) -> list[Resolved]:
    """Number policies of one name apart, so that their rows are not pooled."""
    seen: dict[str, int] = {}
    out = []
    for one in resolved:
        number = seen[one.name] = seen.get(one.name, 0) + 1
        out.append(one if number == 1 else one._replace(name=f"{one.name} #{number}"))
    return out


def _run_episodes(
    envs: Any, entered: Resolved, seed: int, start: int, terms: Sequence[str]
) -> list[dict[str, Any]]:
    """KPIs, log and return of one episode in every environment, see `play`."""
    returns = np.zeros(envs.num_envs)
    info: dict[str, Any] = {}
    for step in play(envs, entered, seed, start, terms):
        returns += step.reward
        info = step.info
    kpis, has_log = info["episode_kpis"], hasattr(envs.unwrapped, "request_log")
    return [
        {
            "kpis": {key: float(kpis[key][row]) for key in kpis if key[0] != "_"},
            "log": envs.unwrapped.request_log(row) if has_log else None,
            "return": float(returns[row]),
        }
        for row in range(envs.num_envs)
    ]


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One dict a policy from the rows of `evaluate`, in the order of the rows.

    Returns:
        ``policy``, ``clairvoyant``, ``source``, ``episodes``, the family's headline (routing:
        ``avg_qos``) as an `Interval` of the interquartile mean with its stratified-bootstrap 95 %
        interval, its plain mean (routing: ``mean_qos``), and the mean over episodes of every other
        number. A mean leaves out the episodes where the number is undefined and is NaN where it is
        undefined in all of them.
    """
    report, out = report_of(family_of(rows[0]["env_id"])), []
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        summary: dict[str, Any] = {
            "policy": name,
            "clairvoyant": own[0]["clairvoyant"],
            "source": own[0].get("source", OWN),
            "episodes": len(own),
            report.headline: stratified_bootstrap([row[report.headline] for row in own], iqm),
            report.mean_key: float(np.mean([row[report.headline] for row in own])),
        }
        for key, value in own[0].items():
            if key in summary or key in ("seed", "episode") or not isinstance(value, float | int):
                continue
            values = np.array([row[key] for row in own], dtype=np.float64)
            values = values[np.isfinite(values)]
            summary[key] = float(values.mean()) if values.size else math.nan
        out.append(summary)
    return out


def _number(value: float, digits: int, scale: float = 1.0, unit: str = "") -> str:
    return "–" if not math.isfinite(value) else f"{scale * value:.{digits}f}{unit}"


def _interval(interval: Interval) -> str:
    value, low, high = (_number(number, 3) for number in interval)
    return f"{value} [{low}, {high}]"


def _label(summary: Mapping[str, Any]) -> str:
    marks = [summary["source"]] if summary["source"] != OWN else []
    marks += ["clairvoyant"] if summary["clairvoyant"] else []
    return summary["policy"] + (f" ({', '.join(marks)})" if marks else "")


def rank_disagreements(
    summaries: Sequence[Mapping[str, Any]], key: str = "mean_qos", higher_is_better: bool = True
) -> list[str]:
    """Policies whose rank by mean return differs from the rank by the mean headline number.

    A reward that orders policies otherwise than the measured quality trains towards the wrong
    thing; policies without a comparable return are left out.
    """
    sign = -1.0 if higher_is_better else 1.0
    compared = [s for s in summaries if math.isfinite(s["return"])]
    by_quality = sorted(compared, key=lambda s: sign * s[key])
    by_return = sorted(compared, key=lambda s: -s["return"])
    return [s["policy"] for s in compared if by_quality.index(s) != by_return.index(s)]


def print_summary(
    rows: Sequence[Mapping[str, Any]],
    logs: Mapping[str, Sequence[NDArray[Any]]] | None = None,
    every: bool = False,
) -> None:
    """Print the comparison of the rows of `evaluate`: one table of the metrics that decide.

    Args:
        rows: What `evaluate` returned.
        logs: Request logs of `evaluate`; they add the mean over requests with its interval to every
            metric.
        every: All metrics, the return, and the share of each expert.
    """
    summaries = summarise(rows)
    first = rows[0]
    report, arguments = report_of(family_of(first["env_id"])), json.loads(first["env_kwargs"])
    given = ", ".join(f"{k}={v}" for k, v in arguments.items())
    seeds = sorted({row["seed"] for row in rows})
    title = f"{first['env_id']} ({given}): {len(seeds)} episodes, seeds {seeds[0]}..{seeds[-1]}"
    disagree = rank_disagreements(summaries, report.mean_key, report.higher_is_better)
    disagree = disagree if every else []
    by_request = {
        name: interval
        for name, own in (logs or {}).items()
        if every
        if (interval := report.request_interval(own, arguments)) is not None
    }
    body = []
    for s in summaries:
        body.append(
            [
                _label(s),
                _interval(s[report.headline]),
                *([_interval(by_request[s["policy"]])] if by_request else []),
                *(_number(s[c.key], c.digits, c.scale) for c in report.shown(every)),
                *([_number(s["return"], 1) + "*" * (s["policy"] in disagree)] if every else []),
            ]
        )
    headings = [
        "policy",
        report.heading,
        *([f"mean {report.heading}"] if by_request else []),
        *(column.title for column in report.shown(every)),
        *(["return"] if every else []),
    ]
    if "ceiling" in first:
        ceiling = _number(float(np.mean([row["ceiling"] for row in rows])), 3)
        blanks = [""] * (len(headings) - 2)
        body.append(["ceiling (mean best score)", ceiling, *blanks])
    notes = list(report.notes)
    if by_request:
        notes.append(
            f"mean {report.heading}: over all requests [95 % interval over episodes and prompts]."
        )
    if disagree:
        notes.append(f"* ranked differently by return than by {report.heading}.")
    print_table(title, headings, body, notes)
    shares = [key for key in summaries[0] if key.startswith("share_")]
    if shares and every:
        print_table(
            "Share of all requests sent to each expert, %",
            ["policy", *(key.removeprefix("share_") for key in shares)],
            [[_label(s), *(_number(s[key], 1, 100) for key in shares)] for s in summaries],
        )
