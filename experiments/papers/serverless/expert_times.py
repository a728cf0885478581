"""Time of one mixture-of-experts expert on a CPU, through numpy.

Every number of threads gets a process of its own, because a BLAS library reads it when it is
loaded; the process is pinned to as many processors. Weights are drawn at random, in float32, and
enough copies are used in turn that they do not stay in the cache.

Times are wall time: processor time adds up over the threads, and it is the wait for the slowest of
them that more threads shorten. On a shared machine the least of many runs is what to fit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from servegym.hardware_profiles.measure.timing import repeat

# Weights that are used in turn together exceed any cache.
_WORKING_SET_BYTES = 512 * 2**20


@dataclass(frozen=True)
class ExpertShape:
    """Shape of one expert.

    Attributes:
        hidden: Width of the model.
        intermediate: Width inside the expert.
        matrices: 3 for a gated expert (SwiGLU), 2 for a plain one (GELU).
    """

    hidden: int
    intermediate: int
    matrices: int = 3

    @property
    def parameters(self) -> int:
        """Weights of one expert."""
        return self.hidden * self.intermediate * self.matrices


SHAPES = {
    "deepseek-v2-lite": ExpertShape(2048, 1408),
    "gpt-oss-20b": ExpertShape(2880, 2880),
    "gpt2-moe": ExpertShape(768, 3072, 2),
    "mixtral-8x7b": ExpertShape(4096, 14336),
    "qwen3-30b-a3b": ExpertShape(2048, 768),
    "tiny": ExpertShape(64, 128),
}


def forward(x: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
    """The expert: ``(n, hidden)`` to ``(n, hidden)``; SwiGLU with three matrices, else GELU."""
    inner = x @ weights[0]
    if len(weights) == 3:
        inner = inner / (1.0 + np.exp(-inner)) * (x @ weights[1])
    else:
        inner = 0.5 * inner * (1.0 + np.tanh(0.7978845608 * (inner + 0.044715 * inner**3)))
    return inner @ weights[-1]


@functools.lru_cache(1)
def _weights(name: str, memory_bytes: int) -> list[list[np.ndarray]]:
    shape, rng = SHAPES[name], np.random.default_rng(0)
    copies = min(_WORKING_SET_BYTES, memory_bytes) // (4 * shape.parameters)
    wide = (shape.hidden, shape.intermediate)
    return [
        [
            rng.standard_normal(wide if i < shape.matrices - 1 else wide[::-1], np.float32)
            * np.float32(0.02)
            for i in range(shape.matrices)
        ]
        for _ in range(max(1, min(64, copies)))
    ]


def time_expert(
    name: str, tokens: int, repeats: int, seconds: float, memory_bytes: int = 2 * 2**30
) -> np.ndarray:
    """Sorted seconds of an expert's pass over so many tokens.

    Args:
        name: Name in `SHAPES`.
        tokens: Tokens that the expert gets in one call.
        repeats: Most runs, after 3 for warming up.
        seconds: Time after which no further run starts.
        memory_bytes: Most memory for weights.
    """
    x = np.random.default_rng(1).standard_normal((tokens, SHAPES[name].hidden), np.float32)
    turns = itertools.cycle(_weights(name, memory_bytes))

    def once() -> float:
        weights = next(turns)
        start = time.perf_counter()
        forward(x, weights)
        return time.perf_counter() - start

    return repeat(once, warm_up=3, repeats=repeats, seconds=seconds)


def _pin(threads: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[-threads:]))


@contextlib.contextmanager
def process_of(threads: int) -> Iterator[ProcessPoolExecutor]:
    """A process whose linear algebra has so many threads, pinned to as many processors."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(threads)))  # read when the library is loaded
    try:
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=_pin, initargs=(threads,)
        ) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
