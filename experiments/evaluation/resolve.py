"""The door of an evaluation: from a policy's name, path or object to what plays.

Here alone it is asked whether a policy is a guest. What follows from it are facts of the
`EvaluatedPolicy` that `resolve` returns.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from servegym._checks import did_you_mean, missing_file
from servegym.agents.lib.checkpoint import shipped, shipped_for
from servegym.baselines.policy_file import SUFFIXES, policy_from_file
from servegym.baselines.prefix_routing.gateway_files import SUFFIXES as GATEWAY_SUFFIXES
from servegym.baselines.prefix_routing.gateway_files import read_gateway_file
from servegym.baselines.prefix_routing.plugins import GatewayPolicy
from servegym.baselines.protocol import CallablePolicy, Policy, PredictPolicy, shapes_of
from servegym.baselines.registry import describe_system, list_policies, make_policy
from servegym.envs.families import FAMILIES, Family
from servegym.experiments.evaluation.guest import APART, GuestPolicy, Guests
from servegym.experiments.evaluation.play import GUEST_IN_PROCESS, EvaluatedPolicy
from servegym.experiments.evaluation.reporting import report_of


def resolve(
    policy: str | os.PathLike[str] | Policy,
    problem: Any,
    family: Family,
    *,
    view: str = "graph",
    guests: Guests = APART,
) -> EvaluatedPolicy:
    """Turn the name of a policy or shipped checkpoint, a path or a policy into what is evaluated.

    A policy whose code is not the package's is a guest: it gets a process of its own, may set no
    argument of the environment that changes the world, and is told of nothing that has not ended.

    Args:
        policy: What `evaluate` takes; what is resolved already stays as it is.
        problem: The environment's ``unwrapped.problem``, which is described to policies made by
            name; None where only the name is checked.
        family: The environment family.
        view: Of the id that it is evaluated on: what it reads if nothing says otherwise.
        guests: How a guest runs.

    Raises:
        ValueError: If a name is unknown and no such file exists, or a policy asks for what it may
            not.
        PolicyError: If a guest cannot be made.
    """
    if isinstance(policy, EvaluatedPolicy):
        return policy
    system = None if problem is None else describe_system(problem, family=family.name)
    report, label = report_of(family), None
    if isinstance(policy, str | os.PathLike):
        policy, label = _load(os.fspath(policy), system, family)
    elif not isinstance(policy, Policy) and callable(getattr(policy, "predict", None)):
        policy = PredictPolicy(policy.predict, type(policy).__name__)
    if not isinstance(policy, Path) and _is_of_the_package(policy):
        resolved = EvaluatedPolicy(policy, label or policy.name)
        resolved.env_view = resolved.env_view or view
        _check_requests(resolved, family, report.interface + report.serving)
    else:
        if not guests.in_process:
            resolved = GuestPolicy(policy, system, guests.time_limit_s)
        else:
            policy = policy_from_file(policy, system) if isinstance(policy, Path) else policy
            resolved = EvaluatedPolicy(policy, policy.name, GUEST_IN_PROCESS)
        resolved.name = label or _plain_name(resolved.name, family)
        resolved.env_view = resolved.env_view or _fitting_view(resolved, problem, family, view)
        _check_requests(resolved, family, report.interface)
        resolved.feedback_terms = report.feedback_terms
    early = any(resolved.env_kwargs.get(key) == value for key, value in report.early.items())
    resolved.clairvoyant = resolved.clairvoyant or resolved.needs_env or early
    if resolved.clairvoyant:
        resolved.feedback_terms = ()
    return resolved


def _load(
    name: str, system: Any, family: Family
) -> tuple[Policy, str] | tuple[Policy | Path, str | None]:
    """The policy of a name or path, and its name unless it is the policy's to choose.

    What a user's file defines is not made here: its code has not run yet.
    """
    if name in (info.name for info in list_policies(family.name)):
        return make_policy(name, system, family=family.name), name
    trained = shipped(family.name)
    file = shipped_for(family.name, name, system) or Path(name)
    if file.suffix in SUFFIXES and file.exists():
        return file, None
    if file.suffix in GATEWAY_SUFFIXES and file.exists():
        if family.name != "prefix_routing":
            raise ValueError(f"policy is {name!r}, a gateway's file; {family.env_id} takes none")
        read = read_gateway_file(file)
        return GatewayPolicy(system, read.gateway, read.setting, name=name), name
    if file.exists():
        from servegym.agents import load_policy

        policy = load_policy(file, system)
        label = name if name in trained else policy.name
        if label in trained and file.resolve() not in trained.values():
            label = f"{label} ({name})"
        return policy, label
    if missing_file(name) or "/" in name:
        raise ValueError(f"policy is {name!r}: no such file")
    names = _names(family)
    rest = [other for other in FAMILIES if other is not family]
    others = {policy: other.name for other in rest for policy in _names(other)}
    if name in others:
        raise ValueError(
            f"policy is {name!r}, which is a policy for {others[name]}, not for {family.name}; see "
            "`servegym list`"
        )
    raise ValueError(
        f"policy is {name!r}, which is neither the path of a checkpoint, .py, .zip or gateway file "
        f"nor one of {', '.join(names)}.{did_you_mean(name, [*names, *others])}"
    )


def _names(family: Family) -> list[str]:
    """The registered policies and shipped checkpoints of a family."""
    return [*(info.name for info in list_policies(family.name)), *shipped(family.name)]


def _is_of_the_package(policy: Policy) -> bool:
    """Whether a module of the package has the policy's class, or the function that it wraps."""
    wraps = type(policy) in (CallablePolicy, PredictPolicy)
    code: Any = vars(policy)["_fn"] if wraps else type(policy)
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    # A module that runs as a program is called otherwise, but its spec tells.
    name = getattr(getattr(module, "__spec__", None), "name", "")
    return name.partition(".")[0] == "servegym"


