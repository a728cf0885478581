"""From a policy's name, path or object to what plays: `resolve` is the one way."""

from __future__ import annotations

import copy
import difflib
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from servegym._checks import missing_file
from servegym.agents.lib.checkpoint import shipped, shipped_for
from servegym.baselines.policy_file import FilePolicy, policy_from_file
from servegym.baselines.protocol import CallablePolicy, Policy
from servegym.baselines.registry import describe_system, list_policies, make_policy
from servegym.envs.families import FAMILIES, Family
from servegym.experiments.evaluation.guest import TIME_LIMIT_S, GuestPolicy
from servegym.experiments.evaluation.reporting import report_of

__all__ = ["GUEST", "GUEST_IN_PROCESS", "OWN", "Resolved", "is_guest", "resolve"]

OWN, GUEST, GUEST_IN_PROCESS = "servegym", "guest", "guest in process"
"""Where a policy's code comes from and runs, ``source`` of its rows."""


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


def resolve(
    policy: str | os.PathLike[str] | Policy,
    problem: Any,
    family: Family,
    *,
    in_process: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> Resolved:
    """Turn a policy's or shipped checkpoint's name, a path or a policy object into a policy.

    Policies whose code is not the package's are guests: they get a process of their own, and may
    set no argument of the environment that changes the world.

    Args:
        policy: What `evaluate` takes.
        problem: The environment's ``unwrapped.problem``, which is described to policies made by
            name; None where only the name is checked.
        family: The environment family.
        in_process: Run guests in this process.
        time_limit_s: Seconds that a guest may take for one answer.

    Raises:
        ValueError: If the name is unknown and no such file exists, or the policy asks for what it
            may not.
    """
    system = None if problem is None else describe_system(problem, family=family.name)
    limit = None if in_process else time_limit_s
    if not isinstance(policy, str | os.PathLike):
        return _checked(policy.name, policy, family, system, limit)
    name = os.fspath(policy)
    names = [info.name for info in list_policies(family.name)]
    if name in names:
        made = make_policy(name, system, family=family.name)
        return _checked(name, made, family, system, limit, known=True)
    trained = shipped(family.name)
    file = shipped_for(family.name, name, system) or Path(name)
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
        if other is not family and name in [info.name for info in list_policies(other.name)]:
            raise ValueError(
                f"policy is {name!r}, which is a policy for {other.name}, not for {family.name}; "
                "see `servegym list`"
            )
    if missing_file(name) or "/" in name:
        raise ValueError(f"policy is {name!r}: no such file")
    names += trained
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
        f"policy is {name!r}, which is neither the path of a checkpoint or .py file nor one of "
        f"{', '.join(names)}{hint}"
    )


def is_guest(policy: str | os.PathLike[str] | Policy) -> bool:
    """Whether a policy's code is not the package's, as far as can be told without running it."""
    if isinstance(policy, str | os.PathLike):
        return Path(policy).suffix == ".py"
    return isinstance(policy, GuestPolicy) or not _is_own(policy)


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
    family: Family,
    system: Any,
    time_limit_s: float | None,
    known: bool = False,
) -> Resolved:
    """The policy with what may be believed of it, a guest in a process of its own.

    Raises:
        ValueError: If it asks for an argument that changes the world, or takes another's name.
    """
    report, source = report_of(family), OWN
    if is_guest(policy):
        if time_limit_s is not None and not isinstance(policy, GuestPolicy):
            policy = GuestPolicy(policy, system, time_limit_s)
        source = GUEST if isinstance(policy, GuestPolicy) else GUEST_IN_PROCESS
        name = name if known else _guest_name(policy.name, family)
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


def _guest_name(name: Any, family: Family) -> str:
    """A guest's name, which rows and tables may carry.

    Raises:
        ValueError: If it is a policy's or checkpoint's of the package, or no plain name.
    """
    if not (isinstance(name, str) and re.fullmatch(r"\w[\w .+:=/-]{0,59}", name)):
        raise ValueError(
            f"a policy's name is {name!r:.100}; allowed are up to 60 letters, digits, blanks and "
            "any of _.+:=/-"
        )
    if name in shipped(family.name) or name in [info.name for info in list_policies(family.name)]:
        raise ValueError(f"a policy's name is {name!r}, which servegym has itself; take another")
    return name
