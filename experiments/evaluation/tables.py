"""Result tables: ``stem.csv`` holds the rows, ``stem.json`` their provenance and findings.

Beside the fields of `provenance` the JSON has ``notes``, a list of records: ``text`` is the finding
as a sentence, the other fields of a record are its numbers.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servegym._versions import versions
from servegym.experiments.evaluation.output import write_csv, write_json

Note = str | Mapping[str, Any]
"""A finding: a sentence, or a record made by `note`."""


def note(text: str, **data: Any) -> dict[str, Any]:
    """A finding with its numbers: ``{"text": text, **data}``."""
    return {"text": text, **data}


def machine() -> dict[str, Any]:
    """Processor, number of cores and system of this machine."""
    model, listing = platform.processor() or "unknown", Path("/proc/cpuinfo")
    if listing.exists():
        name = re.search(r"^model name\s*:(.*)", listing.read_text(encoding="utf-8"), re.MULTILINE)
        model = name[1].strip() if name else model
    system = f"{platform.system()} {platform.machine()}"
    return {"cpu": model, "cores": os.cpu_count(), "system": system}


def provenance(
    command: str,
    quick: bool = False,
    packages: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """How a table was made, for its JSON.

    Args:
        command: The command line that makes the table.
        quick: Whether the run was a smoke run, whose numbers are not results.
        packages: Whose versions are recorded besides those of numpy, numba and gymnasium.
        settings: Further facts of the run, such as the scenario or the checkpoints.
    """
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(("numpy", "numba", "gymnasium", *packages)),
        "quick": quick,
        "settings": dict(settings or {}),
    }


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON of a table, by the path of its CSV or JSON; empty if there is none."""
    file = Path(path).with_suffix(".json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_record(
    path: str | os.PathLike[str], origin: Mapping[str, Any], notes: Iterable[Note] = ()
) -> None:
    """Write the JSON beside a table: its `provenance` and the findings."""
    records = [note(text) if isinstance(text, str) else dict(text) for text in notes]
    write_json(Path(path).with_suffix(".json"), {**origin, "notes": records})


def write_result(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    origin: Mapping[str, Any],
    notes: Iterable[Note] = (),
) -> None:
    """Write the rows as CSV and the JSON of `write_record`."""
    write_csv(Path(path).with_suffix(".csv"), rows)
    write_record(path, origin, notes)
