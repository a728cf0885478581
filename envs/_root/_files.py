"""Files: read as they are or refused by line and field, written whole or not at all."""

from __future__ import annotations

import csv
import datetime
import io
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)

LATEST_S = 10**11
"""Seconds that no clock shows before the year 5138: so large a number counts smaller units."""
EPOCH_S = 10**8
"""Times that begin after more than three years of seconds count from an epoch."""


class MalformedFileError(ValueError):
    """A file that cannot be used; nothing of it is used.

    The message reads ``path:line: field 'x': what is wrong; how to fix it``.

    Args:
        path: The file.
        line: Line number counted from 1, or a place such as "record 3"; None for the whole file.
        field: Name of the field, or None.
        problem: What is wrong.
        fix: How to put it right.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        line: int | str | None,
        field: str | None,
        problem: str,
        fix: str,
    ) -> None:
        self.path = os.fspath(path)
        self.line = line
        self.field = field
        self.problem = problem
        self.fix = fix
        where = self.path if line is None else f"{self.path}:{line}"
        what = problem if field is None else f"field {field!r}: {problem}"
        super().__init__(f"{where}: {what}; {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.line, self.field, self.problem, self.fix)


def parse_number(text: str) -> float | None:
    """The finite number that a cell holds in plain notation, such as ``12``, ``.5`` or ``1e-3``."""
    text = text.strip()
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def parse_moment(text: str) -> Decimal | None:
    """Seconds since 1970 of a date and time of ISO 8601, in UTC unless it names a zone."""
    match = _MOMENT.fullmatch(text.strip())
    if match is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(match[1] + (match[3] or "Z"))
    except ValueError:
        return None
    return Decimal((moment - _EPOCH) // datetime.timedelta(seconds=1)) + Decimal(match[2] or 0)


def exact_number(value: object) -> Decimal | None:
    """The number that a cell holds, to its last digit; infinite or NaN where it is none of use."""
    if type(value) is int:
        return Decimal(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    text = str(value).strip()
    if parse_number(text) is not None:
        return Decimal(text)
    try:
        return None if math.isfinite(float(text)) else Decimal("Infinity")
    except ValueError:
        return None


def parse_time(
    path: str | os.PathLike[str],
    line: int | str | None,
    name: str,
    value: object,
    kind: str | None = None,
    per_second: int = 1,
) -> tuple[Decimal, str]:
    """A time in seconds, at least 0, and whether it is a "number" or a "date".

    A date and time is told in seconds since 1970. ``kind`` is what it must be, None: either;
    ``per_second`` are the field's units in a second.

    Raises:
        MalformedFileError: It is none, negative, not finite, of the other kind, or beyond
            `LATEST_S`.
    """
    number, form = exact_number(value), "number"
    if number is None and isinstance(value, str):
        number, form = parse_moment(value), "date"
    unit = "milliseconds" if per_second == 1000 else "seconds"
    dated = "" if kind == "number" else " or an ISO date and time (2023-11-16 18:15:46.68)"
    problem, fix = "", f"write {unit}{dated}"
    if number is None:
        problem = "is not a time"
    elif not number.is_finite():
        problem, fix = "is not finite", "drop the row or fill in its time"
    elif number < 0:
        problem, fix = "is negative", "shift the times so that the first is 0 or later"
    elif kind not in (None, form):
        problem, fix = f"is a {form}, where a {kind} is wanted", "write all times alike"
    elif number >= LATEST_S * per_second:
        problem = f"cannot be {unit}, not even since 1970 (are they smaller units?)"
    if number is None or problem:
        raise MalformedFileError(path, line, name, f"{str(value)!r} {problem}", fix)
    return number / per_second, form


def csv_header(path: str | os.PathLike[str]) -> list[str]:
    """The names in the first line of a CSV file.

    Raises:
        MalformedFileError: As `csv_rows`.
        OSError: The file cannot be opened.
    """
    return next(_csv_lines(path))[1]


def csv_rows(
    path: str | os.PathLike[str], columns: Sequence[str] = (), stream: TextIO | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Line numbers and rows of a CSV file, UTF-8, whose first line names the columns.

    The ``columns`` must be there; others may be. ``stream`` is its text where it lies in an
    archive; it is closed at the end.

    Raises:
        MalformedFileError: The file is empty or no CSV, a column is missing or there twice, or a
            row has not one value for each column.
        OSError: The file cannot be opened.
    """
    lines = _csv_lines(path, stream)
    at, header = next(lines)
    for name in columns:
        if name not in header:
            problem = f"is missing (found: {', '.join(header)})"
            raise MalformedFileError(path, at, name, problem, f"write {','.join(columns)}")
    for line, values in lines:
        if len(values) != len(header):
            problem = f"has {len(values)} values, the header {len(header)}"
            fix = "give one value for each column"
            raise MalformedFileError(path, line, None, problem, fix)
        yield line, dict(zip(header, values, strict=True))


