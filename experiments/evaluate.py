"""Evaluate policies on the same episodes and summarise what the served users got.

Episode ``i`` is the one an environment draws with seed ``seed + i``, for every policy and whatever
the number of environments that run side by side. Latency is never reported without the drop and
reject rates: a router can buy any latency by refusing requests.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

import servegym  # noqa: F401  registers the ids
from servegym.agents.lib.checkpoint import shipped, shipped_for
from servegym.baselines.policy_file import policy_from_file
from servegym.baselines.protocol import Policy
from servegym.baselines.registry import describe_system, list_policies, make_policy
from servegym.envs.families import FAMILIES, Family, family_of
from servegym.experiments.executor import Executor, run_serially
from servegym.experiments.output import print_table
from servegym.experiments.reporting import report_of
from servegym.experiments.stats import Interval, iqm, stratified_bootstrap

__all__ = ["Progress", "evaluate", "make_envs", "print_summary", "resolve", "summarise"]

DEFAULT_SEED = 100_000
"""Far from the seeds 0, 1, ... that training runs use."""

RESERVED = ("autoreset_mode", "copy", "max_episode_steps", "num_envs", "render_mode")

Progress = Callable[[str, int, int], None]
"""Called as ``progress(policy, finished episodes, episodes)``."""


class Resolved(NamedTuple):
    """A policy with the name its rows carry."""

    name: str
    policy: Policy


def make_envs(
    env_id: str, num_envs: int, env_kwargs: Mapping[str, Any], render_mode: str | None = None
) -> Any:
    """The native vector environment of an id; episodes that have ended wait to be reset."""
    for key in env_kwargs:
        if key in RESERVED:
            raise ValueError(f"{key!r} cannot be set: whole episodes are evaluated")
    return gymnasium.make_vec(
        env_id,
        num_envs=num_envs,
        vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT,
        autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED,
        render_mode=render_mode,
        **env_kwargs,
    )


def resolve(
    policy: str | os.PathLike[str] | Policy, system: Any, family: str = "llm_routing"
) -> Resolved:
    """Turn a policy's or shipped checkpoint's name, a path or a policy object into a policy.

    Args:
        policy: What `evaluate` takes.
        system: Description of the system, for policies made by name.
        family: The environment family.

    Raises:
        ValueError: If the name is unknown and no such file exists.
    """
    if not isinstance(policy, str | os.PathLike):
        return Resolved(policy.name, policy)
    name = os.fspath(policy)
    names = [info.name for info in list_policies(family)]
    if name in names:
        return Resolved(name, make_policy(name, system, family=family))
    trained = shipped(family)
    file = shipped_for(family, name, system) or Path(name)
    if file.exists():
        if file.suffix == ".py":
            loaded = policy_from_file(file, system)
            return Resolved(loaded.name, loaded)
        from servegym.agents import load_policy

        loaded = load_policy(file, system)
        return Resolved(name if name in trained else loaded.name, loaded)
    for other in FAMILIES:
        if other.name != family and name in [info.name for info in list_policies(other.name)]:
            raise ValueError(
                f"policy is {name!r}, which is a policy for {other.name}, not for {family}; "
                "see `servegym list`"
            )
    names += trained
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
        f"policy is {name!r}, which is neither the path of a checkpoint or .py file nor one of "
        f"{', '.join(names)}{hint}"
    )


def evaluate(
    env_id: str,
    policies: Sequence[str | os.PathLike[str] | Policy],
    episodes: int = 20,
    seed: int = DEFAULT_SEED,
    env_kwargs: Mapping[str, Any] | None = None,
    num_envs: int | None = None,
    progress: Progress | None = None,
    logs: dict[str, list[NDArray[Any]]] | None = None,
    executor: Executor = run_serially,
) -> list[dict[str, Any]]:
    """Run every policy on the same episodes.

    A job of the executor is one policy's block of episodes. The chance in an episode is drawn from
    the episode's own seed and a policy starts afresh with every block, so that the rows are equal
    wherever the blocks run. Policies are made here and sent to the executor's workers, so that
    checkpoints and policy files need to lie on this machine only; files that ``env_kwargs`` names
    must lie where the blocks run.

    Args:
        env_id: An id of one of the families; a policy that reads another view gets that one.
        policies: Registered names, checkpoint paths or policy objects.
        episodes: Episodes a policy; episode i is drawn with ``seed + i``.
        seed: Seed of the first episode.
        env_kwargs: Arguments of the environment; ``split`` is "eval" unless given.
        num_envs: Episodes of a block, which run side by side, by default up to 16. It changes
            neither episodes nor deterministic policies, only the order in which a randomised policy
            draws.
        progress: Called after every block of episodes.
        logs: A dict to fill with the request logs of a policy's episodes, by the policy's name.
        executor: Where the blocks run.

    Returns:
        One dict a policy and episode: ``policy``, ``seed``, ``episode``, the episode's KPIs with
        their units in the name, what the family adds (routing: latency percentiles,
        ``share_<expert>`` of all requests and ``ceiling``, the mean over requests of the best true
        score), ``return`` (NaN for a policy that asks for another reward than the one given),
        ``clairvoyant``, ``env_id`` and ``env_kwargs``. What is undefined (the latency of a policy
        that drops everything) is NaN.

    Raises:
        ValueError: If an argument, a policy's name or an environment's argument is not valid,
            before the first episode.
    """
    plan, resolved = make_plan(
        env_id, policies, episodes, seed, env_kwargs, num_envs, logs is not None
    )
    jobs = [(plan, name, policy, start) for name, policy in resolved for start in plan.starts]
    names = [
        f"{name}, episodes {start} to {min(start + plan.block_size, episodes) - 1}"
        for _, name, _, start in jobs
    ]
    blocks: dict[int, Block] = {}
    finished = {policy.name: 0 for policy in resolved}
    for index, block in executor(evaluate_block, jobs, names):
        blocks[index] = block
        name = jobs[index][1]
        finished[name] += len(block.rows)
        if progress is not None:
            progress(name, finished[name], episodes)
    rows: list[dict[str, Any]] = []
    for index, (_, name, _, _) in enumerate(jobs):
        rows += blocks[index].rows
        if logs is not None and blocks[index].logs:
            logs.setdefault(name, []).extend(blocks[index].logs)
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

    @property
    def starts(self) -> range:
        """The first episode of every block."""
        return range(0, self.episodes, self.block_size)


class Block(NamedTuple):
    """The rows of a policy's block of episodes, and their request logs where they are wanted."""

    rows: list[dict[str, Any]]
    logs: list[NDArray[Any]]


