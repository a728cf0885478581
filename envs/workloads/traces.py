"""When recorded requests came, read from traces in their published formats.

======== ========================================================================================
format   time column, and the columns by one of which it is known
======== ========================================================================================
burstgpt CSV ``Timestamp`` (s); ``Request tokens``, ``Response tokens``, ``Log Type``
azure    CSV ``TIMESTAMP`` (date and time); ``ContextTokens``, ``GeneratedTokens``
mooncake JSONL ``timestamp`` (whole ms); ``hash_ids``
bailian  JSONL ``timestamp`` (s); ``chat_id``, ``parent_chat_id``, ``turn``
csv      any CSV with a time column (``timestamp``, ``timestamp_s``, ``timestamp_ms``,
         ``arrival_time``, ``arrived_at``, ``time``; numbers are seconds unless the name ends in
         ``_ms``, dates and times are read too)
jsonl    the same names as keys of one JSON object a line
======== ========================================================================================

Dates and times are those of ISO 8601, in UTC unless they name a zone. Times are returned in seconds
after the first event; they are subtracted exactly, to the last digit that the file has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import choose
from servegym._files import MalformedFileError, Times, csv_header, csv_rows, exact_number, json_rows

_TIME_NAMES = (
    "timestamp",
    "timestamp_s",
    "timestamp_ms",
    "arrival_time",
    "arrival_time_s",
    "arrived_at",
    "time",
    "time_s",
)
# format -> its time column, and the columns that tell it; Bailian's requests have hash_ids, too
_PUBLISHED = {
    "burstgpt": ("Timestamp", ("Request tokens", "Response tokens", "Log Type")),
    "azure": ("TIMESTAMP", ("ContextTokens", "GeneratedTokens")),
    "bailian": ("timestamp", ("chat_id", "parent_chat_id", "turn")),
    "mooncake": ("timestamp", ("hash_ids",)),
}
FORMATS = (*_PUBLISHED, "csv", "jsonl")
_WHICH_UNIT = "pass fmt='mooncake' for milliseconds or 'jsonl' for seconds"


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded trace of n requests.

    Attributes:
        timestamps_s: float64 (n,), seconds after the first request, non-decreasing.
        fmt: The format it was read as.
    """

    timestamps_s: np.ndarray
    fmt: str = "csv"


def load_trace(path: str | os.PathLike[str], fmt: str | None = None) -> Trace:
    """Read a trace.

    Args:
        path: The file.
        fmt: ``"burstgpt"``, ``"azure"``, ``"bailian"``, ``"mooncake"``, ``"csv"`` or ``"jsonl"``;
            told by the columns if None.

    Returns:
        The trace; nothing of a malformed file is used.

    Raises:
        ValueError: An unknown format, or no such file.
        MalformedFileError: An empty file, a missing column, a value that is not a finite,
            non-negative number, times that decrease, or such as may mean seconds or milliseconds;
            names file, line and field.
    """
    if fmt is not None:
        choose("fmt", fmt, FORMATS)
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path={os.fspath(path)!r} is not a file.")
    is_json = fmt in ("mooncake", "bailian", "jsonl") or (fmt is None and _is_json(path))
    if is_json:
        # A number with a fraction stays as it is written: a float has no room for its last digits.
        rows = json_rows(path, parse_float=Decimal)
        line, row = next(rows, (None, {}))
        names = list(row)
    else:
        names = csv_header(path)
        rows = csv_rows(path)
        line, row = next(rows, (None, {}))
    if not row:
        fix = "add at least one request"
        raise MalformedFileError(path, None, None, "has no requests", fix)
    explicit = fmt is not None
    if fmt is None:
        fmt = _detect(path, names, is_json)
    column = _time_column(path, fmt, names, line if is_json else 1)
    in_ms = fmt == "mooncake" or (fmt in ("csv", "jsonl") and column.lower().endswith("_ms"))
    kind: str | None = {"azure": "date"}.get(fmt, None if fmt in ("csv", "jsonl") else "number")
    times = Times(path, column, kind, 1000 if in_ms else 1)
    while row:
        value = cell(path, line, row, column)
        if fmt == "mooncake" and not explicit:
            whole_milliseconds(path, line, column, value, f"; or {_WHICH_UNIT}")
        times.add(line, value)
        line, row = next(rows, (None, {}))
    return Trace(np.array(times.after_first()), fmt)


def _is_json(path: Path) -> bool:
    with path.open("rb") as stream:
        first = next((line for line in stream if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    return first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{")


def _detect(path: Path, names: list[str], is_json: bool) -> str:
    for kind in ("bailian", "mooncake") if is_json else ("burstgpt", "azure"):
        if any(name in names for name in _PUBLISHED[kind][1]):
            return kind
    if is_json and {"timestamp", "input_length", "output_length"} <= set(names):
        problem = "is in milliseconds in Mooncake's traces and in seconds in others"
        fix = f"{_WHICH_UNIT}, or name it timestamp_ms or timestamp_s"
        raise MalformedFileError(path, None, "timestamp", problem, fix)
    return "jsonl" if is_json else "csv"


def _time_column(path: Path, fmt: str, names: list[str], line: int | None) -> str:
    """Name of the file's time column."""
    if fmt in _PUBLISHED:
        name = _PUBLISHED[fmt][0]
        if name not in names:
            fix = f"format {fmt!r} has it; add it or pass another fmt"
            raise MalformedFileError(path, line, name, "is missing", fix)
        return name
    lower: dict[str, str] = {}
    for name in names:
        if lower.setdefault(name.strip().lower(), name) != name:
            problem = f"is there as {lower[name.strip().lower()]!r}, too"
            raise MalformedFileError(path, line, name, problem, "leave one of them out")
    here = [lower[name] for name in _TIME_NAMES if name in lower]
    if len(here) > 1:
        problem = f"may be each of {', '.join(here)}"
        raise MalformedFileError(path, line, "timestamp", problem, "leave one of them")
    if not here:
        fix = f"name the time column one of {list(_TIME_NAMES)} (found {names})"
        raise MalformedFileError(path, line, "timestamp", "is missing", fix)
    return here[0]


def cell(path: Path, line: int | str | None, row: Mapping[str, Any], name: str) -> object:
    """What a row has under a name; a gap is refused."""
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise MalformedFileError(path, line, name, "is missing", "fill it in or drop the row")
    return value


def whole_milliseconds(
    path: Path, line: int | str | None, name: str, value: object, others: str = ""
) -> None:
    """Refuse a time with a fraction where Mooncake's milliseconds are read; they have none."""
    number = exact_number(value)
    if number is not None and number.is_finite() and number != int(number):
        problem = f"{str(value)!r} has a fraction (is it in milliseconds or in seconds?)"
        fix = f"write whole milliseconds, as Mooncake's traces have{others}"
        raise MalformedFileError(path, line, name, problem, fix)