def _csv_lines(
    path: str | os.PathLike[str], stream: TextIO | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and values of all lines but blank ones; there is at least a first one."""
    header: list[str] | None = None
    with stream or open(path, newline="", encoding="utf-8-sig") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            for values in reader:
                if not "".join(values).strip() and len(values) < 2:
                    continue
                if header is None:
                    header = values
                    _refuse_pointer(path, values[0])
                    for name in header:
                        if header.count(name) > 1:
                            fix = "give each column a name of its own"
                            raise MalformedFileError(path, 1, name, "is there twice", fix)
                yield reader.line_num, values
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text ({error.reason})"
            raise MalformedFileError(path, None, None, problem, "save it as UTF-8 CSV") from error
        except csv.Error as error:
            problem, fix = f"is no CSV ({error})", "save it as UTF-8 CSV"
            raise MalformedFileError(path, reader.line_num, None, problem, fix) from error
    if header is None:
        fix = "give a line with the names of the columns, and rows below it"
        raise MalformedFileError(path, None, None, "is empty", fix)


def json_rows(
    path: str | os.PathLike[str], parse_float: Callable[[str], Any] = float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSONL file, UTF-8; blank lines are left out.

    ``parse_float`` makes a value of the text of a number with a fraction or an exponent.

    Raises:
        MalformedFileError: A line is no JSON object, or has a key twice.
        OSError: The file cannot be opened.
    """
    fix = "write one JSON object on each line"
    decode = json.JSONDecoder(parse_float=parse_float, object_pairs_hook=_once).decode
    with open(path, encoding="utf-8-sig") as stream:
        try:
            for line, text in enumerate(stream, start=1):
                if not text.strip():
                    continue
                _refuse_pointer(path, text)
                if text.lstrip().startswith("["):
                    raise MalformedFileError(path, line, None, "is a JSON array", fix)
                try:
                    row = decode(text)
                except (ValueError, RecursionError) as error:
                    problem = f"is not JSON ({error})"
                    raise MalformedFileError(path, line, None, problem, fix) from error
                if not isinstance(row, dict):
                    raise MalformedFileError(path, line, None, "is not a JSON object", fix)
                yield line, row
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text ({error.reason})"
            raise MalformedFileError(path, None, None, problem, "save it as UTF-8") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r}: given twice")
    return result


def _no_number(token: str) -> Any:
    raise ValueError(f"{token} is no JSON number; write a finite number")


def read_json(path: str | os.PathLike[str], fix: str = "write it again") -> Any:
    """Contents of a JSON file, read strictly: no NaN, no infinity, no key twice.

    Raises:
        MalformedFileError: With the advice ``fix``, if it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} (column {error.colno})"
        raise MalformedFileError(path, error.lineno, None, problem, fix) from error
    except (OSError, ValueError, RecursionError) as error:
        raise MalformedFileError(path, None, None, f"cannot be read ({error})", fix) from error


def _refuse_pointer(path: str | os.PathLike[str], text: str) -> None:
    if text.startswith("version https://git-lfs"):
        problem, fix = "is a Git LFS pointer, not the file", "fetch it with `git lfs pull`"
        raise MalformedFileError(path, 1, None, problem, fix)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file where a write fails: the system does not say which disk is full.

    Raises:
        OSError: With the file's name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def locked(
    path: str | os.PathLike[str], busy: str, mode: Literal["ab", "xb", "r+b"] = "ab"
) -> BinaryIO:
    """A file that is opened and locked until it is closed or the process ends, however that be.

    Raises:
        ValueError: With the text ``busy``, if another process holds it.
        OSError: If it cannot be opened in this mode.
    """
    import fcntl  # which Windows lacks

    file: BinaryIO = open(path, mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(busy) from None
    return file


def write_atomic(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary one in the same folder, so that none is ever half there.

    ``write`` writes the content to the binary stream that it is given; the folder must exist.

    Raises:
        OSError: With the file's name, as where the disk is full.
    """
    target = Path(path)
    with naming(target):
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as stream:
                write(stream)
            # mkstemp makes the file private to its owner; give it the usual mode of a new file.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_text(path: str | os.PathLike[str], text: str | bytes) -> None:
    """Write UTF-8 text or bytes with :func:`write_atomic`; line ends stay as they are."""
    data = text.encode() if isinstance(text, str) else text
    write_atomic(path, lambda stream: stream.write(data))


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write row dicts as CSV, atomically; NaN is written ``nan`` and a missing value left empty."""
    names = dict.fromkeys(key for row in rows for key in row)
    write_columns(path, {name: [row.get(name, "") for row in rows] for name in names})


def write_columns(
    path: str | os.PathLike[str], columns: Mapping[str, Sequence[Any]], decimals: int | None = None
) -> None:
    """Write columns of one length as CSV, as :func:`write_csv` does.

    Columns of floats have ``decimals`` digits behind the point, or as many as it takes.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    rows = zip(*columns.values(), strict=True)
    kinds = [{*map(type, values)} for values in columns.values()]
    if columns and all(kind <= {int, float} for kind in kinds):
        # One format of all rows: a call a cell takes three times as long.
        digits = "%r" if decimals is None else f"%.{decimals}f"
        cells = ",".join(digits if kind == {float} else "%r" for kind in kinds) + "\n"
        count = len(next(iter(columns.values())))
        stream.write(cells * count % tuple(itertools.chain.from_iterable(rows)))
    else:
        writer.writerows(rows)
    write_text(path, stream.getvalue())


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write ``content`` as indented JSON with :func:`write_atomic`; lists of numbers are a line."""
    write_text(path, _indented(content) + "\n")


def _indented(value: Any, indent: str = "") -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        brackets = "{}"
        items = [f"{json.dumps(str(k))}: {_indented(one, inner)}" for k, one in value.items()]
    elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        brackets = "[]"
        items = [_indented(one, inner) for one in value]
    else:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    body = ",\n".join(inner + item for item in items)
    return f"{brackets[0]}\n{body}\n{indent}{brackets[1]}"
