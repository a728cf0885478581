"""Tables that are printed, and that replace marked places of a Markdown document."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from servegym.experiments.evaluation.output import write_text

__all__ = ["Table", "percent", "update_document"]


def percent(value: float, signed: bool = False) -> str:
    """A share in percent."""
    return f"{100 * value:+.2f} %" if signed else f"{100 * value:.2f} %"


class Table(NamedTuple):
    """A table to print, and to put into a document under its key."""

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table in Markdown, with true minus signs."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return re.sub(r"(?<= )-(?=\d)", "\N{MINUS SIGN}", text)


def update_document(path: str | os.PathLike[str], tables: Sequence[Table]) -> None:
    """Replace what stands between ``<!-- KEY -->`` and ``<!-- /KEY -->`` by the table of that key.

    Args:
        path: A Markdown file.
        tables: The tables.

    Raises:
        ValueError: If a table has no such place in the file.
    """
    text = Path(path).read_text(encoding="utf-8")
    for table in tables:
        head, begin, rest = text.partition(f"<!-- {table.key} -->\n")
        _, end, tail = rest.partition(f"<!-- /{table.key} -->")
        if not begin or not end:
            raise ValueError(f"{path}: no <!-- {table.key} --> ... <!-- /{table.key} -->")
        text = f"{head}{begin}{table.markdown()}\n{end}{tail}"
    write_text(path, text)
