"""Fleets: which profile and which catalog model stand behind each expert of an environment."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.load import data_path, load, load_named, unknown_name
from servegym.hardware_profiles.schema import Fields, read_json

FORMAT = "servegym-fleet/1"


@dataclass(frozen=True)
class FleetExpert:
    """One expert of a fleet.

    Attributes:
        profile: the latency law and memory of its device; where the fleet file asks for it,
            the KV memory is that of the model it serves.
        model: the name of its model in the request catalog (scores and output lengths).
    """

    profile: Profile
    model: str


@dataclass(frozen=True)
class Fleet:
    """Experts in order; an environment of N experts takes the first N.

    Attributes:
        name: the fleet's name.
        description: one line for people.
        experts: the experts.
    """

    name: str
    description: str
    experts: tuple[FleetExpert, ...]

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The experts' profiles, in order."""
        return tuple(expert.profile for expert in self.experts)

    @property
    def models(self) -> tuple[str, ...]:
        """The experts' catalog models, in order."""
        return tuple(expert.model for expert in self.experts)


def list_fleets() -> list[str]:
    """Names of the fleets that ship with the package, sorted."""
    return sorted(file.stem.removeprefix("fleet-") for file in data_path("").glob("fleet-*.json"))


@functools.cache
def served_models() -> dict[str, dict[str, Any]]:
    """Memory facts of the catalog's models, by name (layers, KV heads, weight bytes, ...)."""
    file = data_path("served-models.json")
    top = Fields(read_json(file), file.name)
    top.only(("provenance", "models"))
    models = top.child("models")
    return {str(key): dict(models.child(str(key)).data) for key in models.data}


def load_fleet(name_or_path: str | os.PathLike[str]) -> Fleet:
    """Load a fleet by the name of a shipped one or by the path of a JSON file.

    Args:
        name_or_path: a name of :func:`list_fleets`, or a path (anything that ends in
            ``.json`` or holds a separator).

    Returns:
        The fleet.

    Raises:
        ValueError: for an unknown name (the nearest valid one is given), or for a file that
            is unreadable or malformed (the file, field and reason are given).
    """
    return load_named(name_or_path, "fleet", list_fleets(), "fleet-", _read)


def _read(file: Path) -> Fleet:
    top = Fields(read_json(file), file.name)
    top.only(("format", "name", "description", "memory", "experts"))
    top.text("format", (FORMAT,))
    memory = top.text("memory", ("profile", "served_model"))
    entries = top.get("experts")
    if not isinstance(entries, list) or not entries:
        raise top.error("experts", "must be a non-empty list")
    experts = []
    for i, entry in enumerate(entries):
        fields = Fields(entry, file.name, f"experts[{i}]")
        fields.only(("profile", "model"))
        model = fields.text("model")
        try:
            profile = load(fields.text("profile"))
        except ValueError as error:
            raise fields.error("profile", str(error)) from error
        if memory == "served_model":
            known = served_models()
            if model not in known:
                raise fields.error("model", unknown_name("served model", model, list(known)))
            profile = profile.with_model(known[model], f"served-models.json: {model}")
        experts.append(FleetExpert(profile, model))
    return Fleet(top.text("name"), top.text("description"), tuple(experts))
