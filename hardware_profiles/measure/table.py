"""Tables of measurements that can be interrupted and resumed.

Every row is on disk as soon as it is measured, and a second run measures only what is missing.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servegym._files import csv_header, csv_rows, naming, parse_number, write_csv, write_text


class ResumableTable:
    """A CSV file that grows row by row and survives being interrupted.

    Args:
        path: The file; its folder must exist. A last line without an end is what an interrupted
            run leaves and is dropped.
        columns: All columns, in order.
        key: The columns that tell one measurement from another.

    Raises:
        ValueError: If there is a file that holds something else.
    """

    def __init__(
        self, path: str | os.PathLike[str], columns: Sequence[str], key: Sequence[str]
    ) -> None:
        self.path = Path(path)
        self.columns = tuple(columns)
        self.key = tuple(key)
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if not self.path.parent.is_dir():
            raise ValueError(f"out is {str(self.path)!r}, but its folder does not exist")
        if not self.path.is_file() or self.path.stat().st_size == 0:
            self._append(self.columns)
            return
        whole, _, cut = self.path.read_bytes().rpartition(b"\n")
        if cut:
            write_text(self.path, whole + b"\n")
        if (header := csv_header(self.path)) != list(self.columns):
            raise ValueError(
                f"{self.path}:1: the columns are {', '.join(header)}, "
                f"not {', '.join(self.columns)}: name another file to start afresh"
            )
        for _, row in csv_rows(self.path):
            self.rows[tuple(row[name] for name in self.key)] = row

    def __contains__(self, key: Sequence[Any]) -> bool:
        return tuple(str(value) for value in key) in self.rows

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row and force it to the disk."""
        values = {name: str(row[name]) for name in self.columns}
        self._append(list(values.values()))
        self.rows[tuple(values[name] for name in self.key)] = values

    def sort(self) -> None:
        """Rewrite the file with its rows in the order of the key, in one move."""

        def order(key: tuple[str, ...]) -> list[tuple[bool, float, str]]:
            numbers = [parse_number(text) for text in key]
            parts = zip(numbers, key, strict=True)
            return [(number is None, number or 0.0, text) for number, text in parts]

        if self.rows:
            write_csv(self.path, [self.rows[key] for key in sorted(self.rows, key=order)])

    def _append(self, values: Sequence[str]) -> None:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerow(values)
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(stream.getvalue())
            file.flush()
            os.fsync(file.fileno())
