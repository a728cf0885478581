"""Matplotlib without a display, and the look that the pictures of all families share."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["as_png", "error_bars", "legend", "pyplot", "tidy"]


def pyplot() -> Any:
    """matplotlib.pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def tidy(axis: Any) -> None:
    """A light grid and no frame."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def legend(figure: Any, axis: Any, columns: int = 6) -> None:
    """The legend of one panel, below all."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def error_bars(rows: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0) -> Any:
    """Values ``(rows,)`` and bars ``(2, rows)`` of a column and its ``_low`` and ``_high``."""
    values, low, high = (
        scale * np.array([row[f"{key}{end}"] for row in rows], dtype=np.float64)
        for end in ("", "_low", "_high")
    )
    return values, np.maximum([values - low, high - values], 0.0)


def as_png(figure: Any) -> bytes:
    """The picture of a matplotlib figure, which is closed."""
    stream = io.BytesIO()
    figure.savefig(stream, dpi=110, format="png")
    pyplot().close(figure)
    return stream.getvalue()
