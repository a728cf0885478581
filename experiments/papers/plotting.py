"""Pictures of tables, drawn by matplotlib without a display: lines and bars by column names."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

UNITS = {"s": "s", "ms": "ms", "ms_per_token": "ms/token"}
AXES = {
    "age_s": "age of the request, s",
    "avg_qos": "average QoS, 0 to 1",
    "b": "b, share of remote MoE experts",
    "bin_low": "score, 0 to 1, or output tokens",
    "ceiling": "ceiling",
    "drop_rate": "dropped, share of requests",
    "entropy": "entropy over its maximum",
    "experts": "number of experts",
    "gpus": "number of GPUs",
    "holds": "share of cases where it holds",
    "js_bits": "JS divergence, bit",
    "layer": "number of the layer",
    "limit_ms": "latency requirement, ms/token",
    "local_calls": "local calls, share",
    "local_tokens": "local tokens, share",
    "mbps": "bandwidth, Mbit/s",
    "mean_reward": "reward a request, costs of MIX",
    "memory_fraction": "memory, share of all experts' size",
    "memory_use": "KV memory in use, share",
    "minute": "time, min",
    "ms": "time, ms",
    "n_out": "output tokens, number",
    "over_mix": "cost, times that of MIX",
    "pcie_gb_s": "PCIe, GB/s",
    "prefill_over_decode": "prefill over decode time, ratio",
    "prompt_tokens": "prompt tokens, number",
    "qos": "QoS, 0 to 1",
    "rate": "arrival rate, requests/s",
    "remote_share": "remote tokens, share",
    "requests": "arrivals, requests/s",
    "requests_per_s": "arrivals, requests/s",
    "share": "share of answers",
    "top_share": "most used expert, share of tokens",
    "usd_per_1000": "USD for 1,000 requests",
}
"""Labels of the columns whose names do not end in a unit."""
WIDE = 2
"""Panels that stand side by side: a page of the documentation shows no more at a readable size."""
DENSE = 15
"""From so many points on a line has a band in place of marks and bars."""

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

    ``ends`` are by default the columns ``key`` with ``_low`` and ``_high``; rows without have bars
    0.
    """
    low, high = ends or (f"{key}_low", f"{key}_high")

    def numbers(column: str) -> Any:
        cells = [row.get(column, row[key]) for row in rows]
        return np.array([np.nan if cell == "" else cell for cell in cells], dtype=np.float64)

    values = numbers(key)
    return values, np.maximum([values - numbers(low), numbers(high) - values], 0.0)


def as_png(figure: Any) -> bytes:
    """The picture of a matplotlib figure, which is closed."""
    stream = io.BytesIO()
    figure.savefig(stream, dpi=110, format="png")
    pyplot().close(figure)
    return stream.getvalue()


def label_ends(axis: Any, ends: Mapping[str, float], colours: Mapping[str, str]) -> None:
    """Names at the right, moved apart where the lines end close to one another."""
    names, place = sorted(ends, key=lambda name: ends[name]), axis.get_yaxis_transform()
    heights, gap = [ends[name] for name in names], np.ptp(axis.get_ylim()) / 20
    for k in [*range(1, len(names))] * 50:
        push = max(gap - heights[k] + heights[k - 1], 0) / 2
        heights[k - 1], heights[k] = heights[k - 1] - push, heights[k] + push
    for name, height in zip(names, heights, strict=True):
        colour = colours[name]
        arrow = {"color": colour, "linewidth": 0.6, "arrowstyle": "-", "relpos": (0, 0.5)}
        at: dict[str, Any] = {"xycoords": place, "textcoords": place, "arrowprops": arrow}
        axis.annotate(name, (1, ends[name]), (1.06, height), color=colour, va="center", **at)
    axis.spines[["top", "right"]].set_visible(False)


