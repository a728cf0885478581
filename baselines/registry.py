"""The one registry of policies, by environment family and name."""

from __future__ import annotations

import difflib
import importlib
import os
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servegym.baselines.protocol import (
    BasePolicy,
    CallablePolicy,
    Observation,
    Policy,
    WrappedPolicy,
)
from servegym.envs.families import FAMILIES


@dataclass(frozen=True)
class PolicyInfo:
    """One line of `list_policies`.

    Attributes:
        name: What `make_policy` takes.
        description: One line.
        clairvoyant: True if it uses what a router cannot know.
        family: The environment family it is for.
        alias_of: The policy this name is another name of, or None.
    """

    name: str
    description: str
    clairvoyant: bool
    family: str
    alias_of: str | None = None


_INFO: dict[tuple[str, str], PolicyInfo] = {}
_FACTORY: dict[tuple[str, str], Callable[..., Policy]] = {}


def register_policy(
    name: str,
    factory: Callable[..., Policy],
    description: str,
    *,
    family: str = "llm_routing",
    clairvoyant: bool = False,
    aliases: tuple[str, ...] = (),
) -> None:
    """Add a policy under its name and aliases.

    Args:
        name: A new name in the family.
        factory: Called as ``factory(system, **kwargs)``.
        description: One line, shown by `list_policies`.
        family: The environment family.
        clairvoyant: Whether it uses what a router cannot know.
        aliases: Other names for it.

    Raises:
        ValueError: If a name is taken.
    """
    for key in (name, *aliases):
        if (family, key) in _FACTORY:
            raise ValueError(f"name {key!r} is already registered for family {family!r}")
    for key in (name, *aliases):
        alias_of = None if key == name else name
        text = description if alias_of is None else f"alias of {name}: {description}"
        _INFO[family, key] = PolicyInfo(key, text, clairvoyant, family, alias_of)
        _FACTORY[family, key] = factory


def _load(family: str) -> None:
    families = [known.name for known in FAMILIES]
    if family in families:
        importlib.import_module(f"servegym.baselines.{family}")
    elif not any(registered == family for registered, _ in _FACTORY):
        raise ValueError(_unknown("family", family, families))


