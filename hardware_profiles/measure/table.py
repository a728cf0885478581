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

from servegym._files import write_text


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
        try:
            text = self.path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            reader = csv.DictReader(io.StringIO(whole))
            found = [(reader.line_num, row) for row in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{self.path}: not a CSV text file: {error}") from error
        if tuple(reader.fieldnames or ()) != self.columns:
            raise ValueError(
                f"{self.path}:1: the columns are {', '.join(reader.fieldnames or ()) or 'none'}, "
                f"not {', '.join(self.columns)}: name another file to start afresh"
            )
        for line, row in found:
            if None in row or None in row.values():
                raise ValueError(f"{self.path}:{line}: not {len(self.columns)} values; remove it")
            self.rows[tuple(row[name] for name in self.key)] = row
        if whole != text:
            write_text(self.path, whole)

    def __contains__(self, key: Sequence[Any]) -> bool:
        return tuple(str(value) for value in key) in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row and force it to the disk."""
        values = {name: str(row[name]) for name in self.columns}
        self._append(list(values.values()))
        self.rows[tuple(values[name] for name in self.key)] = values

    def sort(self) -> None:
        """Rewrite the file with its rows in the order of the key, in one move."""

        def order(key: tuple[str, ...]) -> list[tuple[int, float, str]]:
            parts: list[tuple[int, float, str]] = []
            for text in key:
                try:
                    parts.append((0, float(text), ""))
                except ValueError:
                    parts.append((1, 0.0, text))
            return parts

        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.columns)
        for key in sorted(self.rows, key=order):
            writer.writerow(self.rows[key].values())
        write_text(self.path, stream.getvalue())

    def _append(self, values: Sequence[str]) -> None:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerow(values)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(stream.getvalue())
            file.flush()
            os.fsync(file.fileno())
