"""Evaluate policies on the same episodes and summarise what the served users got.

Episode ``i`` is the one an environment draws with seed ``seed + i``, for every policy and whatever
the number of environments that run side by side. Latency is never reported without the drop and
reject rates: a router can buy any latency by refusing requests.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

import servegym  # noqa: F401  registers the ids
from servegym.agents.lib.checkpoint import shipped, shipped_for
from servegym.baselines.policy_file import FilePolicy, PolicyError, policy_from_file
from servegym.baselines.protocol import CallablePolicy, Policy
from servegym.baselines.registry import describe_system, list_policies, make_policy
from servegym.envs.families import FAMILIES, Family, family_named, family_of
from servegym.experiments.evaluation.executor import Executor, run_serially
from servegym.experiments.evaluation.guest import TIME_LIMIT_S, GuestPolicy
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.stats import Interval, iqm, stratified_bootstrap

__all__ = [
    "Progress",
    "evaluate",
    "fresh_seed",
    "make_envs",
    "print_summary",
    "resolve",
    "summarise",
]

DEFAULT_SEED = 100_000
"""Far from the seeds 0, 1, ... that training runs use."""

OWN, GUEST, GUEST_IN_PROCESS = "servegym", "guest", "guest in process"
"""Where a policy's code comes from and runs, ``source`` of its rows."""

RESERVED = ("autoreset_mode", "copy", "max_episode_steps", "num_envs", "render_mode")

Progress = Callable[[str, int, int], None]
"""Called as ``progress(policy, finished episodes, episodes)``."""


class Resolved(NamedTuple):
    """A policy and what was checked of it; what it says of itself later counts no more.

    Attributes:
        name: The name its rows carry.
        policy: The policy.
        source: `OWN` (the package's code), `GUEST` (in a process of its own) or
            `GUEST_IN_PROCESS`.
        clairvoyant: Whether it says so, takes the environment or is rewarded for what has not
            ended.
        env_view: The observation it reads.
        env_kwargs: Arguments of the environment that it sets; all change the interface alone.
        needs_env: Whether it takes the environment.
        needs_outcomes: Whether it is told which requests have ended.
    """

    name: str
    policy: Policy
    source: str
    clairvoyant: bool
    env_view: str
    env_kwargs: dict[str, Any]
    needs_env: bool
    needs_outcomes: bool = False


def fresh_seed() -> int:
    """A seed that nobody knew before, below 2**62."""
    return secrets.randbits(62)


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
    policy: str | os.PathLike[str] | Policy,
    system: Any,
    family: str = "llm_routing",
    *,
    in_process: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> Resolved:
    """Turn a policy's or shipped checkpoint's name, a path or a policy object into a policy.

    Policies whose code is not the package's are guests: they get a process of their own, and may
    set no argument of the environment that changes the world.

    Args:
        policy: What `evaluate` takes.
        system: Description of the system, for policies made by name.
        family: The environment family.
        in_process: Run guests in this process.
        time_limit_s: Seconds that a guest may take for one answer.

    Raises:
        ValueError: If the name is unknown and no such file exists, or the policy asks for what it
            may not.
    """
    limit = None if in_process else time_limit_s
    if not isinstance(policy, str | os.PathLike):
        return _checked(policy.name, policy, family, system, limit)
    name = os.fspath(policy)
    names = [info.name for info in list_policies(family)]
    if name in names:
        made = make_policy(name, system, family=family)
        return _checked(name, made, family, system, limit, known=True)
    trained = shipped(family)
    file = shipped_for(family, name, system) or Path(name)
    if file.exists():
        if file.suffix == ".py":
            if in_process:
                loaded = policy_from_file(file, system)
            else:
                loaded = GuestPolicy(file, system, time_limit_s)
            return _checked(loaded.name, loaded, family, system, limit)
        from servegym.agents import load_policy

        loaded = load_policy(file, system)
        label = name if name in trained else loaded.name
        if label in trained and file.resolve() not in trained.values():
            label = f"{label} ({name})"
        return _checked(label, loaded, family, system, limit)
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


def _is_own(policy: Policy) -> bool:
    """Whether a policy, and what it wraps, is the package's code."""
    code = policy._fn if type(policy) is CallablePolicy else type(policy)
    module = getattr(code, "__module__", None) or ""
    if module == "__main__":  # a module of the package that runs as a program
        module = getattr(getattr(sys.modules[module], "__spec__", None), "name", "")
    if module.partition(".")[0] != "servegym":
        return False
    return not isinstance(policy, FilePolicy) or _is_own(policy.policy)