def make_plan(
    env_id: str,
    policies: Sequence[str | os.PathLike[str] | Policy],
    episodes: int,
    seed: int,
    env_kwargs: Mapping[str, Any] | None,
    num_envs: int | None,
    return_logs: bool,
) -> tuple[Plan, list[Resolved]]:
    """Check the arguments of `evaluate` and look up its policies, before the first episode.

    Raises:
        ValueError: If an argument, a policy's name or an environment's argument is not valid.
    """
    for argument, value, low in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value < low:
            raise ValueError(f"{argument} is {value}; allowed is {low} or more")
    if num_envs is not None and num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; allowed is 1 or more")
    if not policies:
        raise ValueError("policies is empty; name at least one")
    family = family_of(env_id)
    kwargs = {"split": "eval", **(env_kwargs or {})}
    # All names are looked up before the first episode: a typo must not cost the others' work.
    envs = make_envs(family.env_id, 1, kwargs)
    problem = envs.unwrapped.problem
    envs.close()
    # Every row names its system and load, given or default.
    reported = {key: problem.arguments[key] for key in report_of(family).reported_arguments}
    system = describe_system(problem, family=family.name)
    resolved = _distinct([resolve(policy, system, family.name) for policy in policies])
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


def evaluate_block(plan: Plan, name: str, policy: Policy, start: int) -> Block:
    """Run a policy's block of episodes, the first of which is number ``start``."""
    report = report_of(plan.family)
    same_reward = all(
        plan.env_kwargs.get(key) == value
        for key, value in policy.env_kwargs.items()
        if key not in report.reward_neutral
    )
    kwargs = {**plan.env_kwargs, **policy.env_kwargs}
    envs = make_envs(plan.family.view_id(policy.env_view), plan.block_size, kwargs)
    try:
        if policy.needs_env:
            cast(Any, policy).bind(envs)
        results = _run_episodes(envs, policy, plan.seed + start, plan.block_size)
        # The last block runs to its end like the others; what is beyond the episodes is left out.
        results = results[: plan.episodes - start]
        rows = [
            {
                "policy": name,
                "seed": plan.seed + episode,
                "episode": episode,
                **result["kpis"],
                **report.episode_statistics(result, envs.unwrapped.problem),
                "return": result["return"] if same_reward else math.nan,
                "clairvoyant": policy.clairvoyant,
                "env_id": plan.family.env_id,
                "env_kwargs": plan.reported_kwargs,
            }
            for episode, result in enumerate(results, start)
        ]
    finally:
        envs.close()
    logs = [result["log"] for result in results if result["log"] is not None]
    return Block(rows, logs if plan.return_logs else [])


