"""Recorded request traces in their published formats.

======== ========================================================================================
format   columns
======== ========================================================================================
burstgpt CSV ``Timestamp`` (s), ``Model``, ``Request tokens``, ``Response tokens``, ``Total
         tokens``, ``Log Type``
azure    CSV ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens``
mooncake JSONL ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``
bailian  JSONL ``timestamp`` (s), ``input_length``, ``output_length``, ``chat_id``,
         ``parent_chat_id``, ``turn``
csv      any CSV with a time column (``timestamp``, ``timestamp_s``, ``timestamp_ms``,
         ``arrival_time``, ``arrived_at``, ``time``; numbers are seconds unless the name ends in
         ``_ms``, dates and times are read too) and perhaps token columns
jsonl    the same names as keys of one JSON object a line
======== ========================================================================================

A published format is known by a column that no other has; then all of its columns must be there.
Dates and times are those of ISO 8601, in UTC unless they name a zone. Times are returned in seconds
after the first event; they are subtracted exactly, to the last digit that the file has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import choose
from servegym._files import (
    MalformedFileError,
    csv_header,
    csv_rows,
    json_rows,
    parse_moment,
    parse_number,
)

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
_PROMPT_NAMES = (
    "prompt_tokens",
    "request_tokens",
    "request tokens",
    "request_tokens_clipped1023",
    "contexttokens",
    "input_length",
    "input_tokens",
    "input_toks",
    "num_prefill_tokens",
)
_OUTPUT_NAMES = (
    "output_tokens",
    "response_tokens",
    "response tokens",
    "response_tokens_clipped1023",
    "generatedtokens",
    "output_length",
    "output_toks",
    "num_decode_tokens",
)
_NAMES = {"timestamp": _TIME_NAMES, "prompt": _PROMPT_NAMES, "output": _OUTPUT_NAMES}
# format -> its columns, time, prompt and output first
_PUBLISHED = {
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "bailian": (
        "timestamp",
        "input_length",
        "output_length",
        "chat_id",
        "parent_chat_id",
        "turn",
    ),
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
}
# format -> the columns that tell it; Bailian's requests have hash_ids, too, and come first
_MARKS = {
    "burstgpt": ("Request tokens", "Response tokens", "Log Type"),
    "azure": ("ContextTokens", "GeneratedTokens"),
    "bailian": ("chat_id", "parent_chat_id", "turn"),
    "mooncake": ("hash_ids",),
}
FORMATS = (*_PUBLISHED, "csv", "jsonl")
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded trace of n requests.

    Attributes:
        timestamps_s: float64 (n,), seconds after the first request, non-decreasing.
        prompt_tokens: int64 (n,) or None.
        output_tokens: int64 (n,) or None.
        fmt: The format it was read as.
    """

    timestamps_s: np.ndarray
    prompt_tokens: np.ndarray | None = None
    output_tokens: np.ndarray | None = None
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
            non-negative number, times that decrease, or columns that may mean seconds or
            milliseconds; names file, line and field.
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
    if fmt is None:
        fmt = _detect(path, names, is_json)
    columns = _columns(path, fmt, names, line if is_json else 1)
    in_ms = fmt == "mooncake" or (fmt in ("csv", "jsonl") and columns[0].lower().endswith("_ms"))
    kind: str | None = {"azure": "date"}.get(fmt, None if fmt in ("csv", "jsonl") else "number")
    times: list[Decimal] = []
    tokens: tuple[list[int], list[int]] = ([], [])
    while row:
        value = cell(path, line, row, columns[0])
        at, found = event_time(path, line, columns[0], value)
        kind = kind or found
        if found != kind:
            problem = f"{str(value)!r} is a {found}, where a {kind} is wanted"
            raise MalformedFileError(path, line, columns[0], problem, "write all times alike")
        if times and at < times[-1]:
            problem = f"{str(value)!r} is earlier than the request before it"
            raise MalformedFileError(path, line, columns[0], problem, "sort the rows by time")
        times.append(at)
        for name, values in zip(columns[1:], tokens, strict=True):
            if name is not None:
                values.append(token_count(path, line, name, cell(path, line, row, name)))
        line, row = next(rows, (None, {}))
    unit = 1000 if in_ms else 1
    return Trace(
        timestamps_s=np.array([float((at - times[0]) / unit) for at in times]),
        prompt_tokens=np.array(tokens[0]) if columns[1] is not None else None,
        output_tokens=np.array(tokens[1]) if columns[2] is not None else None,
        fmt=fmt,
    )