def _checked(
    name: str,
    policy: Policy,
    family_name: str,
    system: Any,
    time_limit_s: float | None,
    known: bool = False,
) -> Resolved:
    """The policy with what may be believed of it, a guest in a process of its own.

    Raises:
        ValueError: If it asks for an argument that changes the world, or takes another's name.
    """
    family = family_named(family_name)
    report, source = report_of(family), OWN
    if isinstance(policy, GuestPolicy) or not _is_own(policy):
        if time_limit_s is not None and not isinstance(policy, GuestPolicy):
            policy = GuestPolicy(policy, system, time_limit_s)
        source = GUEST if isinstance(policy, GuestPolicy) else GUEST_IN_PROCESS
        name = name if known else _guest_name(policy.name, family_name)
    asked, needs_env = copy.deepcopy(dict(policy.env_kwargs)), bool(policy.needs_env)
    allowed = report.interface + (report.serving if source == OWN else ())
    for key, value in asked.items():
        if key not in allowed:
            raise ValueError(
                f"policy {name!r} asks for {key}={value!r} in env_kwargs, which changes the world "
                f"that it is measured in; allowed are {', '.join(allowed)}"
            )
    if needs_env and source == GUEST:
        raise ValueError(
            f"policy {name!r} has needs_env, but the environment is in another process; "
            "in_process=True (--in-process) runs it in this one, marked as clairvoyant"
        )
    family.view_id(policy.env_view)
    early = any(asked.get(key) == value for key, value in report.early.items())
    clairvoyant = bool(policy.clairvoyant) or needs_env or early
    ended = bool(getattr(policy, "needs_outcomes", False))
    if ended and not family.outcomes:
        raise ValueError(
            f"policy {name!r} has needs_outcomes, but requests of {family.name} end within their "
            "step: its reward tells all; allowed is False"
        )
    return Resolved(name, policy, source, clairvoyant, policy.env_view, asked, needs_env, ended)


def _guest_name(name: Any, family: str) -> str:
    """A guest's name, which rows and tables may carry.

    Raises:
        ValueError: If it is a policy's or checkpoint's of the package, or no plain name.
    """
    if not (isinstance(name, str) and re.fullmatch(r"\w[\w .+:=/-]{0,59}", name)):
        raise ValueError(
            f"a policy's name is {name!r:.100}; allowed are up to 60 letters, digits, blanks and "
            "any of _.+:=/-"
        )
    if name in shipped(family) or name in [info.name for info in list_policies(family)]:
        raise ValueError(f"a policy's name is {name!r}, which servegym has itself; take another")
    return name


