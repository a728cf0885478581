"""The picture that every family's frame is drawn on."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled

from servegym._command_line import install_line

__all__ = ["HEIGHT", "WIDTH", "blank_canvas", "pixels"]

WIDTH, HEIGHT = 960, 540


def blank_canvas(paper: str) -> Any:
    """A matplotlib canvas of `WIDTH` times `HEIGHT` pixels in one colour; it has the ``figure``.

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
    return FigureCanvasAgg(Figure((WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=paper))


def pixels(canvas: Any) -> np.ndarray:
    """What was drawn, uint8 (HEIGHT, WIDTH, 3)."""
    return np.array(canvas.buffer_rgba(), dtype=np.uint8)[:, :, :3].copy()
