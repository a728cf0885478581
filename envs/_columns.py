"""The columns of an observation: a table with a row a column, of which all that names one is made.

The kernel writes records of `seen`, whose fields are the columns; the spaces have `bounds`, the
docstrings `table`, and readers of the arrays `places`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from servegym._jit import record


class Column(NamedTuple):
    """A column of an observation.

    Attributes:
        name: Its name.
        high: Its largest value; the kernel clips what is beyond its bounds. Words name sizes of the
            system, of which it is the product.
        text: What it says, and its unit.
        low: Its least value.
        mean: What the kernel takes off,
        spread: and divides by then.
    """

    name: str
    high: float | str
    text: str
    low: float = 0.0
    mean: float = 0.0
    spread: float = 1.0


def seen(columns: Sequence[Column]) -> np.dtype:
    """A record with a float32 field a column: an array of them is one of float32 columns, too."""
    return record(*((column.name, "f4") for column in columns))


def places(columns: Sequence[Column]) -> dict[str, int]:
    """Name -> index of the column."""
    return {column.name: k for k, column in enumerate(columns)}


def bounds(columns: Sequence[Column], **sizes: float) -> np.ndarray:
    """Least and largest value of each column, as the kernel scales it: float32 (2, K).

    ``sizes`` are those that `Column.high` names.
    """
    low = np.array([column.low for column in columns])
    high = np.array([_largest(column.high, sizes) for column in columns])
    means = np.array([column.mean for column in columns])
    spreads = np.array([column.spread for column in columns])
    return ((np.stack([low, high]) - means) / spreads).astype(np.float32)


def _largest(high: float | str, sizes: Mapping[str, float]) -> float:
    return math.prod(sizes[name] for name in high.split()) if isinstance(high, str) else high


def table(columns: Sequence[Column]) -> str:
    """The lines of a Markdown table of the columns, in units of `Column.high`."""
    signed = any(column.low for column in columns)
    heads = ["Column", "Name", *(["From", "To"] if signed else ["0 to"]), "Meaning"]
    rows = [heads, ["---"] * len(heads)]
    for k, (name, high, text, low, *_) in enumerate(columns):
        least = [f"{low:,g}"] if signed else []
        most = high if isinstance(high, str) else f"{high:,.9g}"
        rows.append([str(k), f"`{name}`", *least, most, text])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
