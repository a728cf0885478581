"""The one registry of policies, by environment family and name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servegym._checks import choose, mapping
from servegym.baselines.protocol import CallablePolicy, Policy
from servegym.envs.families import FAMILIES, family_named


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
_FACTORY: dict[tuple[str, str], Callable[..., Any]] = {}


def register_policy(
    name: str,
    factory: Callable[..., Any],
    description: str,
    *,
    family: str = "llm_routing",
    clairvoyant: bool = False,
    aliases: tuple[str, ...] = (),
) -> None:
    """Add a policy under its name and aliases.

    Args:
        name: A new name in the family.
        factory: Called as ``factory(system, **kwargs)``; its parameters are the policy's.
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
    choose("family", family, [record.name for record in FAMILIES])
    importlib.import_module(f"servegym.baselines.{family}")


def list_policies(family: str = "llm_routing") -> list[PolicyInfo]:
    """All policies of a family in the order of their registration.

    Raises:
        ValueError: If the family is unknown.
    """
    _load(family)
    return [info for (registered, _), info in _INFO.items() if registered == family]


def describe_system(problem: Any, *, family: str = "llm_routing") -> Any:
    """The static description of a system that the policies of a family are made from.

    Args:
        problem: The environment's ``env.unwrapped.problem``.
        family: The environment family.
    """
    module = importlib.import_module(f"servegym.baselines.{family}.system")
    return getattr(module, family_named(family).system).from_problem(problem)


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
    choose("policy", name, [policy for registered, policy in _FACTORY if registered == family])
    factory = _FACTORY[family, name]
    mapping(f"policy {name!r}", kwargs, _parameters(factory))
    return factory(system, **kwargs)


def _parameters(factory: Callable[..., Any]) -> list[str] | None:
    """Names of a factory's keywords, None for any; a class's ``**`` are those of its base."""
    names: list[str] = []
    makers = [factory]
    if isinstance(factory, type):
        bases = factory.__mro__[:-1]  # without `object`
        makers = [vars(kind)["__init__"] for kind in bases if "__init__" in vars(kind)]
    for make in makers:
        parameters = list(inspect.signature(make).parameters.values())
        names += [p.name for p in parameters if p.name not in ("self", "system", *names)]
        if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
            return names
        names.pop()
    return None


from_callable = CallablePolicy
"""A stateless policy of ``fn(observation, action_mask) -> actions``."""
