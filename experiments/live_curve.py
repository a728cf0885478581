"""A learning curve in the terminal, with other policies as horizontal lines."""

from __future__ import annotations

import math

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

__all__ = ["Curve"]

FINE = 0.01  # distance from the top, in QoS, at which the scale begins to shrink
COLOURS = ("cyan", "yellow", "magenta", "blue", "red", "white")
NAMES = 28  # columns at the right


class Curve:
    """What rich draws: a curve of points, labelled lines, and grey ones without a label.

    The vertical scale is finest at the top, where the best policies differ by thousandths.

    Attributes:
        points: (decisions, value) pairs in order.
        lines: Values of the policies whose names stand beside their lines.
        others: Values of the policies that are drawn grey.
    """

    def __init__(self, title: str, total: int, height: int = 20) -> None:
        """Begin without points; ``total`` decisions are at the right edge."""
        self.title, self.total, self.height = title, total, height
        self.points: list[tuple[int, float]] = []
        self.lines: dict[str, float] = {}
        self.others: list[float] = []

    def rows(self, width: int) -> list[list[tuple[str, str]]]:
        """Rows from the top, each a list of (text, colour); ``width`` columns in all."""
        values = [*self.lines.values(), *self.others, *(value for _, value in self.points)]
        low, high = min(values, default=0.0), max(values, default=0.0)
        span = math.log1p(max(high - low, 1e-3) / FINE) / (self.height - 1)

        def row_of(value: float) -> int:
            return round(math.log1p((high - value) / FINE) / span)

        drawn = {row_of(value): ("", "bright_black") for value in self.others}
        ranked = sorted(self.lines.items(), key=lambda item: -item[1])
        named: dict[int, list[str]] = {}
        for (name, value), colour in zip(ranked, COLOURS, strict=False):
            at = named.setdefault(row_of(value), [])
            at.append(name)
            drawn[row_of(value)] = ", ".join(at), drawn[row_of(value)][1] if at[1:] else colour
        plot = max(width - 8 - NAMES, 10)
        end = plot - 1
        dots = {(row_of(v), min(round(s / self.total * end), end)) for s, v in self.points}
        result = []
        for row in range(self.height):
            names, colour = drawn.get(row, ("", "default"))
            empty = "─" if names else "┈" if row in drawn else " "
            cells = [(f"{high - FINE * math.expm1(row * span):6.3f} ", "default")]
            dot = ("●", "bold green")
            cells += [dot if (row, column) in dots else (empty, colour) for column in range(plot)]
            short = names if len(names) < NAMES else names[: NAMES - 2] + "…"
            result.append([*cells, (f" {short}", colour)])
        return result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Title, curve and steps."""
        yield Segment(self.title + "\n")
        for row in self.rows(options.max_width):
            yield from (Segment(text, Style.parse(colour)) for text, colour in row)
            yield Segment("\n")
        yield Segment(f"       0 to {self.total:,} decisions\n")