def _distinct(resolved: list[Resolved]) -> list[Resolved]:
    """Number policies of one name apart, so that their rows are not pooled."""
    seen: dict[str, int] = {}
    out = []
    for name, policy in resolved:
        seen[name] = seen.get(name, 0) + 1
        out.append(Resolved(name if seen[name] == 1 else f"{name} #{seen[name]}", policy))
    return out


def _run_episodes(envs: Any, policy: Policy, seed: int, count: int) -> list[dict[str, Any]]:
    """One episode in every environment, row i with seed ``seed + i``: its KPIs, log and return."""
    observation, info = envs.reset(seed=[seed + i for i in range(count)])
    mask = info.get("action_mask")
    # The policy starts afresh, so that what it learned on earlier episodes cannot leak into these
    # and their grouping into blocks does not matter.
    policy.reset(count, seed=seed)
    returns = np.zeros(count)
    ended = np.zeros(count, dtype=bool)
    while not ended.any():
        observation, reward, ended, _, info = envs.step(policy.act(observation, mask))
        policy.feedback(reward)
        returns += reward
        mask = info.get("action_mask")
    if not ended.all():
        raise RuntimeError("episodes of one environment differ in length")
    kpis = info["episode_kpis"]
    has_log = hasattr(envs.unwrapped, "request_log")
    return [
        {
            "kpis": {key: float(kpis[key][row]) for key in kpis if key[0] != "_"},
            "log": envs.unwrapped.request_log(row) if has_log else None,
            "return": float(returns[row]),
        }
        for row in range(count)
    ]


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One dict a policy from the rows of `evaluate`, in the order of the rows.

    Returns:
        ``policy``, ``clairvoyant``, ``episodes``, the family's headline (routing: ``avg_qos``) as
        an `Interval` of the interquartile mean with its stratified-bootstrap 95 % interval, its
        plain mean (routing: ``mean_qos``), and the mean over episodes of every other number. A
        mean leaves out the episodes where the number is undefined and is NaN where it is
        undefined in all of them.
    """
    report, out = report_of(family_of(rows[0]["env_id"])), []
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        summary: dict[str, Any] = {
            "policy": name,
            "clairvoyant": own[0]["clairvoyant"],
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
    return summary["policy"] + (" (clairvoyant)" if summary["clairvoyant"] else "")


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
    title: str = "",
    file: TextIO | None = None,
    logs: Mapping[str, Sequence[NDArray[Any]]] | None = None,
) -> None:
    """Print the comparison of the rows of `evaluate`: quality, latency, shares.

    Args:
        rows: What `evaluate` returned.
        title: Line above the table; the id, its arguments and the episodes by default.
        file: Where to print, standard output by default.
        logs: Request logs of `evaluate`; they add the mean over requests with its interval.
    """
    summaries = summarise(rows)
    first = rows[0]
    if not title:
        given = ", ".join(f"{k}={v}" for k, v in json.loads(first["env_kwargs"]).items())
        seeds = sorted({row["seed"] for row in rows})
        title = f"{first['env_id']} ({given}): {len(seeds)} episodes, seeds {seeds[0]}..{seeds[-1]}"
    report, arguments = report_of(family_of(first["env_id"])), json.loads(first["env_kwargs"])
    disagree = rank_disagreements(summaries, report.mean_key, report.higher_is_better)
    by_request = {
        name: interval
        for name, own in (logs or {}).items()
        if (interval := report.request_interval(own, arguments)) is not None
    }
    body = []
    for s in summaries:
        body.append(
            [
                _label(s),
                _interval(s[report.headline]),
                *([_interval(by_request[s["policy"]])] if by_request else []),
                *(_number(s[c.key], c.digits, c.scale) for c in report.columns),
                _number(s["return"], 1) + ("*" if s["policy"] in disagree else ""),
            ]
        )
    headings = [
        "policy",
        report.heading,
        *([f"mean {report.heading}"] if by_request else []),
        *(column.title for column in report.columns),
        "return",
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
    print_table(title, headings, body, notes, file)
    shares = [key for key in summaries[0] if key.startswith("share_")]
    if shares:
        print_table(
            "Share of all requests sent to each expert, %",
            ["policy", *(key.removeprefix("share_") for key in shares)],
            [[_label(s), *(_number(s[key], 1, 100) for key in shares)] for s in summaries],
            file=file,
        )
