"""From a policy's name, path or object to what plays: `resolve_all` is the one way.

Here alone it is decided whether a policy is a guest; from here on its ``source`` says so.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from servegym._checks import missing_file, nearest
from servegym.agents.lib.checkpoint import shipped, shipped_for
from servegym.baselines.policy_file import FilePolicy, policy_from_file
from servegym.baselines.protocol import CallablePolicy, Policy
from servegym.baselines.registry import describe_system, list_policies, make_policy
from servegym.envs.families import FAMILIES, Family
from servegym.experiments.evaluation.guest import TIME_LIMIT_S, GuestPolicy
from servegym.experiments.evaluation.reporting import report_of

__all__ = ["GUEST", "GUEST_IN_PROCESS", "OWN", "Resolved", "resolve", "resolve_all"]

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

    @property
    def own(self) -> bool:
        """Whether it is the package's code, and no guest's."""
        return self.source == OWN


class _Found(NamedTuple):
    """A policy, or the ``.py`` file that defines it, whose code has not run yet."""

    policy: Policy | Path
    own: bool  # as of `Resolved`
    name: str | None = None  # where it is not the policy's to choose


def resolve(
    policy: str | os.PathLike[str] | Policy | Resolved,
    problem: Any,
    family: Family,
    *,
    in_process: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> Resolved:
    """`resolve_all` for one policy."""
    options = {"in_process": in_process, "time_limit_s": time_limit_s}
    return resolve_all([policy], problem, family, **options)[0]


def resolve_all(
    policies: Sequence[str | os.PathLike[str] | Policy | Resolved],
    problem: Any,
    family: Family,
    *,
    in_process: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    prepare: Callable[[list[Resolved]], object] = lambda own: None,
) -> list[Resolved]:
    """Turn names of policies or shipped checkpoints, paths and policy objects into policies.

    Policies whose code is not the package's are guests: they get a process of their own, and may
    set no argument of the environment that changes the world.

    Args:
        policies: What `evaluate` takes; what is resolved already stays as it is.
        problem: The environment's ``unwrapped.problem``, which is described to policies made by
            name; None where only the name is checked.
        family: The environment family.
        in_process: Run guests in this process.
        time_limit_s: Seconds that a guest may take for one answer.
        prepare: Called with the package's own policies before the first process of a guest starts.

    Raises:
        ValueError: If a name is unknown and no such file exists, or a policy asks for what it may
            not.
    """
    system = None if problem is None else describe_system(problem, family=family.name)
    limit = None if in_process else time_limit_s
    found = [p if isinstance(p, Resolved) else _find(p, system, family) for p in policies]
    done = {at: _checked(one, family, system, limit) for at, one in enumerate(found) if one.own}
    if len(done) < len(found) and not in_process:
        prepare(list(done.values()))
    return [done.get(at) or _checked(one, family, system, limit) for at, one in enumerate(found)]


def _find(policy: str | os.PathLike[str] | Policy, system: Any, family: Family) -> _Found:
    """Look a policy up.

    Raises:
        ValueError: If the name is unknown and no such file exists.
    """
    if not isinstance(policy, str | os.PathLike):
        return _Found(policy, _is_own(policy))
    name = os.fspath(policy)
    names = [info.name for info in list_policies(family.name)]
    if name in names:
        made = make_policy(name, system, family=family.name)
        return _Found(made, _is_own(made), name)
    trained = shipped(family.name)
    file = shipped_for(family.name, name, system) or Path(name)
    if file.exists():
        if file.suffix == ".py":
            return _Found(file, own=False)
        from servegym.agents import load_policy

        loaded = load_policy(file, system)
        label = name if name in trained else loaded.name
        if label in trained and file.resolve() not in trained.values():
            label = f"{label} ({name})"
        return _Found(loaded, True, label)
    if missing_file(name) or "/" in name:
        raise ValueError(f"policy is {name!r}: no such file")
    names += trained
    near, place = nearest(name, names), ""
    for other in FAMILIES:
        if other is family:
            continue
        known = [*(info.name for info in list_policies(other.name)), *shipped(other.name)]
        if name in known:
            raise ValueError(
                f"policy is {name!r}, which is a policy for {other.name}, not for {family.name}; "
                "see `servegym list`"
            )
        if near is None and (near := nearest(name, known)) is not None:
            place = f", a policy for {other.name}"
    hint = f" (did you mean {near!r}{place}?)" if near else ""
    raise ValueError(
        f"policy is {name!r}, which is neither the path of a checkpoint or .py file nor one of "
        f"{', '.join(names)}{hint}"
    )


def _is_own(policy: Policy) -> bool:
    """Whether a module of the package has the policy's class, or the function that it wraps.

    What the class says of its module is not enough: anybody can write that.
    """
    code: Any = policy._fn if type(policy) is CallablePolicy else type(policy)
    if code in (FilePolicy, GuestPolicy):  # around another's
        return False
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    # A module that runs as a program is called otherwise, but its spec tells.
    name = getattr(getattr(module, "__spec__", None), "name", "")
    found: Any = module
    for part in getattr(code, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is code and name.partition(".")[0] == "servegym"


def _checked(
    found: _Found | Resolved, family: Family, system: Any, time_limit_s: float | None
) -> Resolved:
    """The policy with what may be believed of it; without a time limit it stays in this process.

    Raises:
        ValueError: If it asks for an argument that changes the world, or takes another's name.
    """
    if isinstance(found, Resolved):
        return found
    policy, source = found.policy, OWN if found.own else GUEST_IN_PROCESS
    if not found.own and time_limit_s is not None:
        policy, source = GuestPolicy(policy, system, time_limit_s), GUEST
    elif isinstance(policy, Path):
        policy = policy_from_file(policy, system)
    name = found.name or policy.name
    if not found.own and found.name is None:
        name = _guest_name(name, family)
    report = report_of(family)
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