def _plain_name(name: Any, family: Family) -> str:
    """A guest's name, which rows and tables may carry: a plain one that the package has not."""
    if not (isinstance(name, str) and re.fullmatch(r"\w[\w .+:=/-]{0,59}", name)):
        raise ValueError(
            f"a policy's name is {name!r:.100}; allowed are up to 60 letters, digits, blanks and "
            "any of _.+:=/-"
        )
    if name in _names(family):
        raise ValueError(f"a policy's name is {name!r}, which servegym has itself; take another")
    return name


def _fitting_view(policy: EvaluatedPolicy, problem: Any, family: Family, view: str) -> str:
    """The view with the shapes that a policy was trained on, ``view`` if it knows none."""
    if not policy.observation_shapes or problem is None:
        return view
    module, known = import_module(f"servegym.envs.{family.name}.env"), {}
    for other in dict.fromkeys((view, *family.views)):
        env = getattr(module, f"{family.views[other].partition('-')[0]}Env")
        made = env.make_problem(dict(problem.arguments))
        known[other] = shapes_of(env.make_observation_space(made))
        if known[other] == policy.observation_shapes:
            return other
    has = "; ".join(f"{name} {shapes.get('', 'Dict')}" for name, shapes in known.items())
    shapes = policy.observation_shapes
    raise ValueError(
        f"policy {policy.name!r} was trained on observations of shape {shapes.get('', shapes)}; "
        f"those of this system are {has}: evaluate it with the arguments of its training"
    )


def _check_requests(policy: EvaluatedPolicy, family: Family, allowed: tuple[str, ...]) -> None:
    """Refuse a policy that asks for another world, or for what there is not."""
    for key, value in policy.env_kwargs.items():
        if key not in allowed:
            raise ValueError(
                f"policy {policy.name!r} asks for {key}={value!r} in env_kwargs, which changes the "
                f"world that it is measured in; allowed are {', '.join(allowed)}"
            )
    family.view_id(policy.env_view)
    if policy.needs_outcomes and not family.outcomes:
        raise ValueError(
            f"policy {policy.name!r} has needs_outcomes, but requests of {family.name} end within "
            "their step: its reward tells all; allowed is False"
        )
