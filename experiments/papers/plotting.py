"""Pictures of tables, drawn by matplotlib without a display: lines and bars by column names."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Bars", "Lines", "as_png", "error_bars", "legend", "pyplot"]

UNITS = {"s": "s", "ms": "ms", "pct": "%", "usd": "USD", "rps": "1/s", "bits": "bit", "gb": "GB"}
WIDE = 4
"""Panels of one column that stand side by side."""

Rows = Sequence[Mapping[str, Any]]
Names = str | tuple[str, ...]


def pyplot() -> Any:
    """matplotlib.pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def legend(figure: Any, axis: Any) -> None:
    """The legend of one panel, below all, in as many columns as the figure has room for."""
    handles, labels = axis.get_legend_handles_labels()
    room = 14 * figure.get_figwidth() / (7 + max(map(len, labels), default=0))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(1, min(int(room), len(labels))),
        fontsize=8,
        frameon=False,
    )


def error_bars(rows: Rows, key: str, ends: tuple[str, str] | None = None) -> Any:
    """Values ``(rows,)`` and bars ``(2, rows)`` of a column and the ends of its interval.

    Args:
        rows: The rows; where they lack the ends the bars are 0.
        key: The column.
        ends: Columns of the ends; ``key`` with ``_low`` and ``_high`` by default.
    """
    low, high = ends or (f"{key}_low", f"{key}_high")

    def numbers(column: str) -> Any:
        given = [row[column] if column in row else row[key] for row in rows]
        return np.array([np.nan if x == "" else x for x in given], dtype=np.float64)

    values = numbers(key)
    return values, np.maximum([values - numbers(low), numbers(high) - values], 0.0)


def as_png(figure: Any) -> bytes:
    """The picture of a matplotlib figure, which is closed."""
    stream = io.BytesIO()
    figure.savefig(stream, dpi=110, format="png")
    pyplot().close(figure)
    return stream.getvalue()


def _columns(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _words(column: str) -> str:
    """``mean_latency_s`` as ``mean latency, s``."""
    stem, _, unit = column.rpartition("_")
    named = f"{stem}, {UNITS[unit]}" if stem and unit in UNITS else column
    return named.replace("_", " ")


def _at(row: Mapping[str, Any], names: Names) -> str:
    """What a row has in some columns, numbers with the names of theirs."""
    values = {name.replace("_", " "): row[name] for name in _columns(names)}
    words = [x if isinstance(x, str) else f"{name} {x:g}" for name, x in values.items()]
    return ", ".join(word for word in words if word)


def _kinds(rows: Rows, names: Names) -> list[str]:
    """What the rows have in some columns, each once."""
    return list(dict.fromkeys(_at(row, names) for row in rows))


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A picture of a table: columns against a column.

    Attributes:
        x: Column along the axis.
        y: Columns, a panel each.
        line: Columns whose values have a line each.
        panels: Columns whose values have panels of their own.
        where: Whether a row is shown; all of them by default.
        log: Axes with a logarithmic scale, of ``x`` and ``y``.
        ends: Columns of the ends of the intervals, see `error_bars`.
        reference: A column drawn dashed in black, the same for all lines.
        level: A value drawn dotted in black.
    """

    x: Names
    y: Names
    line: Names = ()
    panels: Names = ()
    where: Callable[[Mapping[str, Any]], bool] | None = None
    log: str = ""
    ends: tuple[str, str] | None = None
    reference: str = ""
    level: float | None = None

    def __call__(self, rows: Rows) -> Any:
        """The matplotlib figure of a table's rows."""
        rows = [row for row in rows if self.where is None or self.where(row)]
        y, panels, lines = _columns(self.y), _kinds(rows, self.panels), _kinds(rows, self.line)
        cells = [(panel, column) for column in y for panel in panels]
        wide = min(WIDE, len(cells)) if 1 in (len(y), len(panels)) else len(panels)
        high = -(-len(cells) // wide)
        size = (max(4.2 * wide, 6.0), 3.4 * high + 0.25 * (1 + len(lines) // 6))
        figure, axes = pyplot().subplots(
            high, wide, figsize=size, squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(cells) :]:
            axis.set_visible(False)
        for axis, (panel, column) in zip(axes.flat, cells, strict=False):
            own = [row for row in rows if _at(row, self.panels) == panel]
            parts = [[row for row in own if _at(row, self.line) == one] for one in lines]
            self._draw(axis, own, dict(zip(lines, parts, strict=True)), column)
            axis.set_title(panel, fontsize=10)
            axis.set_ylabel(_words(column))
            if "y" in self.log:
                axis.set_yscale("log")
            if self.level is not None:
                axis.axhline(self.level, color="black", linewidth=0.9, linestyle=":")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        legend(figure, axes[0, 0])
        return figure

    def _draw(self, axis: Any, rows: Rows, parts: Mapping[str, Rows], column: str) -> None:
        (x,) = _columns(self.x)
        for index, (name, part) in enumerate(parts.items()):
            values, bars = error_bars(part, column, self.ends)
            look = {"color": f"C{index % 10}", "linestyle": ("-", "--", ":", "-.")[index // 10 % 4]}
            look |= {"marker": "o", "ms": 3, "lw": 1.2, "elinewidth": 0.7, "label": name or None}
            axis.errorbar([row[x] for row in part], values, bars, **look)
        if self.reference and column == _columns(self.y)[0]:
            at = {row[x]: row[self.reference] for row in rows}
            axis.plot(list(at), list(at.values()), "k--", lw=1, label=_words(self.reference))
        axis.set_xlabel(_words(x))
        if "x" in self.log:
            axis.set_xscale("log")


@dataclass(frozen=True, kw_only=True)
class Bars(Lines):
    """A picture of a table: a bar for each value of ``x``, side by side for each ``line``.

    ``reference`` is drawn as short black strokes.
    """

    def _draw(self, axis: Any, rows: Rows, parts: Mapping[str, Rows], column: str) -> None:
        names, width = _kinds(rows, self.x), 0.8 / len(parts)
        for index, (name, part) in enumerate(parts.items()):
            aside = width * (index - (len(parts) - 1) / 2)
            at = [names.index(_at(row, self.x)) + aside for row in part]
            values, bars = error_bars(part, column, self.ends)
            look = {"color": f"C{index % 10}", "label": name or None, "error_kw": {"lw": 0.7}}
            axis.bar(at, values, width, yerr=bars, **look)
            if self.reference and column == _columns(self.y)[0]:
                marks = error_bars(part, self.reference)[0]
                label = None if index else _words(self.reference)
                axis.scatter(at, marks, marker="_", s=90, color="black", zorder=3, label=label)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