def _unknown(argument: str, given: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{argument} must be one of {', '.join(sorted(allowed))}, got {given!r}{hint}"


def list_policies(family: str = "llm_routing") -> list[PolicyInfo]:
    """All policies of a family in the order of their registration.

    Raises:
        ValueError: If the family is unknown.
    """
    _load(family)
    return [info for (registered, _), info in _INFO.items() if registered == family]


_SYSTEMS = {
    "llm_routing": "RoutingSystem",
    "serverless_moe": "ServerlessSystem",
    "expert_placement": "PlacementSystem",
}


def describe_system(problem: Any, *, family: str = "llm_routing") -> Any:
    """The static description of a system that the policies of a family are made from.

    Args:
        problem: The environment's ``env.unwrapped.problem``.
        family: The environment family.
    """
    module = importlib.import_module(f"servegym.baselines.{family}.system")
    return getattr(module, _SYSTEMS[family]).from_problem(problem)


def make_policy(name: str, system: Any, *, family: str = "llm_routing", **kwargs: Any) -> Policy:
    """Build a policy by name.

    Args:
        name: One of `list_policies`.
        system: The static description of the system, for routing a `RoutingSystem`.
        family: The environment family.
        **kwargs: Parameters of the policy.

    Raises:
        ValueError: If the name, the family or a parameter is unknown.
    """
    _load(family)
    factory = _FACTORY.get((family, name))
    if factory is None:
        allowed = [known for registered, known in _FACTORY if registered == family]
        raise ValueError(_unknown("policy", name, allowed))
    try:
        return factory(system, **kwargs)
    except TypeError as error:
        # Only a wrong parameter name is the caller's mistake; other TypeErrors are ours.
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(f"policy {name!r}: {error}") from error


def from_callable(
    fn: Callable[[Observation, Any], Any],
    name: str = "callable",
    *,
    batched: bool = True,
    clairvoyant: bool = False,
    env_view: str = "graph",
    env_kwargs: Mapping[str, Any] | None = None,
) -> Policy:
    """Wrap ``fn(observation, action_mask) -> actions`` as a stateless policy.

    Args:
        fn: Gets arrays with a leading axis of B and returns B actions; without ``batched`` it gets
            one decision's arrays and returns one action.
        name: Name in tables.
        batched: Whether ``fn`` takes a batch.
        clairvoyant: Whether it uses what a controller cannot know.
        env_view: Observation that it reads: ``"graph"`` (the Dict id), ``"flat"`` or ``"experts"``.
        env_kwargs: Environment arguments that it asks for, as in ``{"action_mode": "placement"}``.

    Raises:
        ValueError: If ``fn`` is not callable or ``env_view`` is unknown.
    """
    return CallablePolicy(
        fn,
        name,
        batched=batched,
        clairvoyant=clairvoyant,
        env_view=env_view,
        env_kwargs=env_kwargs or {},
    )


class PolicyError(ValueError):
    """A policy from a file has failed; names the policy, the line and the error."""


class FilePolicy(WrappedPolicy):
    """A policy from a file: an error of its code is raised as `PolicyError`, with the line.

    Args:
        policy: What the file defines.
        file: The file.
    """

    def __init__(self, policy: Policy, file: Path) -> None:
        super().__init__(policy)
        self.file = file

    @contextmanager
    def _locating_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            line = _line_of(error, self.file)
            if line is None:  # not the file's doing
                raise
            where = f"policy {self.name!r} failed at {self.file}:{line}"
            raise PolicyError(f"{where}: {type(error).__name__}: {error}") from error

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        with self._locating_errors():
            super().reset(num_envs, seed)

    def episode_start(self, mask: Any) -> None:
        """See `Policy.episode_start`."""
        with self._locating_errors():
            super().episode_start(mask)

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """See `Policy.act`."""
        with self._locating_errors():
            return super().act(observation, action_mask)

    def feedback(self, reward: Any) -> None:
        """See `Policy.feedback`."""
        with self._locating_errors():
            super().feedback(reward)

    def bind(self, env: Any) -> None:
        """See `BasePolicy.bind`."""
        with self._locating_errors():
            super().bind(env)


def _line_of(error: BaseException, file: Path) -> int | None:
    """The innermost line of a file that an error passed through, or None."""
    lines = [
        at
        for frame, at in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == str(file)
    ]
    return lines[-1] if lines else None


def policy_from_file(path: str | os.PathLike[str], system: Any) -> Policy:
    """The policy that a Python file defines.

    The file has ``Policy``, a subclass of `BasePolicy` that is made from the system's description
    and acts on batches, or ``act(observation, action_mask)``, which gets one decision and returns
    one action. The file is run: load only files that you trust. What its code raises later is
    raised as `PolicyError`.

    Args:
        path: A ``.py`` file.
        system: Description of the system, as for `make_policy`.

    Raises:
        ValueError: If the file has neither, or does not run.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"path={str(file)!r} is not a file")
    try:
        found = runpy.run_path(str(file))
        policy = found["Policy"](system) if "Policy" in found else None
    except (Exception, SystemExit) as error:  # whatever the file raises
        kind, line = type(error).__name__, _line_of(error, file)
        where = f" (line {line})" if line else ""
        raise ValueError(f"{str(file)!r} cannot be used{where}: {kind}: {error}") from error
    if policy is not None:
        own_act = getattr(type(policy), "act", None) is not BasePolicy.act
        if not (own_act and callable(getattr(policy, "act", None))):
            raise ValueError(f"{str(file)!r}: what Policy makes has no act()")
        if not isinstance(policy, Policy):
            raise ValueError(
                f"{str(file)!r}: Policy must derive from servegym.baselines.protocol.BasePolicy"
            )
        if policy.name == BasePolicy.name:
            policy.name = file.stem
    elif callable(found.get("act")):
        policy = from_callable(found["act"], file.stem, batched=False)
    else:
        raise ValueError(
            f"{str(file)!r} defines neither act(observation, action_mask) nor a class Policy"
        )
    return FilePolicy(policy, file)