def evaluate(
    env_id: str,
    policies: Sequence[str | os.PathLike[str] | Policy],
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
        policies: Registered names, checkpoint paths, policy files or policy objects.
        episodes: Episodes a policy; episode i is drawn with ``seed + i``.
        seed: Seed of the first episode; by default `DEFAULT_SEED`, and with a guest, whose author
            knows that one, a `fresh_seed` that the rows tell.
        env_kwargs: Arguments of the environment; ``split`` is "eval" unless given.
        num_envs: Episodes of a block, which run side by side, by default up to 16. It changes
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
        and ``env_kwargs``. What is undefined (the latency of a policy that drops everything) is
        NaN.

    Raises:
        ValueError: If an argument, a policy's name or an environment's argument is not valid, or
            a policy asks for an argument that changes the world, before the first episode.
        PolicyError: If a guest fails, ends its process, takes too long or acts wrongly.
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
    jobs = [(plan, policy, start) for policy in resolved for start in plan.starts]
    names = [
        f"{policy.name}, episodes {start} to {min(start + plan.block_size, episodes) - 1}"
        for _, policy, start in jobs
    ]
    blocks: dict[int, Block] = {}
    finished = {policy.name: 0 for policy in resolved}
    for index, block in executor(evaluate_block, jobs, names):
        blocks[index] = block
        name = jobs[index][1].name
        finished[name] += len(block.rows)
        if progress is not None:
            progress(name, finished[name], episodes)
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
    envs = make_envs(family.env_id, 1, kwargs)
    problem = envs.unwrapped.problem
    envs.close()
    # Every row names its system and load, given or default.
    # What is drawn with each episode is no argument.
    known = problem.arguments
    reported = {key: known[key] for key in report_of(family).reported_arguments if key in known}
    system = describe_system(problem, family=family.name)
    resolved = _distinct(
        [
            resolve(policy, system, family.name, in_process=in_process, time_limit_s=time_limit_s)
            for policy in policies
        ]
    )
    if seed is None:
        seed = fresh_seed() if any(r.source != OWN for r in resolved) else DEFAULT_SEED
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


def play_envs(
    family: Family,
    entered: Resolved,
    num_envs: int,
    env_kwargs: Mapping[str, Any],
    render_mode: str | None = None,
) -> Any:
    """The vector environment in the view of a policy, bound to it if it takes environments."""
    kwargs = {**env_kwargs, **entered.env_kwargs}
    envs = make_envs(family.view_id(entered.env_view), num_envs, kwargs, render_mode)
    if entered.needs_env:
        cast(Any, entered.policy).bind(envs)
    return envs


def learner(entered: Resolved, envs: Any) -> Callable[[NDArray[np.float64]], None]:
    """What tells a policy the rewards of a step, and before them what has ended if it asks."""
    policy: Any = entered.policy
    if not entered.needs_outcomes:
        return policy.feedback
    family = family_of(envs.unwrapped.spec.id).name
    reader = importlib.import_module(f"servegym.envs.{family}.outcomes").OutcomeReader(envs)

    def learn(reward: NDArray[np.float64]) -> None:
        policy.outcomes(reader.read())
        policy.feedback(reward)

    return learn


def policy_seed(entered: Resolved, seed: int, start: int) -> int:
    """The seed of a policy's own chance in a block of episodes.

    Args:
        entered: The policy.
        seed: Seed of the block's first episode.
        start: Number of that episode, all that a guest is told: with the seed it could draw the
            episode itself and look at what is to come.
    """
    return seed if entered.source == OWN else start


def evaluate_block(plan: Plan, entered: Resolved, start: int) -> Block:
    """Run a policy's block of episodes, the first of which is number ``start``."""
    report = report_of(plan.family)
    reward = plan.env_kwargs.get("reward")
    same_reward = entered.env_kwargs.get("reward", reward) == reward
    envs = play_envs(plan.family, entered, plan.block_size, plan.env_kwargs)
    try:
        terms = () if entered.source == OWN or entered.clairvoyant else report.feedback_terms
        results = _run_episodes(envs, entered, plan.seed + start, plan.block_size, start, terms)
        # The last block runs to its end like the others; what is beyond the episodes is left out.
        results = results[: plan.episodes - start]
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
                "env_id": plan.family.env_id,
                "env_kwargs": plan.reported_kwargs,
            }
            for episode, result in enumerate(results, start)
        ]
    finally:
        envs.close()
        if isinstance(entered.policy, GuestPolicy):
            entered.policy.close()
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
    envs: Any, entered: Resolved, seed: int, count: int, start: int, terms: Sequence[str]
) -> list[dict[str, Any]]:
    """One episode in every environment, row i with seed ``seed + i``: its KPIs, log and return.

    Of the reward the policy is told these terms, or all of it where there are none.
    """
    policy = entered.policy
    observation, info = envs.reset(seed=[seed + i for i in range(count)])
    mask = info.get("action_mask")
    # The policy starts afresh, so that what it learned on earlier episodes cannot leak into these
    # and their grouping into blocks does not matter.
    policy.reset(count, seed=policy_seed(entered, seed, start))
    learn = learner(entered, envs)
    returns = np.zeros(count)
    ended = np.zeros(count, dtype=bool)
    while not ended.any():
        actions = policy.act(observation, mask)
        try:
            observation, reward, ended, _, info = envs.step(actions)
        except ValueError as error:
            raise PolicyError(f"policy {entered.name!r} acted wrongly: {error}") from error
        returns += reward
        if terms:
            parts = info["reward_terms"]
            reward = sum((parts[term] for term in terms if term in parts), np.zeros(count))
        learn(reward)
        mask = info.get("action_mask")
    if not ended.all():
        raise RuntimeError("episodes of one environment differ in length")
    kpis, has_log = info["episode_kpis"], hasattr(envs.unwrapped, "request_log")
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
