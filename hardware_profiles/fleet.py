"""Fleets: which profile and which catalog model stand behind each expert of an environment."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from servegym._files import read_json
from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.load import data_path, load, load_named, unknown_name
from servegym.hardware_profiles.schema import Fields

FORMAT = "servegym-fleet/1"


@dataclass(frozen=True)
class Fleet:
    """Experts in order; an environment of N experts takes the first N.

    Attributes:
        name: the fleet's name.
        description: one line for people.
        profiles: the latency law and memory of each expert's device; where the fleet file asks for
            it, the KV memory is that of the model it serves.
        models: the name of each expert's model in the request catalog (scores and output lengths).
    """

    name: str
    description: str
    profiles: tuple[Profile, ...]
    models: tuple[str, ...]


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
    """A fleet by a name of `list_fleets`, or of a JSON file; see `load.load`."""
    return load_named(name_or_path, "fleet", list_fleets(), "fleet-", _build)


def _build(data: Any, where: str) -> Fleet:
    top = Fields(data, where)
    top.only(("format", "name", "description", "memory", "experts"))
    top.text("format", (FORMAT,))
    memory = top.text("memory", ("profile", "served_model"))
    entries = top.get("experts")
    if not isinstance(entries, list) or not entries:
        raise top.error("experts", "must be a non-empty list")
    profiles, models = [], []
    for i, entry in enumerate(entries):
        fields = Fields(entry, where, f"experts[{i}]")
        fields.only(("profile", "model"))
        model = fields.text("model")
        try:
            profile = load(fields.text("profile"))
        except ValueError as error:
            raise fields.error("profile", str(error)) from error
        if memory == "served_model":
            served = served_models()
            if model not in served:
                raise fields.error("model", unknown_name("served model", model, list(served)))
            profile = profile.with_model(served[model], f"served-models.json: {model}")
        profiles.append(profile)
        models.append(model)
    return Fleet(top.text("name"), top.text("description"), tuple(profiles), tuple(models))
