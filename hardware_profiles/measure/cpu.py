"""Time of one mixture-of-experts expert on a CPU, through numpy.

Every number of threads gets a process of its own, because a BLAS library reads it when it is
loaded; the process is pinned to as many processors. Weights are drawn at random, in float32, and
enough copies are used in turn that they do not stay in the cache.

Times are wall time: processor time adds up over the threads, and it is the wait for the slowest of
them that more threads shorten. On a shared machine the least of many runs is what to fit; that is
the column ``ms_min``. The quartile and the median show how busy the machine was.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from servegym._checks import real
from servegym._command_line import run_main
from servegym.hardware_profiles.load import unknown_name
from servegym.hardware_profiles.measure.table import ResumableTable
from servegym.hardware_profiles.measure.timing import progress, repeat, whole_numbers

COLUMNS = (
    "model",
    "threads",
    "tokens",
    "expert_params",
    "ms_min",
    "ms_p25",
    "ms_median",
    "repeats",
)
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
    """Sorted seconds of an expert's pass over so many tokens; see :func:`measure`."""
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


def measure(
    out: str | os.PathLike[str],
    *,
    models: Sequence[str],
    threads: Sequence[int] = (1,),
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    repeats: int = 100,
    seconds: float = 2.0,
    memory_bytes: int = 2 * 2**30,
) -> int:
    """Time experts and append the rows to a CSV file; points that are in it are left out.

    Args:
        out: CSV file: model, threads, tokens, expert_params, ms_min, ms_p25, ms_median, repeats.
        models: Names of ``SHAPES``.
        threads: Numbers of threads; the process is pinned to as many processors.
        tokens: Tokens that the expert gets in one call.
        repeats: Most runs of a point, after 3 for warming up.
        seconds: Time after which a point is not repeated any more.
        memory_bytes: Most memory for weights.

    Returns:
        Points measured now.

    Raises:
        ValueError: For a bad argument, or an expert that does not fit in the memory.
    """
    for name in models:
        if name not in SHAPES:
            raise ValueError(unknown_name("model", name, list(SHAPES)))
        if 4 * SHAPES[name].parameters > memory_bytes:
            raise ValueError(
                f"memory is {memory_bytes / 2**30:.2g} GB; one expert of {name} takes "
                f"{4 * SHAPES[name].parameters / 2**30:.2g} GB"
            )
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if max(threads) > (available or 1):
        raise ValueError(f"threads is {max(threads)}; this machine gives us {available} processors")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be >= 1")
    real("seconds", seconds, 0.0, open_low=True)
    table = ResumableTable(out, COLUMNS, ("model", "threads", "tokens"))
    missing = {
        count: [(m, n) for m in models for n in tokens if (m, count, n) not in table]
        for count in threads
    }
    total = sum(map(len, missing.values()))
    with progress(total, "cpu-expert") as step:
        for count, points in missing.items():
            with process_of(count) as pool:
                for name, n in points:
                    job = pool.submit(time_expert, name, n, repeats, seconds, memory_bytes)
                    try:
                        times = job.result()
                    except (BrokenProcessPool, MemoryError):
                        raise ValueError(
                            f"measuring with {count} threads failed (out of memory? lower "
                            "--memory-gb)"
                        ) from None
                    spread = (times[0], times[len(times) // 4], np.median(times))
                    facts = (name, count, n, SHAPES[name].parameters)
                    cells = (*facts, *(f"{1e3 * value:.5g}" for value in spread), len(times))
                    table.add(dict(zip(COLUMNS, cells, strict=True)))
                    step(f"{name}, {n} tokens: {1e3 * times[0]:.3g} ms")
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; `ValueError` names what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="servegym measure cpu-expert",
        description="Time one expert's feed-forward pass on this CPU: pinned, warm, repeated.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("expert_ffn_ms.csv"), help="CSV file to write or go on")
    add("--model", action="append", help=f"shape, repeatable: {', '.join(SHAPES)}")
    add("--threads", default="1", help="numbers of threads, such as 1,2,4")
    add("--tokens", default="1,2,4,8,16,32,64,128,256", help="tokens in one call")
    add("--repeats", type=int, default=100, help="most runs of a point")
    add("--seconds", type=float, default=2.0, help="longest time for the runs of a point")
    add("--memory-gb", type=float, default=2.0, help="most memory for weights")
    options = parser.parse_args(arguments)
    models = options.model or [name for name in SHAPES if name != "tiny"]
    measured = measure(
        options.out,
        models=models,
        threads=whole_numbers("threads", options.threads),
        tokens=whole_numbers("tokens", options.tokens),
        repeats=options.repeats,
        seconds=options.seconds,
        memory_bytes=int(real("memory-gb", options.memory_gb, 0.0, open_low=True) * 2**30),
    )
    print(f"{measured} points measured, {options.out}")
    return 0


if __name__ == "__main__":
    run_main(main)
