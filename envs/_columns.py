"""The columns of an observation: a table with a row a column, of which all that names one is made.

The kernel writes records of `seen`, whose fields are the columns; the spaces have `bounds`, the
docstrings `table`, and readers of the arrays `places`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from servegym._jit import record


class Column(NamedTuple):
    """A column of an observation.

    Attributes:
        name: Its name.
        high: Its largest value; the kernel clips what is beyond its bounds.
        text: What it says, and its unit.
        low: Its least value.
    """

    name: str
    high: float
    text: str
    low: float = 0.0


def seen(columns: Sequence[Column]) -> np.dtype:
    """A record with a float32 field a column: an array of them is one of float32 columns, too."""
    return record(*((column.name, "f4") for column in columns))


def places(columns: Sequence[Column]) -> dict[str, int]:
    """Name -> index of the column."""
    return {column.name: k for k, column in enumerate(columns)}


def bounds(columns: Sequence[Column]) -> np.ndarray:
    """Least and largest value of each column: float32 (2, K)."""
    return np.array([(column.low, column.high) for column in columns], np.float32).T.copy()


def table(columns: Sequence[Column]) -> str:
    """The lines of a Markdown table of the columns."""
    rows = ["| Column | Name | From | To | Meaning |", "|---|---|---|---|---|"]
    for k, (name, high, text, low) in enumerate(columns):
        rows.append(f"| {k} | `{name}` | {low:,g} | {high:,.9g} | {text} |")
    return "\n".join(rows)
