"""``servegym list``: environment ids, policies, catalogs, fleets and profiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import gymnasium

from servegym.agents.lib.checkpoint import card_sentence, shipped
from servegym.baselines.registry import list_policies
from servegym.envs.families import FAMILIES
from servegym.envs.workloads import list_catalogs
from servegym.experiments.cli import command_parser
from servegym.hardware_profiles import list_fleets, list_profiles


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym list``."""
    command_parser("list").parse_args(argv)
    _print("environments", sorted(key for key in gymnasium.registry if key.startswith("servegym/")))
    for family in FAMILIES:
        policies = {
            info.name: info.description + " (clairvoyant)" * info.clairvoyant
            for info in list_policies(family.name)
        }
        policies |= {name: card_sentence(path) for name, path in shipped(family.name).items()}
        width = max(map(len, policies), default=0)
        lines = [f"{name:<{width}}  {description}" for name, description in policies.items()]
        _print(f"policies for {family.name}", lines)
    _print("catalogs", list_catalogs())
    _print("fleets", list_fleets())
    _print("profiles", list_profiles())


def _print(title: str, lines: Iterable[str]) -> None:
    print(f"{title}:")
    for line in lines:
        print(f"  {line}")
