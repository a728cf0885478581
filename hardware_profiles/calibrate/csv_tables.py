"""CSV tables of measurements; every failure names the file, the line and the field."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path


class CsvTable:
    """The rows of a CSV file with their line numbers.

    Args:
        path: the file.
        columns: columns that must be there; others may be.
        at_least: fewest rows that are of use.

    Raises:
        ValueError: if the file cannot be read, a column is missing or there are too few rows.
    """

    def __init__(self, path: Path, columns: Sequence[str], at_least: int = 1) -> None:
        self.path = path
        self.rows: list[tuple[int, dict[str, str]]] = []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                header = reader.fieldnames or []
                for column in columns:
                    if column not in header:
                        found = ", ".join(header) or "none"
                        problem = f"column missing (found: {found})"
                        fix = f"write the columns {', '.join(columns)}"
                        raise self.error(1, column, problem, fix)
                for row in reader:
                    self.rows.append((reader.line_num, row))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path}: not a CSV text file: {error}") from error
        count = len(self.rows)
        if count < at_least:
            fix = f"measure at least {at_least}"
            raise self.error(count + 1, columns[0], f"only {count} rows", fix)

    def error(self, line: int, field: str, what: str, fix: str) -> ValueError:
        """The error of a field, to be raised."""
        return ValueError(f"{self.path}:{line}: field {field!r}: {what}; {fix}")

    def count(self, line: int, row: Mapping[str, str], field: str) -> int:
        """A whole number of at least 0."""
        text = row[field]
        try:
            value = int(text)
        except (TypeError, ValueError):
            raise self.error(line, field, f"got {text!r}", "write a whole number") from None
        if value < 0:
            raise self.error(line, field, f"got {value}", "write a number >= 0")
        return value

    def positive(
        self, line: int, row: Mapping[str, str], field: str, unit: str = "a number"
    ) -> float:
        """A finite number above 0, in the ``unit`` that the message asks for."""
        text = row[field]
        try:
            value = float(text)
        except (TypeError, ValueError):
            raise self.error(line, field, f"got {text!r}", f"write {unit}") from None
        if not math.isfinite(value) or value <= 0.0:
            raise self.error(line, field, f"got {text}", f"write {unit}, finite and > 0")
        return value
