"""Result files and printed tables of the experiments."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._files import csv_rows, write_csv, write_text
from servegym._files import write_json as write_plain

__all__ = ["check_writable", "print_table", "read_rows", "write_csv", "write_json", "write_text"]


def check_writable(path: str | os.PathLike[str], suffixes: Sequence[str] = ()) -> Path:
    """Make sure that a file can be written before the work for it starts, and return its path.

    Raises:
        ValueError: If the ending is none of ``suffixes`` (there are some), the folder is missing or
            not writable, or the path is a folder.
    """
    target = Path(path)
    if suffixes and target.suffix.lower() not in suffixes:
        raise ValueError(f"out is {str(target)!r}; its ending must be {' or '.join(suffixes)}")
    if target.is_dir():
        raise ValueError(f"out is {str(target)!r}, which is a folder; name a file")
    if not target.parent.is_dir():
        raise ValueError(
            f"out is {str(target)!r}, but the folder {str(target.parent)!r} does not exist"
        )
    try:
        # Trying is the only test that is right for every user, mount and permission scheme.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".servegym.", suffix=".tmp")
    except OSError as error:
        raise ValueError(f"out is {str(target)!r}, which cannot be written: {error}") from error
    os.close(handle)
    os.unlink(name)
    return target


def _plain(value: Any) -> Any:
    """``value`` in JSON's types; NaN and infinities become null, since JSON has neither."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """`servegym._files.write_json` with null for NaN."""
    write_plain(path, _plain(content))


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a file of `write_csv`, numbers as numbers and truth values as such.

    Raises:
        MalformedFileError: The file is no such table.
        OSError: It cannot be opened.
    """

    def value(cell: str) -> Any:
        if cell in ("True", "False"):
            return cell == "True"
        for kind in (int, float):
            try:
                return kind(cell)
            except ValueError:
                pass
        return cell

    return [{k: value(cell) for k, cell in row.items()} for _, row in csv_rows(path)]


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    left: int = 1,
) -> None:
    """Print a table, the first ``left`` columns left and the others right aligned, and its notes.

    One that is wider than the terminal, or than 100 characters in a file or a pipe, is printed in
    parts that repeat the first columns.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)  # a file or a pipe has none
    wide = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    parts = []
    for shown in _parts(wide, left, console.width):
        table = Table(
            title=title and Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for i in shown:
            how: dict[str, Any] = {"justify": "left", "no_wrap": i == 0, "overflow": "fold"}
            if i >= left:
                how = {"justify": "right", "min_width": wide[i]}
            table.add_column(Text(columns[i]), **how)
        for row in rows:
            table.add_row(*(Text(row[i]) for i in shown))
        parts.append(table)
        title = ""
    with console.capture() as printed:  # printing itself, it ends a closed pipe with status 1
        console.print(*parts, *map(Text, notes), sep="\n")
    print(printed.get(), end="")


def _parts(wide: Sequence[int], left: int, room: int) -> list[list[int]]:
    """Numbers of the columns of each part of a table, which have these widths."""
    first = list(range(left))
    parts = [first.copy()]
    for i in range(left, len(wide)):
        if len(parts[-1]) > left and sum(wide[k] + 3 for k in (*parts[-1], i)) - 1 > room:
            parts.append(first.copy())
        parts[-1].append(i)
    return parts
