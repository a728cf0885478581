"""Result tables: ``stem.csv`` holds the rows, ``stem.json`` their provenance and findings.

`write_result` writes both at once, and `Table` grows row by row and knows which keys it lacks.
Every file is written under a temporary name and renamed.

The JSON has the fields of `provenance` (``command``, ``date`` in UTC, ``machine``, ``versions``,
``quick``, ``settings``) and ``notes``, a list of records: ``text`` is the finding as a sentence,
the other fields of a record are its numbers.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servegym._files import MalformedFileError
from servegym._versions import versions
from servegym.experiments.evaluation.output import read_rows, write_csv, write_json

__all__ = [
    "Note",
    "Table",
    "machine",
    "note",
    "provenance",
    "read_record",
    "versions",
    "write_record",
    "write_result",
]

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
    """The JSON of a table, by the path of its CSV or JSON; empty if there is none.

    Raises:
        MalformedFileError: The file is no JSON object.
    """
    file = Path(path).with_suffix(".json")
    if not file.exists():
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MalformedFileError(file, None, None, f"is no JSON ({error})", "remove it") from error
    if not isinstance(record, dict):
        raise MalformedFileError(file, None, None, "is no JSON object", "remove it")
    return record


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


class Table:
    """A CSV that is extended while a computation runs, so that a stopped one can resume.

    Args:
        path: The CSV; it need not exist.
        key: Columns that identify a unit of work. Several rows may share a key.
        text: Columns that stay text where they look like numbers.
        empty: What a missing value becomes.
        load: Whether rows that the file has are taken up; without, the table begins anew.

    Attributes:
        rows: The rows, in the order of the file.

    Raises:
        MalformedFileError: The file is no table, or lacks a key column.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        key: Sequence[str],
        text: Collection[str] = (),
        empty: Any = "",
        load: bool = True,
    ) -> None:
        self.path, self.key = Path(path), tuple(key)
        self.rows: list[dict[str, Any]] = []
        if load and self.path.exists():
            self.rows = read_rows(self.path, text, empty)
        for column in self.key:
            if self.rows and column not in self.rows[0]:
                raise MalformedFileError(self.path, 1, column, "is missing", "remove the file")

    def key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of the key columns; a missing one is empty text."""
        return tuple(row.get(column, "") for column in self.key)

    def missing(self, keys: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The keys that have no row yet, in their order."""
        present = {self.key_of(row) for row in self.rows}
        return [key for key in keys if key not in present]

    def discard(self, condition: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drop the rows that meet a condition; the file changes with the next `update`."""
        self.rows = [row for row in self.rows if not condition(row)]

    def update(
        self,
        rows: Iterable[Mapping[str, Any]],
        order: Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> None:
        """Put rows in the place of those with their keys, or at the end, and write the file.

        A table that stays without any is not written. All are sorted by ``order``, if there is one.
        """
        fresh: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in rows:
            fresh.setdefault(self.key_of(row), []).append(dict(row))
        groups = fresh.copy()
        replaced: list[dict[str, Any]] = []
        for row in self.rows:
            key = self.key_of(row)
            # The first row of a key makes room for all new ones, its others go.
            replaced += groups.pop(key, []) if key in fresh else [row]
        self.rows = replaced + [row for group in groups.values() for row in group]
        if order is not None:
            self.rows.sort(key=order)
        if not self.rows:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(self.path, self.rows)
