"""Recorded request traces in their published formats.

======== ========================================================================================
format   columns
======== ========================================================================================
burstgpt CSV ``Timestamp`` (s), ``Model``, ``Request tokens``, ``Response tokens``, ``Total
         tokens``, ``Log Type``
azure    CSV ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens``
mooncake JSONL ``timestamp`` (ms), ``input_length``, ``output_length``
csv      any CSV with a time column (``timestamp``, ``timestamp_s``, ``timestamp_ms``,
         ``arrival_time``, ``arrived_at``, ``time``; numbers are seconds unless the name ends in
         ``_ms``, dates and times are read too) and perhaps token columns
jsonl    the same names as keys of one JSON object a line
======== ========================================================================================

Times are returned in seconds after the first event.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servegym._checks import choose
from servegym.envs.workloads.errors import MalformedFileError

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
# format -> (time, prompt, output) columns; a published format must have all three.
_PUBLISHED = {
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "mooncake": ("timestamp", "input_length", "output_length"),
}
FORMATS = ("burstgpt", "azure", "mooncake", "csv", "jsonl")


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
        fmt: ``"burstgpt"``, ``"azure"``, ``"mooncake"``, ``"csv"`` or ``"jsonl"``; detected from
            the first line if None.

    Returns:
        The trace; nothing of a malformed file is used.

    Raises:
        ValueError: An unknown format, or no such file.
        MalformedFileError: An empty file, a missing column, or a value that is not a finite,
            non-negative number, or times that decrease; names file, line and field.
    """
    if fmt is not None:
        choose("fmt", fmt, FORMATS)
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path={os.fspath(path)!r} is not a file.")
    try:
        return _load(path, fmt)
    except UnicodeDecodeError as error:
        raise MalformedFileError(
            path, None, None, f"is not UTF-8 text ({error})", "unpack it or convert it to UTF-8"
        ) from error


def _load(path: Path, fmt: str | None) -> Trace:
    with path.open(encoding="utf-8-sig") as stream:
        first = next((line for line in stream if line.strip()), None)
    if first is None:
        fix = "give a file with a header and at least one request"
        raise MalformedFileError(path, None, None, "is empty", fix)
    if first.startswith("version https://git-lfs"):
        problem = "is a Git LFS pointer, not the trace"
        raise MalformedFileError(
            path, 1, None, problem, "fetch the file itself with `git lfs pull`"
        )
    is_json = fmt in ("mooncake", "jsonl") or (fmt is None and first.lstrip().startswith("{"))
    rows = json_rows(path) if is_json else _csv_rows(path)
    line, row = next(rows, (None, None))
    if row is None:
        fix = "add at least one request below the header"
        raise MalformedFileError(path, None, None, "has no requests", fix)
    names = [name for name in row if isinstance(name, str)]
    if fmt is None:
        fmt = _detect(names, is_json)
    columns = _columns(path, fmt, names, line if is_json else 1)
    factor = 1e-3 if fmt == "mooncake" or columns[0].lower().endswith("_ms") else 1.0
    times: list[float] = []
    tokens: tuple[list[int], list[int]] = ([], [])
    origin: float | None = None
    while row is not None:
        at = event_time(path, line, columns[0], cell(path, line, row, columns[0])) * factor
        if origin is not None and at < times[-1]:
            problem = f"{row[columns[0]]!r} is earlier than the request before it"
            raise MalformedFileError(path, line, columns[0], problem, "sort the rows by time")
        origin = at if origin is None else origin
        times.append(at)
        for name, values in zip(columns[1:], tokens, strict=True):
            if name is not None:
                values.append(token_count(path, line, name, cell(path, line, row, name)))
        line, row = next(rows, (None, None))
    stamps = np.array(times)
    return Trace(
        timestamps_s=stamps - stamps[0],
        prompt_tokens=np.array(tokens[0]) if columns[1] is not None else None,
        output_tokens=np.array(tokens[1]) if columns[2] is not None else None,
        fmt=fmt,
    )


