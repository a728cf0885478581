"""Scripts that make the packaged files from measured data; in the tree, not in the wheel."""

import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servegym._files import write_json


def measured_data(*parts: str) -> Path:
    """A file or folder below ``$SERVEGYM_DATA``."""
    if "SERVEGYM_DATA" not in os.environ:
        raise ValueError("set SERVEGYM_DATA to the folder of the measured data")
    return Path(os.environ["SERVEGYM_DATA"], *parts)


def write_made(path: Path, module: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file with the command that made it, and the date."""
    command = f"python -m servegym.envs.workloads.build.{module}"
    date = datetime.date.today().isoformat()
    write_json(path, {**content, "command": command, "date": date})
