"""Profiles by name: what ships with the package, or a user's own file."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from servegym._checks import nearest
from servegym._files import read_json
from servegym.hardware_profiles.law import Profile

_T = TypeVar("_T")

_NOT_PROFILES = ("constants", "fleet-", "moe-", "served-models")


def data_path(name: str) -> Path:
    """Path of a file that ships in ``hardware_profiles/data``."""
    return Path(str(resources.files("servegym.hardware_profiles.data"))) / name


def list_profiles() -> list[str]:
    """Names of the profiles that ship with the package, sorted."""
    return sorted(
        file.stem
        for file in data_path("").glob("*.json")
        if not file.name.startswith(_NOT_PROFILES)
    )


def load(name_or_path: str | os.PathLike[str]) -> Profile:
    """Load a profile by the name of a shipped one or by the path of a JSON file.

    Args:
        name_or_path: a name of :func:`list_profiles`, or a path (anything that ends in
            ``.json`` or holds a separator).

    Raises:
        ValueError: for an unknown name (the nearest valid one is given), or for a file that
            is unreadable or malformed (the file, field and reason are given).
    """
    return load_named(name_or_path, "profile", list_profiles(), "", Profile.from_dict)


def unknown_name(what: str, text: str, names: list[str]) -> str:
    """Message for a name that does not exist, with the nearest that does."""
    # A name with other numbers is another thing (H20 is no H200), not a misspelling.
    numbers, *others = (set(map(int, re.findall(r"\d+", name))) for name in (text, *names))
    alike = [name for name, other in zip(names, others, strict=True) if numbers <= other]
    near = nearest(text, alike, least=0.8)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{what}: got {text!r}{hint} (allowed: {', '.join(names)})"


def load_named(
    name_or_path: str | os.PathLike[str],
    what: str,
    names: list[str],
    prefix: str,
    build: Callable[[Any, str], _T],
) -> _T:
    """Load what ships under one of ``names``, ``<prefix><name>.json``, or what is at a path.

    A path ends in ``.json`` or holds a separator; ``what`` the names are names of is for the
    message. ``build`` makes it of a file's content and name; what ships is made once.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ValueError(f"{what}: got {name_or_path!r}; it must be a name or a path")
    text = os.fspath(name_or_path)
    if text.endswith(".json") or os.sep in text or "/" in text:
        return build(read_json(text), Path(text).name)
    if text not in names:
        raise ValueError(unknown_name(what, text, names))
    return _shipped(f"{prefix}{text}.json", build)


@functools.cache
def _shipped(file: str, build: Callable[[Any, str], Any]) -> Any:
    return build(read_json(data_path(file)), file)
