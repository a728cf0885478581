"""Files of recorded requests, CSV or JSONL: one reader with one table of names.

`read_requests` finds what a caller needs of a file under the names in `NAMES`, in any case. A file
is of one of these formats, known by its columns or named by the caller:

======== ==================================== =====================================================
format   columns by one of which it is known  its time
======== ==================================== =====================================================
burstgpt ``Request tokens``,                  ``Timestamp``, seconds
         ``Response tokens``, ``Log Type``
azure    ``ContextTokens``,                   ``TIMESTAMP``, dates and times
         ``GeneratedTokens``
bailian  ``chat_id``, ``parent_chat_id``,     ``timestamp``, seconds; hash ids of 16 tokens
         ``turn``
mooncake ``hash_ids``, ``text_input``         ``timestamp``, whole milliseconds; hash ids of 512
csv      none of these                        seconds, milliseconds where the name ends in ``_ms``,
                                              dates and times
jsonl    none of these                        as csv
======== ==================================== =====================================================

Dates and times are those of ISO 8601, in UTC unless they name a zone. Times are subtracted exactly,
to the last digit that the file has. A row with ``session_id`` and ``input_length`` is a turn, as in
traces of AIPerf and Dynamo: its prompt is the prompt and the output of the session's turn before
it, and then ``input_length`` more tokens.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import choose
from servegym._files import (
    EPOCH_S,
    MalformedFileError,
    csv_header,
    csv_rows,
    exact_number,
    json_rows,
    parse_moment,
    parse_time,
)

MAX_TOKENS = 1 << 24
NAMES = {
    "arrival_s": (
        *("arrival_s", "timestamp", "timestamp_s", "timestamp_ms", "arrival_time"),
        *("arrival_time_s", "arrived_at", "sent_s", "time", "time_s"),
    ),
    "prompt_tokens": (
        *("prompt_tokens", "input_tokens", "input_length", "input_toks", "contexttokens"),
        *("request tokens", "num_prefill_tokens"),
    ),
    "output_tokens": (
        *("output_tokens", "output_length", "output_toks", "generatedtokens"),
        *("response tokens", "num_decode_tokens"),
    ),
}
"""Names of a column in lower case; where there is the first one the others are not looked at."""
# Format -> whether it is JSONL, what its times are, the columns that tell it (Bailian's requests
# have hash_ids, too).
_PUBLISHED = {
    "burstgpt": (False, "number", {"Request tokens", "Response tokens", "Log Type"}),
    "azure": (False, "date", {"ContextTokens", "GeneratedTokens"}),
    "bailian": (True, "number", {"chat_id", "parent_chat_id", "turn"}),
    "mooncake": (True, "number", {"hash_ids", "text_input"}),
    "csv": (False, None, set()),
    "jsonl": (True, None, set()),
}
FORMATS = tuple(_PUBLISHED)
_LIMITS = {
    "time": (0, EPOCH_S - 1),
    "tokens": (1, MAX_TOKENS),
    "outputs": (0, MAX_TOKENS),
    "score": (0, 1),
}
_UNTOLD = {"input_length", "output_length", "text", "messages", "payload", "delay", "session_id"}
"""Fields of AIPerf, whose ``timestamp`` is in milliseconds, that others have with seconds."""

_NAME_IT = "name it timestamp_ms or timestamp_s"

Kinds = Mapping[str, str]
"""What columns hold, by name: ``"time"`` (at least 0, non-decreasing), ``"seconds"`` (at least 0),
``"seconds?"`` (likewise, NaN where there is none), ``"tokens"`` (whole, 1 to `MAX_TOKENS`),
``"outputs"`` (likewise, or 0, which is read as 1: a request that was recorded without an output
still gives its first token), ``"score"`` (0 to 1) or ``"any"``."""


@dataclass(frozen=True, eq=False)
class RequestFile:
    """What a file of n requests has.

    Attributes:
        columns: By the names that were asked for: int64 (n,) of tokens, a list of ``"any"``, else
            float64 (n,).
        fmt: The format that it was read as.
        lines: (n,) the line of each request; empty where a CSV was read at once.
        before: (n,) the turn before each in its session, -1 for none; empty likewise.
    """

    columns: dict[str, Any]
    fmt: str
    lines: Sequence[int] = ()
    before: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Trace:
    """When n recorded requests came.

    Attributes:
        timestamps_s: float64 (n,), seconds after the first request, non-decreasing.
        fmt: The format that it was read as.
    """

    timestamps_s: np.ndarray
    fmt: str = "csv"


def load_trace(path: str | os.PathLike[str], fmt: str | None = None) -> Trace:
    """Read when recorded requests came.

    Args:
        path: The file.
        fmt: ``"burstgpt"``, ``"azure"``, ``"bailian"``, ``"mooncake"``, ``"csv"`` or ``"jsonl"``;
            told by the columns if None.

    Raises:
        ValueError: An unknown format, or no such file.
        MalformedFileError: As `read_requests`.
    """
    if fmt is not None:
        choose("fmt", fmt, FORMATS)
    if not Path(path).is_file():
        raise ValueError(f"path={os.fspath(path)!r} is not a file.")
    file = read_requests(path, lambda _: {"arrival_s": "time"}, fmt, from_first=True)
    return Trace(file.columns["arrival_s"], file.fmt)


def read_requests(
    path: str | os.PathLike[str],
    choose_kinds: Callable[[Sequence[str]], Kinds],
    fmt: str | None = None,
    from_first: bool = False,
) -> RequestFile:
    """Read the columns of a file that a caller needs; the others are ignored.

    Args:
        path: CSV with a header line, or JSONL whose first row has all names; UTF-8.
        choose_kinds: Of the file's names, what to read. ``arrival_s``, ``prompt_tokens`` and
            ``output_tokens`` are found under all their `NAMES`.
        fmt: One of `FORMATS`; told by the columns if None.
        from_first: Times count from the first one; else only those since an epoch do.

    Raises:
        MalformedFileError: The file is empty, a column is missing or twice, or a value is not
            usable or may mean seconds or milliseconds; nothing of the file is returned.
        OSError: The file cannot be opened.
    """
    path = Path(path)
    is_json = _is_json(path)
    # A number with a fraction stays as it is written: a float has no room for its last digits.
    rows = json_rows(path, parse_float=Decimal) if is_json else csv_rows(path)
    at, first = next(rows) if is_json else (1, {})
    names = list(first) if is_json else csv_header(path)
    kinds = choose_kinds(names)
    found = {name: _find(path, at, names, name, kind) for name, kind in kinds.items()}
    at, first = (at, first) if is_json else next(rows, (None, {}))
    if at is None:
        fix = "add at least one request"
        raise MalformedFileError(path, None, None, "has no requests", fix)
    format_ = fmt or next(
        name
        for name, (lines, _, columns) in _PUBLISHED.items()
        if lines == is_json and not (columns and columns.isdisjoint(names))
    )
    clock = next((found[name] for name, kind in kinds.items() if kind == "time"), "")
    unit = _unit(path, first, clock, format_, fmt is None)
    turns = found.get("prompt_tokens") == "input_length" and (is_json or "session_id" in names)
    if not (is_json or from_first or turns) and unit in (_Unit(), _Unit("number")):
        wanted = {found[name]: kind for name, kind in kinds.items()}
        if (plain := _plain_columns(path, names, wanted)) is not None:
            return RequestFile(dict(zip(kinds, plain.values(), strict=True)), format_)
    columns: dict[str, Any] = {name: [] for name in kinds}
    lines, sessions = [], []
    for line, row in itertools.chain([(at, first)], rows):
        for name, kind in kinds.items():
            if kind == "time":
                unit = _take_time(path, line, row, clock, unit, columns[name])
            else:
                columns[name].append(_value(path, line, row, found[name], kind, is_json))
        lines.append(line)
        sessions.append(row.get("session_id"))
    before = _join_turns(path, lines, sessions, columns) if turns else [-1] * len(lines)
    for name, kind in kinds.items():
        if kind == "time":
            times = columns[name]
            begin = times[0] if from_first or times[0] >= EPOCH_S else 0
            columns[name] = [float(at - begin) for at in times]
        if kind != "any":
            whole = kind in ("tokens", "outputs")
            columns[name] = np.array(columns[name], np.int64 if whole else np.float64)
    return RequestFile(columns, format_, lines, before)


def is_called(column: str, name: str) -> bool:
    """Whether a column is what a caller of `read_requests` knows by the name."""
    return column == name or column.strip().lower() in NAMES.get(name, ())


def _is_json(path: Path) -> bool:
    with path.open("rb") as stream:
        first = next((line for line in stream if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    return first.lstrip(b"\xef\xbb\xbf \t").startswith((b"{", b"["))


def _find(path: Path, line: int | None, names: Sequence[str], name: str, kind: str) -> str:
    """What a column is called in the file."""
    here = [name] if name in names else [each for each in names if is_called(each, name)]
    if len(here) > 1:
        problem = f"is there as {here[0]!r}, too"
        raise MalformedFileError(path, line, here[1], problem, "leave one of them out")
    if not here and not kind.endswith("?"):
        problem = f"is missing (found: {', '.join(names)})"
        fix = f"add it, or name it one of {', '.join(NAMES[name])}" if name in NAMES else "add it"
        raise MalformedFileError(path, line, name, problem, fix)
    return here[0] if here else name


class _Unit(NamedTuple):
    """Of times: their kind as in `parse_time`, units in a second, and whether all are whole."""

    kind: str | None = None
    per_second: int = 1
    whole: bool = False


def _unit(path: Path, row: Mapping[str, Any], column: str, fmt: str, detected: bool) -> _Unit:
    """Of the times in a column of a file whose first row this is."""
    name = column.strip().lower()
    bare, kind = name == "timestamp", _PUBLISHED[fmt][1]
    asked = bare and detected and kind is None and not _UNTOLD.isdisjoint(row)
    if asked and parse_moment(str(row[column])) is None:
        problem = "is in milliseconds in traces of Mooncake and AIPerf and in seconds in others"
        raise MalformedFileError(path, None, column, problem, _NAME_IT)
    if bare and fmt == "mooncake":
        return _Unit(kind, 1000, detected)
    return _Unit(kind, 1000 if name.endswith("_ms") else 1)


def _take_time(
    path: Path, line: int, row: Mapping[str, Any], name: str, unit: _Unit, times: list[Decimal]
) -> _Unit:
    """Add the time of the next row; the unit with the kind that the others must be of."""
    value = cell(path, line, row, name)
    number = exact_number(value) if unit.whole else None
    if number is not None and number.is_finite() and number != int(number):
        problem = f"{str(value)!r} has a fraction (is it in milliseconds or in seconds?)"
        raise MalformedFileError(path, line, name, problem, f"write whole numbers, or {_NAME_IT}")
    at, kind = parse_time(path, line, name, value, unit.kind, unit.per_second)
    if times and at < times[-1]:
        problem = f"{str(value)!r} is earlier than the request before it"
        raise MalformedFileError(path, line, name, problem, "sort the rows by time")
    times.append(at)
    return unit._replace(kind=kind)


def _join_turns(
    path: Path, lines: Sequence[int], sessions: Sequence[Any], columns: Mapping[str, list[int]]
) -> list[int]:
    """The turn before each request; its prompt and output are put before the request's prompt."""
    prompt, output = columns["prompt_tokens"], columns.get("output_tokens")
    last: dict[Any, int] = {}
    before = [-1] * len(lines)
    for j, (line, session) in enumerate(zip(lines, sessions, strict=True)):
        if session in (None, ""):
            continue
        if output is None or not isinstance(session, str | int):
            problem = "needs one output_tokens" if output is None else f"{session!r} is no name"
            fix = "write text or a number, or whole prompts without session_id"
            raise MalformedFileError(path, line, "session_id", problem, fix)
        before[j] = last.get(session, -1)
        if before[j] >= 0:
            prompt[j] += prompt[before[j]] + output[before[j]]
        if prompt[j] > MAX_TOKENS:
            problem = f"makes {prompt[j]} tokens with the turns before, {MAX_TOKENS} at most"
            raise MalformedFileError(path, line, "input_length", problem, "end the session before")
        last[session] = j
    return before


