"""Piecewise-linear interpolation of tables; the outermost slopes hold beyond a grid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike


def interpolate(grid: np.ndarray, values: np.ndarray, x: float) -> float:
    """Piecewise-linear ``values(x)``; the outermost segment's slope holds beyond the grid.

    Args:
        grid: ``(G,)`` strictly increasing, ``G >= 2``.
        values: ``(G,)``.
        x: where to evaluate.
    """
    i = min(max(bisect_right(grid, x) - 1, 0), len(grid) - 2)
    w = (x - grid[i]) / (grid[i + 1] - grid[i])
    return float(values[i] + w * (values[i + 1] - values[i]))


def interpolate_2d(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, row: float, column: float
) -> float:
    """Bilinear ``values(row, column)``; the outermost cell's plane holds beyond the grid.

    Args:
        rows: ``(R,)`` strictly increasing, ``R >= 2``.
        columns: ``(C,)`` strictly increasing, ``C >= 2``.
        values: ``(R, C)``.
        row: where to evaluate along the rows.
        column: where to evaluate along the columns.
    """
    i = min(max(bisect_right(rows, row) - 1, 0), len(rows) - 2)
    w = (row - rows[i]) / (rows[i + 1] - rows[i])
    low = interpolate(columns, values[i], column)
    high = interpolate(columns, values[i + 1], column)
    return float(low + w * (high - low))


def along(grid: np.ndarray, values: np.ndarray, x: ArrayLike) -> np.ndarray:
    """Piecewise-linear values ``(..., K)`` at several points.

    Args:
        grid: ``(G,)`` strictly increasing; with one point the values are the same everywhere.
        values: ``(..., G)``.
        x: ``(K,)`` where to evaluate.
    """
    at = np.asarray(x, dtype=np.float64)
    if len(grid) == 1:
        return np.repeat(values, len(at), axis=-1)
    i = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    weight = (at - grid[i]) / (grid[i + 1] - grid[i])
    return values[..., i] + (values[..., i + 1] - values[..., i]) * weight


def union(grids: Iterable[np.ndarray]) -> np.ndarray:
    """Union of the grids of several tables: resampling on it is exact. At least two points."""
    grid = np.unique(np.concatenate(list(grids)))
    return grid if len(grid) > 1 else np.array([grid[0], grid[0] + 1.0])
