"""Constants fitted to published runs of engines, in one file with the rows that each rests on.

``data/constants.json`` names ``part``, the runs they were fitted to, ``frozen``, the commit before
the other part was looked at, and each constant's ``value`` and ``rows``.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import Any

from servegym._files import read_json

FILE = "constants.json"


@functools.cache
def _constants() -> dict[str, Any]:
    return read_json(Path(str(resources.files("servegym.hardware_profiles.data"))) / FILE)


def constant(name: str) -> Any:
    """The value of a constant of the file; it is shared and not to be changed."""
    return _constants()["constants"][name]["value"]
