"""Versions of the packages that results depend on."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def versions(packages: Sequence[str] = ("numpy", "numba", "gymnasium")) -> dict[str, str]:
    """Versions of this package, of ``packages`` and of Python, by name."""
    result = {}
    for name in ("serve-gym", *packages):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            result[name] = "not installed"
    return result | {"python": platform.python_version()}