def _plain_columns(path: Path, header: Sequence[str], kinds: Kinds) -> dict[str, np.ndarray] | None:
    """Columns of a CSV by numpy's reader, ten times as fast.

    None where a cell is quoted, a line has not as many cells as the header, times count from
    an epoch, or a value is not usable: the file is read line by line, which names what is wrong.
    """
    content = path.read_bytes()
    codes = np.frombuffer(content.rstrip() + b"\n", np.uint8)
    ends = np.flatnonzero(codes == ord("\n"))
    cells = np.diff(np.cumsum(codes == ord(","))[ends], prepend=0) + 1
    odd = b'"' in content or content.count(b"\r") != content.count(b"\r\n")
    if odd or (cells != len(header)).any() or not _LIMITS.keys() >= set(kinds.values()):
        return None
    places = [header.index(name) for name in kinds]
    try:
        table = np.loadtxt(
            path, delimiter=",", skiprows=1, usecols=places, ndmin=2, comments=None,
            encoding="utf-8-sig",
        )  # fmt: skip
    except ValueError:
        return None
    columns = {}
    for (name, kind), values in zip(kinds.items(), table.T, strict=True):
        low, high = _LIMITS[kind]
        good = (values >= low) & (values <= high)
        columns[name] = np.ascontiguousarray(values)
        if kind in ("tokens", "outputs"):
            columns[name] = np.where(good, values, 0.0).astype(np.int64)
            good &= columns[name] == values
            np.maximum(columns[name], 1, out=columns[name])
        elif kind == "time":
            good[1:] &= np.diff(values) >= 0.0
        if not good.all():
            return None
    return columns


