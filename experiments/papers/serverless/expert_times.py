"""Time of one mixture-of-experts expert on one CPU, through numpy.

It is taken in a process of its own, because a BLAS library reads its number of threads when it is
loaded; the process is pinned to one processor. Weights are drawn at random, in float32, and enough
copies are used in turn that they do not stay in the cache.

Times are wall time. On a shared machine the least of many runs is what to fit.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from servegym.hardware_profiles.measure.timing import repeat

# Weights that are used in turn together exceed any cache.
_WORKING_SET_BYTES = 512 * 2**20

SHAPES = {
    "deepseek-v2-lite": (2048, 1408, 3),
    "gpt-oss-20b": (2880, 2880, 3),
    "gpt2-moe": (768, 3072, 2),
    "mixtral-8x7b": (4096, 14336, 3),
    "qwen3-30b-a3b": (2048, 768, 3),
    "tiny": (64, 128, 3),
}
"""Width of the model, width inside the expert, and the expert's matrices: 3 for a gated expert
(SwiGLU), 2 for a plain one (GELU)."""


def forward(x: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
    """The expert: ``(n, hidden)`` to ``(n, hidden)``; SwiGLU with three matrices, else GELU."""
    inner = x @ weights[0]
    if len(weights) == 3:
        inner = inner / (1.0 + np.exp(-inner)) * (x @ weights[1])
    else:
        inner = 0.5 * inner * (1.0 + np.tanh(0.7978845608 * (inner + 0.044715 * inner**3)))
    return inner @ weights[-1]


@functools.lru_cache(1)
def _weights(name: str) -> list[list[np.ndarray]]:
    hidden, inside, matrices = SHAPES[name]
    shapes = [(hidden, inside)] * (matrices - 1) + [(inside, hidden)]
    copies = _WORKING_SET_BYTES // (4 * hidden * inside * matrices)
    rng, scale = np.random.default_rng(0), np.float32(0.02)
    return [
        [rng.standard_normal(shape, np.float32) * scale for shape in shapes]
        for _ in range(max(1, min(64, copies)))
    ]


def _least_seconds(name: str, tokens: int, seconds: float) -> float:
    x = np.random.default_rng(1).standard_normal((tokens, SHAPES[name][0]), np.float32)
    turns = itertools.cycle(_weights(name))

    def once() -> float:
        weights = next(turns)
        start = time.perf_counter()
        forward(x, weights)
        return time.perf_counter() - start

    return float(repeat(once, warm_up=3, repeats=10**6, seconds=seconds)[0])


def _pin() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def least_seconds(names: Sequence[str], tokens: Sequence[int], seconds: float) -> list[np.ndarray]:
    """Least seconds of experts' passes over so many tokens on one processor, float32.

    Args:
        names: Names in `SHAPES`.
        tokens: Tokens of a call, one number a point.
        seconds: Time after which a point is not repeated any more; at least three runs.
    """
    before = dict(os.environ)
    # Read when the library is loaded.
    os.environ.update({f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "BLIS")})
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), _pin) as pool:
            jobs = [[pool.submit(_least_seconds, x, n, seconds) for n in tokens] for x in names]
            return [np.array([job.result() for job in row]) for row in jobs]
    finally:
        os.environ.clear()
        os.environ.update(before)