def decisions_axis(axis: Any, decisions: Sequence[int]) -> None:
    """Decisions from 0 on as the x axis, on a log scale where the first points are crowded."""
    first, scale = min((count for count in decisions if count > 0), default=1), ""
    if max(decisions, default=0) > 50 * first:
        axis.set_xscale("symlog", linthresh=first, linscale=0.5)
        scale = f" (log scale from {first:,} on)"
    axis.set(xlabel=f"decisions of the training{scale}", xlim=(0, None))
    axis.xaxis.set_major_formatter("{x:,.0f}")


def _columns(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def words(column: str) -> str:
    """A column as the label of an axis: ``mean_latency_s`` as ``mean latency, s``."""
    if column in AXES:
        return AXES[column]
    ends = [unit for unit in UNITS if column.endswith(f"_{unit}")]
    if not ends:
        return column.replace("_", " ")
    unit = max(ends, key=len)
    return f"{column.removesuffix(f'_{unit}').replace('_', ' ')}, {UNITS[unit]}"


def _at(row: Mapping[str, Any], names: Names) -> str:
    """What a row has in some columns, numbers with the names of theirs."""
    parts = []
    for column in _columns(names):
        value, (name, comma, unit) = row[column], words(column).rpartition(", ")
        if not isinstance(value, str):
            value = f"{name} {value:g} {unit}" if comma else f"{unit} {value:g}"
        parts.append(value)
    return ", ".join(part for part in parts if part)


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
        labels: Labels of columns that have other ones here than in `AXES`.
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
    labels: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, rows: Rows) -> Any:
        """The matplotlib figure of a table's rows."""
        rows = [row for row in rows if self.where is None or self.where(row)]
        y, panels, lines = _columns(self.y), _kinds(rows, self.panels), _kinds(rows, self.line)
        pairs = [(panel, column) for column in y for panel in panels]
        wide = min(WIDE, len(pairs) if 1 in (len(y), len(panels)) else len(panels))
        high = -(-len(pairs) // wide)
        size = (max(4.2 * wide, 6.0), 3.2 * high + 0.25 * (1 + len(lines) // 3))
        figure, axes = pyplot().subplots(
            high, wide, figsize=size, squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(pairs) :]:
            axis.set_visible(False)
        for axis, (panel, column) in zip(axes.flat, pairs, strict=False):
            shown = [row for row in rows if _at(row, self.panels) == panel]
            parts = [[row for row in shown if _at(row, self.line) == one] for one in lines]
            self._draw(axis, shown, dict(zip(lines, parts, strict=True)), column)
            axis.set_title(panel, fontsize=10)
            axis.set_ylabel(self._label(column))
            if "y" in self.log:
                axis.set_yscale("log")
            if self.level is not None:
                axis.axhline(self.level, color="black", linewidth=0.9, linestyle=":")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        legend(figure, axes[0, 0])
        return figure

    def _label(self, column: str) -> str:
        return self.labels.get(column) or words(column)

    def _draw(self, axis: Any, rows: Rows, parts: Mapping[str, Rows], column: str) -> None:
        (x,) = _columns(self.x)
        for index, (name, part) in enumerate(parts.items()):
            values, bars = error_bars(part, column, self.ends)
            look = {"color": f"C{index % 10}", "linestyle": ("-", "--", ":", "-.")[index // 10 % 4]}
            look |= {"lw": 1.2, "label": name or None}
            at = [row[x] for row in part]
            if len(at) < DENSE:
                axis.errorbar(at, values, bars, marker="o", ms=3, elinewidth=0.7, **look)
            else:
                axis.plot(at, values, **look)
                axis.fill_between(at, values - bars[0], values + bars[1], alpha=0.15, lw=0)
        if self.reference and column == _columns(self.y)[0]:
            level = {row[x]: row[self.reference] for row in rows}
            axis.plot(
                list(level), list(level.values()), "k--", lw=1, label=self._label(self.reference)
            )
        axis.set_xlabel(self._label(x))
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
                label = None if index else self._label(self.reference)
                axis.scatter(at, marks, marker="_", s=90, color="black", zorder=3, label=label)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
