"""Recorded request traces in their published formats.

======== ========================================================================================
format   columns
======== ========================================================================================
burstgpt CSV ``Timestamp`` (s), ``Model``, ``Request tokens``, ``Response tokens``, ``Total
         tokens``, ``Log Type``
azure    CSV ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens``
mooncake JSONL ``timestamp`` (whole ms), ``input_length``, ``output_length``, ``hash_ids``
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
    "bailian": ("timestamp", "input_length", "output_length", "chat_id", "parent_chat_id", "turn"),
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
_WHICH_UNIT = "pass fmt='mooncake' for milliseconds or 'jsonl' for seconds"


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
    told = fmt is not None
    if fmt is None:
        fmt = _detect(path, names, is_json)
    columns = _columns(path, fmt, names, line if is_json else 1)
    in_ms = fmt == "mooncake" or (fmt in ("csv", "jsonl") and columns[0].lower().endswith("_ms"))
    kind: str | None = {"azure": "date"}.get(fmt, None if fmt in ("csv", "jsonl") else "number")
    times = Times(path, columns[0], kind, 1000 if in_ms else 1)
    tokens: tuple[list[int], list[int]] = ([], [])
    while row:
        value = cell(path, line, row, columns[0])
        if fmt == "mooncake" and not told:
            whole_milliseconds(path, line, columns[0], value, f"; or {_WHICH_UNIT}")
        times.add(line, value)
        for name, values in zip(columns[1:], tokens, strict=True):
            if name is not None:
                values.append(token_count(path, line, name, cell(path, line, row, name)))
        line, row = next(rows, (None, {}))
    return Trace(
        timestamps_s=np.array(times.after_first()),
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
        fix = f"{_WHICH_UNIT}, or name it timestamp_ms or timestamp_s"
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


def whole_milliseconds(
    path: Path, line: int | str | None, name: str, value: object, others: str = ""
) -> None:
    """Refuse a time with a fraction where Mooncake's milliseconds are read; they have none."""
    number = exact_number(value)
    if number is not None and number.is_finite() and number != int(number):
        problem = f"{str(value)!r} has a fraction (is it in milliseconds or in seconds?)"
        fix = f"write whole milliseconds, as Mooncake's traces have{others}"
        raise MalformedFileError(path, line, name, problem, fix)


def token_count(path: Path, line: int | str | None, name: str, value: object) -> int:
    """A whole number of tokens, at least 0."""
    number = exact_number(value)
    fix = f"write a whole number of tokens from 0 to {_MOST_TOKENS}"
    if number is None or not number.is_finite():
        raise MalformedFileError(path, line, name, f"{str(value)!r} is not a finite number", fix)
    if not 0 <= number <= _MOST_TOKENS or number != int(number):
        raise MalformedFileError(path, line, name, f"{str(value)!r} is not a token count", fix)
    return int(number)
