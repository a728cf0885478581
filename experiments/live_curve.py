"""A learning curve in the terminal, with other policies as horizontal lines."""

from __future__ import annotations

import math

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

__all__ = ["Curve"]

FINE = 0.01  # distance from the top, in QoS, at which the scale begins to shrink
COLOURS = ("cyan", "yellow", "magenta", "blue", "red", "white")


class Curve:
    """What rich draws: a curve of points, and a labelled line for each policy to compare with.

    The vertical scale is finest at the top, where the best policies differ by thousandths; it holds
    all lines and the best point. Points below it stand on the lowest row.

    Attributes:
        points: (decisions, value) pairs in order.
        lines: Value of each policy to compare with.
    """

    def __init__(self, title: str, total: int, height: int = 20) -> None:
        """Begin without points.

        Args:
            title: Stands above the curve.
            total: Steps at the right edge.
            height: Rows.
        """
        self.title, self.total, self.height = title, total, height
        self.points: list[tuple[int, float]] = []
        self.lines: dict[str, float] = {}

    def rows(self, width: int) -> list[list[tuple[str, str]]]:
        """Rows from the top, each a list of (text, colour); ``width`` columns in all."""
        shown = [*self.lines.values(), *(value for _, value in self.points)]
        low = min(self.lines.values(), default=min(shown, default=0.0))
        high = max([*shown, low + 1e-3])
        span = math.log1p((high - low) / FINE)

        def row_of(value: float) -> int:
            share = math.log1p(max(high - value, 0.0) / FINE) / span
            return min(round(share * (self.height - 1)), self.height - 1)

        labels: dict[int, list[tuple[str, str]]] = {}
        ranked = sorted(self.lines.items(), key=lambda item: -item[1])
        for k, (name, value) in enumerate(ranked):
            labels.setdefault(row_of(value), []).append((name, COLOURS[k % len(COLOURS)]))
        plot = max(width - 8 - 26, 10)  # the scale on the left, the names on the right
        dots: dict[tuple[int, int], str] = {}
        for step, value in self.points:
            column = min(round(step / self.total * (plot - 1)), plot - 1)
            dots[row_of(value), column] = "●" if value >= low else "▼"
        drawn = []
        for row in range(self.height):
            value = high - FINE * math.expm1(row / (self.height - 1) * span)
            here = labels.get(row, [])
            empty, colour = ("─", here[0][1]) if here else (" ", "default")
            cells: list[tuple[str, str]] = [(f"{value:6.3f} ", "default")]
            for column in range(plot):
                dot = dots.get((row, column))
                cells.append((dot, "bold green") if dot else (empty, colour))
            names = ", ".join(name for name, _ in here)
            cells.append((" " + (names if len(names) < 26 else names[:24] + "…"), colour))
            drawn.append(cells)
        return drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Title, curve and steps."""
        yield Segment(self.title + "\n")
        for row in self.rows(options.max_width):
            for text, colour in row:
                yield Segment(text, Style.parse(colour))
            yield Segment("\n")
        yield Segment(f"       0 to {self.total:,} decisions\n")