def _is_json(path: Path) -> bool:
    with path.open("rb") as stream:
        first = next((line for line in stream if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    return first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{")


def _detect(path: Path, names: list[str], is_json: bool) -> str:
    for kind in ("bailian", "mooncake") if is_json else ("burstgpt", "azure"):
        if any(name in names for name in _MARKS[kind]):
            return kind
    if is_json and set(_PUBLISHED["mooncake"][:3]) <= set(names):
        problem = "is in milliseconds in Mooncake's traces and in seconds in others"
        fix = "pass fmt='mooncake' or 'jsonl', or name it timestamp_ms or timestamp_s"
        raise MalformedFileError(path, None, "timestamp", problem, fix)
    return "jsonl" if is_json else "csv"


def _columns(
    path: Path, fmt: str, names: list[str], line: int | None
) -> tuple[str, str | None, str | None]:
    """Names of the time, prompt and output columns of the file."""
    if fmt in _PUBLISHED:
        for name in _PUBLISHED[fmt][: 3 if fmt == "mooncake" else None]:
            if name not in names:
                fix = f"format {fmt!r} has {list(_PUBLISHED[fmt])}; add it or pass another fmt"
                raise MalformedFileError(path, line, name, "is missing", fix)
        return _PUBLISHED[fmt][:3]
    lower: dict[str, str] = {}
    for name in names:
        if lower.setdefault(name.strip().lower(), name) != name:
            problem = f"is there as {lower[name.strip().lower()]!r}, too"
            raise MalformedFileError(path, line, name, problem, "leave one of them out")
    found: list[str | None] = []
    for field, known in _NAMES.items():
        here = [lower[name] for name in known if name in lower]
        if len(here) > 1:
            problem = f"may be each of {', '.join(here)}"
            raise MalformedFileError(path, line, field, problem, "leave one of them")
        found.append(here[0] if here else None)
    if found[0] is None:
        fix = f"name the time column one of {list(_TIME_NAMES)} (found {names})"
        raise MalformedFileError(path, line, "timestamp", "is missing", fix)
    return found[0], found[1], found[2]


def cell(path: Path, line: int | str | None, row: Mapping[str, Any], name: str) -> object:
    """What a row has under a name; a gap is refused."""
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise MalformedFileError(path, line, name, "is missing", "fill it in or drop the row")
    return value


def _number(value: object) -> Decimal | None:
    """The number that a cell holds, to its last digit; infinite or NaN where it is none of use."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    text = str(value).strip()
    if parse_number(text) is not None:
        return Decimal(text)
    try:
        return None if math.isfinite(float(text)) else Decimal("Infinity")
    except ValueError:
        return None


def event_time(path: Path, line: int | str | None, name: str, value: object) -> tuple[Decimal, str]:
    """A time in the column's unit, at least 0, and whether it is a "number" or a "date".

    A date and time is told in seconds since 1970.
    """
    number, kind = _number(value), "number"
    if number is None and isinstance(value, str):
        number, kind = parse_moment(value), "date"
    if number is None:
        fix = "write a number or an ISO date and time (2023-11-16 18:15:46.68)"
        raise MalformedFileError(path, line, name, f"{str(value)!r} is not a time", fix)
    if not number.is_finite():
        fix = "drop the row or fill in its time"
        raise MalformedFileError(path, line, name, f"{str(value)!r} is not finite", fix)
    if number < 0:
        fix = "shift the times so that the first is 0 or later"
        raise MalformedFileError(path, line, name, f"{str(value)!r} is negative", fix)
    return number, kind


def token_count(path: Path, line: int | str | None, name: str, value: object) -> int:
    """A whole number of tokens, at least 0."""
    number = _number(value)
    fix = f"write a whole number of tokens from 0 to {_MOST_TOKENS}"
    if number is None or not number.is_finite():
        raise MalformedFileError(path, line, name, f"{str(value)!r} is not a finite number", fix)
    if not 0 <= number <= _MOST_TOKENS or number != int(number):
        raise MalformedFileError(path, line, name, f"{str(value)!r} is not a token count", fix)
    return int(number)