def _csv_rows(path: Path) -> Iterator[tuple[int, dict]]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            fix = "write it as plain comma-separated text"
            raise MalformedFileError(path, reader.line_num, None, str(error), fix) from error


def json_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Line numbers and objects of a JSONL file."""
    with path.open(encoding="utf-8-sig") as stream:
        for line, text in enumerate(stream, start=1):
            if not text.strip():
                continue
            fix = "write one JSON object on each line"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                problem = f"is not JSON ({error})"
                raise MalformedFileError(path, line, None, problem, fix) from error
            if not isinstance(row, dict):
                raise MalformedFileError(path, line, None, "is not a JSON object", fix)
            yield line, row


def _detect(names: list[str], is_json: bool) -> str:
    kinds = ("mooncake",) if is_json else ("burstgpt", "azure")
    for kind in kinds:
        if all(name in names for name in _PUBLISHED[kind]):
            return kind
    return "jsonl" if is_json else "csv"


def _columns(
    path: Path, fmt: str, names: list[str], line: int | None
) -> tuple[str, str | None, str | None]:
    """Names of the time, prompt and output columns of the file."""
    if fmt in _PUBLISHED:
        for name in _PUBLISHED[fmt]:
            if name not in names:
                fix = f"format {fmt!r} has {list(_PUBLISHED[fmt])}; add it or pass another fmt"
                raise MalformedFileError(path, line, name, "is missing", fix)
        return _PUBLISHED[fmt]
    lower = {name.strip().lower(): name for name in reversed(names)}
    found = [
        next((lower[name] for name in known if name in lower), None)
        for known in (_TIME_NAMES, _PROMPT_NAMES, _OUTPUT_NAMES)
    ]
    if found[0] is None:
        fix = f"name the time column one of {list(_TIME_NAMES)} (found {names})"
        raise MalformedFileError(path, line, "timestamp", "is missing", fix)
    return found[0], found[1], found[2]


def cell(path: Path, line: int | str | None, row: dict, name: str) -> object:
    """What a row has under a name; a gap is refused."""
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise MalformedFileError(path, line, name, "is missing", "fill it in or drop the row")
    return value


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def event_time(path: Path, line: int | str | None, name: str, value: object) -> float:
    """A time in the column's unit, at least 0."""
    number = _number(value)
    if number is None and isinstance(value, str):
        number = _datetime(value.strip())
    if number is None:
        fix = "write a number or a date and time (2023-11-16 18:15:46.68)"
        raise MalformedFileError(path, line, name, f"{value!r} is not a time", fix)
    if not math.isfinite(number):
        fix = "drop the row or fill in its time"
        raise MalformedFileError(path, line, name, f"{value!r} is not finite", fix)
    if number < 0:
        fix = "shift the times so that the first is 0 or later"
        raise MalformedFileError(path, line, name, f"{value!r} is negative", fix)
    return number


def _datetime(text: str) -> float | None:
    """Seconds since 1970 of a date and time with up to nine digits of fraction."""
    head, _, tail = text.partition(".")
    digits = tail.rstrip("Z")
    zone = ""
    for sign in "+-":
        if sign in digits:
            digits, _, rest = digits.partition(sign)
            zone = sign + rest
    if digits and not digits.isdigit():
        return None
    try:
        moment = datetime.datetime.fromisoformat(head.rstrip("Z") + zone)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def token_count(path: Path, line: int | str | None, name: str, value: object) -> int:
    """A whole number of tokens, at least 0."""
    number = _number(value)
    fix = "write a whole number of tokens >= 0"
    if number is None or not math.isfinite(number):
        raise MalformedFileError(path, line, name, f"{value!r} is not a finite number", fix)
    if number < 0 or number != int(number):
        raise MalformedFileError(path, line, name, f"{value!r} is not a token count", fix)
    return int(number)
