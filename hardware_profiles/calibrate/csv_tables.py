"""CSV tables of measurements; every failure names the file, the line and the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from servegym._files import MalformedFileError, csv_rows, parse_number


class CsvTable:
    """The rows of a CSV file with their line numbers.

    Args:
        path: the file.
        columns: columns that must be there; others may be.
        at_least: fewest rows that are of use.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a column is missing or there are too few rows.
    """

    def __init__(self, path: Path, columns: Sequence[str], at_least: int = 1) -> None:
        self.path = path
        self.rows = list(csv_rows(path, columns))
        count = len(self.rows)
        if count < at_least:
            fix = f"measure at least {at_least}"
            raise self.error(count + 1, columns[0], f"only {count} rows", fix)

    def error(self, line: int, field: str, what: str, fix: str) -> MalformedFileError:
        """The error of a field, to be raised."""
        return MalformedFileError(self.path, line, field, what, fix)

    def count(self, line: int, row: Mapping[str, str], field: str) -> int:
        """A whole number of at least 0."""
        text = row[field].strip()
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise self.error(line, field, f"got {text!r}", "write a whole number, 0 or more")
        return int(text)

    def positive(
        self, line: int, row: Mapping[str, str], field: str, unit: str = "a number"
    ) -> float:
        """A finite number above 0, in the ``unit`` that the message asks for."""
        value = parse_number(row[field])
        if value is None or value <= 0.0:
            raise self.error(line, field, f"got {row[field]!r}", f"write {unit}, finite and > 0")
        return value
