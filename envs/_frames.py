"""The picture that every family's frame is drawn on."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled

from servegym._command_line import install_line

WIDTH, HEIGHT = 960, 540
INK, SOFT, PAPER = "#1f2933", "#66788a", "#f5f7fa"
"""Colours of words, of words beside, and of the ground."""


def blank_canvas() -> Any:
    """A matplotlib canvas of `WIDTH` times `HEIGHT` pixels; it has the ``figure``.

    Raises:
        DependencyNotInstalled: If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyNotInstalled(
            f'render_mode="rgb_array" needs matplotlib; {install_line("plots")}'
        ) from error
    return FigureCanvasAgg(Figure((WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=PAPER))


def panel(figure: Any, place: tuple[float, ...], title: str, xlabel: str, **look: Any) -> Any:
    """Axes at a place of the figure, with small words."""
    axis = figure.add_axes(place, facecolor=PAPER)
    axis.set_title(title, loc="left", **{"fontsize": 8.5, "color": INK, "pad": 4} | look)
    axis.tick_params(labelsize=7, colors=SOFT, length=2)
    axis.set_xlabel(xlabel, fontsize=7.5, color=SOFT, labelpad=1)
    return axis


def pixels(canvas: Any) -> np.ndarray:
    """Draw: uint8 (HEIGHT, WIDTH, 3)."""
    canvas.draw()
    return np.array(canvas.buffer_rgba(), dtype=np.uint8)[:, :, :3].copy()