def cell(path: Path, line: int | str | None, row: Mapping[str, Any], name: str) -> object:
    """What a row has under a name; a gap is refused."""
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise MalformedFileError(path, line, name, "is missing", "fill it in or drop the row")
    return value


def _value(
    path: Path, line: int, row: Mapping[str, Any], name: str, kind: str, is_json: bool
) -> Any:
    if kind == "seconds?" and row.get(name) is None:
        return math.nan
    value = cell(path, line, row, name)
    if is_json and kind != "any" and isinstance(value, str):
        raise MalformedFileError(path, line, name, f"{value!r} is text", "write a number")
    if type(value) is int and 1 <= value <= MAX_TOKENS and kind in ("tokens", "outputs"):
        return value
    if kind.startswith("seconds"):
        return float(parse_time(path, line, name, value, "number")[0])
    if kind == "score":
        number = exact_number(value)
        if number is None or not 0 <= number <= 1:
            fix = "give a number from 0 to 1"
            raise MalformedFileError(path, line, name, f"{str(value)!r} is no score", fix)
        return float(number)
    if kind == "outputs":
        return max(read_tokens(path, line, name, row, 0), 1)
    return value if kind == "any" else read_tokens(path, line, name, row)


def read_tokens(
    path: Path, line: int | str, name: str, row: Mapping[str, Any], least: int = 1
) -> int:
    """A number of tokens from ``least`` to `MAX_TOKENS`; spreadsheets write 12.0 for 12."""
    value = cell(path, line, row, name)
    number = exact_number(value)
    if number is None or not least <= number <= MAX_TOKENS or number != int(number):
        fix = f"write a whole number of tokens from {least} to {MAX_TOKENS}"
        raise MalformedFileError(path, line, name, f"{str(value)!r} is no token count", fix)
    return int(number)
