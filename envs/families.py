"""The environment families: one record each of its ids, names and folders.

Light on purpose: ``import servegym`` reads it to register the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One environment family.

    Attributes:
        name: Its folder in ``envs``, ``baselines`` and ``agents/checkpoints``, and its key in the
            registry of policies.
        title: Its name for readers.
        paper: What the paper calls its system, or "" where it has no name.
        group: Its folder in ``experiments/papers`` and ``experiments/results``, and its name in
            the commands ``figures``, ``claims`` and ``bench``.
        views: Observation that a policy reads (`Policy.env_view`) -> name and version of the
            environment, without namespace; the first is the ``"graph"`` view, the Dict.
        system: Class in ``baselines/<name>/system.py`` that describes a system to its policies.
        outcomes: Whether requests end after the step that decides on them.
        parallel: Whether it has a PettingZoo environment, ``parallel_env``.
    """

    name: str
    title: str
    paper: str
    group: str
    views: Mapping[str, str]
    system: str
    outcomes: bool = False
    parallel: bool = False

    @property
    def env_ids(self) -> tuple[str, ...]:
        """Its Gymnasium ids, the graph view first."""
        return tuple(f"servegym/{name}" for name in self.views.values())

    @property
    def env_id(self) -> str:
        """The id of the graph view."""
        return self.env_ids[0]

    def view_id(self, view: str) -> str:
        """The id of a view.

        Raises:
            ValueError: If the family has no such view.
        """
        if view not in self.views:
            raise ValueError(f"env_view is {view!r}; allowed are {', '.join(self.views)}")
        return self.env_ids[list(self.views).index(view)]

    def view_of(self, env_id: str) -> str:
        """The view of one of its ids."""
        return list(self.views)[self.env_ids.index(env_id.removeprefix("servegym:"))]

    @property
    def heading(self) -> str:
        """The title, with the paper's name for the system where it has one."""
        return f"{self.title} ({self.paper})" if self.paper else self.title


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llm_routing",
        title="LLM routing",
        paper="",
        group="routing",
        views={
            "graph": "LLMRouting-v1",
            "flat": "LLMRoutingFlat-v3",
            "experts": "LLMRoutingExperts-v3",
            "summary": "LLMRoutingSummary-v3",
        },
        system="RoutingSystem",
        outcomes=True,
        parallel=True,
    ),
    Family(
        name="serverless_moe",
        title="Serverless MoE partitioning",
        paper="Remoe",
        group="serverless",
        views={"graph": "ServerlessMoE-v0", "flat": "ServerlessMoEFlat-v1"},
        system="ServerlessSystem",
    ),
    Family(
        name="expert_placement",
        title="Expert placement",
        paper="Prism",
        group="placement",
        views={"graph": "ExpertPlacement-v0"},
        system="PlacementSystem",
        parallel=True,
    ),
    Family(
        name="prefix_routing",
        title="Prefix-cache-aware routing",
        paper="",
        group="prefix",
        views={
            "graph": "PrefixRouting-v1",
            "flat": "PrefixRoutingFlat-v3",
            "summary": "PrefixRoutingSummary-v3",
        },
        system="PrefixSystem",
        outcomes=True,
    ),
)
"""Every family: those of the papers in their order, then the project's own."""


def family_of(env_id: str) -> Family:
    """The family that an id belongs to.

    Raises:
        ValueError: If it is none of this package's.
    """
    by_id = {env_id: family for family in FAMILIES for env_id in family.env_ids}
    env_id = env_id.removeprefix("servegym:")
    from servegym._checks import choose

    return by_id[choose("env_id", env_id, by_id)]


def find_family(env_id: str) -> Family | None:
    """The family that an id belongs to; None if it is another package's.

    Raises:
        ValueError: If it looks like one of this package's and is none.
    """
    return family_of(env_id) if "servegym/" in env_id else None


def family_named(name: str) -> Family:
    """The family with this name or group.

    Raises:
        ValueError: If there is none.
    """
    from servegym._checks import choose

    by_name = {name: family for family in FAMILIES for name in (family.name, family.group)}
    return by_name[choose("family", name, by_name)]
