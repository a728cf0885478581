"""Memory of the remote functions: problem P2 and its dual (Sec. IV-E).

Memory is in GB and prices in USD per GB and second here, as in the paper's convexity check.

For one layer, with ``T(y) = theta1 exp(-theta2 y) + theta3`` seconds of the remote calls of one
token and H the running cost of everything that waits (USD/s), Eq. 13 minimises
``g(y) = (T(y) + t) (H + c y)``, where t is the overhead per expected call. A TPOT multiplier
lambda only adds ``lambda / (1 + eta)`` to H in the derivative, so a layer's minimum has the closed
form of Lambert's W and the dual is a search over one number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryProblem:
    """Problem P2 (Eq. 13) of the layers that have remote experts.

    Attributes:
        theta1: (L,) seconds, of top_k calls.
        theta2: (L,) per GB.
        theta3: (L,) seconds, of top_k calls.
        share: (L,) s, expected share of a token's calls that are remote, above 0.
        overhead_s: (L,) overhead per token (Eq. 12 as printed: trem once a token).
        holding_usd_s: H, cost of what waits (main function), USD/s.
        price_usd_gb_s: c, USD per GB and second.
        lower_gb: (L,) least memory (m_1 and 10e).
        upper_gb: (L,) m_Ve.
        time_limit_s: What the remote calls of one token may take, all layers together.
        eta: Prefill time as a share of decoding time.
        rounded_s: (L,) or a number: what rounding adds to the billed time of a token's remote
            calls; nothing waits for it.
    """

    theta1: Floats
    theta2: Floats
    theta3: Floats
    share: Floats
    overhead_s: Floats
    holding_usd_s: float
    price_usd_gb_s: float
    lower_gb: Floats
    upper_gb: Floats
    time_limit_s: float = np.inf
    eta: float = 0.1
    rounded_s: Floats | float = 0.0

    def time_s(self, gb: Floats) -> Floats:
        """(L,) expected remote time of a token: ``share T(y) + overhead``."""
        law = self.theta1 * np.exp(-self.theta2 * gb) + self.theta3
        return self.share * law + self.overhead_s

    def cost(self, gb: Floats) -> Floats:
        """(L,) terms of the objective: ``(1 + eta) (time (H + c y) + rounded c y)``, USD."""
        memory = self.price_usd_gb_s * gb
        cost = (1.0 + self.eta) * self.time_s(gb) * (self.holding_usd_s + memory)
        return cost + (1.0 + self.eta) * self.rounded_s * memory


def _inner(p: MemoryProblem, multiplier: float) -> Floats:
    """(L,) minimum over the box of ``cost + multiplier time`` of each layer."""
    c = p.price_usd_gb_s
    h = (p.holding_usd_s + multiplier / (1.0 + p.eta)) / c
    rest = p.theta3 + (p.overhead_s + p.rounded_s) / p.share
    # The slope is 0 where u exp(-u) = r, with u = theta2 (y + h) - 1; u > 1 is the convex side.
    tau = p.theta2 * h - 1.0 - np.log(rest / np.maximum(p.theta1, 1e-300))
    u = np.maximum(tau, 1.0)
    u = u + np.sqrt(2.0 * (u - 1.0))
    for _ in range(12):  # Newton from the right of the root of u - ln u = tau: monotone
        u = np.where(u > 1.0, u - (u - np.log(u) - tau) / np.maximum(1.0 - 1.0 / u, 1e-12), u)
        u = np.maximum(u, 1.0)
    root = (u + 1.0) / p.theta2 - h
    low, high = np.asarray(p.lower_gb, float), np.asarray(p.upper_gb, float)
    # With tau <= 1 the slope is nowhere negative. Below the convex side the function is concave,
    # so the lower end can be another local minimum: compare.
    inside = np.where(tau <= 1.0, low, np.clip(root, low, high))

    def value(y: Floats) -> Floats:
        return p.cost(y) + multiplier * p.time_s(y)

    return np.where(value(low) < value(inside), low, inside)


def solve_memory(p: MemoryProblem) -> Floats:
    """Solve the relaxed P2 by its dual (Eq. 14): one TPOT multiplier, found by bisection.

    Returns:
        (L,) memory; the largest where even that misses the time limit.
    """
    gb = _inner(p, 0.0)
    if not gb.size or p.time_s(gb).sum() <= p.time_limit_s:
        return gb
    # A little beyond the end of the box nothing moves any more, whatever the multiplier.
    upper = np.asarray(p.upper_gb, float)
    if p.time_s(upper).sum() >= p.time_limit_s:
        return upper
    low, high = 0.0, max(p.holding_usd_s, p.price_usd_gb_s)
    while p.time_s(_inner(p, high)).sum() > p.time_limit_s:
        low, high = high, 4.0 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if p.time_s(_inner(p, middle)).sum() > p.time_limit_s:
            low = middle
        else:
            high = middle
    return _inner(p, high)


def round_memory(p: MemoryProblem, gb: ArrayLike, grid_gb: ArrayLike) -> Floats:
    """Put each layer on the grid of specifications and repair the time limit.

    Each layer takes the cheaper of its two neighbours that is large enough. While the time limit
    is missed, the layer with the least extra cost per second saved goes one step up.

    Returns:
        (L,) memory on the rising grid (M,), the largest where the limit cannot hold. A layer whose
        lower bound lies above the grid takes the largest specification.
    """
    grid = np.asarray(grid_gb, np.float64)
    y = np.asarray(gb, np.float64)
    least = np.minimum(np.searchsorted(grid, np.asarray(p.lower_gb) - 1e-12), grid.size - 1)
    upper = np.searchsorted(grid, np.asarray(p.upper_gb) + 1e-12) - 1
    most = np.maximum(np.minimum(upper, grid.size - 1), least)
    down = np.clip(np.searchsorted(grid, y + 1e-12) - 1, least, most)
    up = np.clip(down + 1, least, most)
    at = np.where(p.cost(grid[up]) < p.cost(grid[down]), up, down)
    while y.size and p.time_s(grid[at]).sum() > p.time_limit_s * (1.0 + 1e-12):
        higher = np.minimum(at + 1, most)
        saved = p.time_s(grid[at]) - p.time_s(grid[higher])
        extra = p.cost(grid[higher]) - p.cost(grid[at])
        price = np.where(saved > 0.0, extra / np.maximum(saved, 1e-300), np.inf)
        best = int(np.argmin(price))
        if not np.isfinite(price[best]):
            break
        at[best] += 1
    return grid[at]
