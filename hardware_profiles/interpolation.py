"""Piecewise-linear interpolation of tables; the outermost slopes hold beyond a grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def along(grid: np.ndarray, values: np.ndarray, x: ArrayLike) -> Any:
    """Piecewise-linear values along the last axis; the outermost slopes hold beyond the grid.

    ``grid`` ``(G,)`` is strictly increasing (one point: the same everywhere), ``values`` ``(...,
    G)``; the result is ``(...)`` at a number, a float where no axis is left, else ``(..., K)``.
    """
    at = np.asarray(x, dtype=np.float64)
    if len(grid) == 1:
        return np.repeat(values, len(at), axis=-1)
    # Not `np.clip`, which takes longer than all the rest for a number.
    i = np.minimum(np.maximum(grid.searchsorted(at, side="right") - 1, 0), len(grid) - 2)
    weight = (at - grid[i]) / (grid[i + 1] - grid[i])
    result = values[..., i] + (values[..., i + 1] - values[..., i]) * weight
    return result if result.ndim else float(result)


def bilinear(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, row: float, column: float
) -> float:
    """:func:`along` the columns ``(C,)``, then the rows ``(R,)`` of a table ``(R, C)``."""
    return along(rows, along(columns, values, column), row)


def union(grids: Iterable[np.ndarray]) -> np.ndarray:
    """Union of the grids of several tables: resampling on it is exact. At least two points."""
    grid = np.unique(np.concatenate(list(grids)))
    return grid if len(grid) > 1 else np.array([grid[0], grid[0] + 1.0])
