"""The cache of compiled functions on disk: what a process takes from it is what it asked for.

The states of the files in the first tests are those that processes leave each other when one
writes an index and another one the data.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
from servegym.envs._jit import inline, jit

@inline
def bytes_of(x):
    return x.itemsize

@jit
def describe(x):
    return {factor} * bytes_of(x) + x.ndim
"""

CALLS = """
import random, sys
import numpy as np
import mine
cases = [(kind, ndim) for kind in sys.argv[2:] for ndim in (1, 2)]
random.Random(int(sys.argv[1])).shuffle(cases)
found = {(kind, ndim): mine.describe(np.zeros((2,) * ndim, kind)) for kind, ndim in cases}
stats = getattr(mine.describe, "stats", None)
print(*(found[case] for case in sorted(found)), sum(stats.cache_hits.values()))
"""

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"), reason="nothing is compiled"
)


def write(folder: Path, factor: int, time_s: int) -> None:
    (folder / "mine.py").write_text(SOURCE.format(factor=factor))
    os.utime(folder / "mine.py", (time_s, time_s))


def start(folder: Path, seed: int, *kinds: str) -> subprocess.Popen[str]:
    """A process that calls the function with arrays of one and two dimensions of every kind."""
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    settings["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return subprocess.Popen(
        [sys.executable, "-c", CALLS, str(seed), *kinds],
        env=settings,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def numbers(process: subprocess.Popen[str]) -> list[int]:
    """What it found, in the order of kinds and dimensions, and how much of it was in the cache."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return [int(word) for word in out.split()]


def data_files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("mine.describe*.nbc"))


def test_what_is_in_the_cache_is_not_compiled_again(tmp_path):
    write(tmp_path, 10, 1_000_000_000)
    assert numbers(start(tmp_path, 0, "f8")) == [81, 82, 0]
    assert len(data_files(tmp_path)) == 2
    assert numbers(start(tmp_path, 1, "f8")) == [81, 82, 2]


def test_data_of_another_signature_is_not_taken(tmp_path):
    write(tmp_path, 10, 1_000_000_000)
    numbers(start(tmp_path, 0, "f4", "f8"))
    files = data_files(tmp_path)
    held = [file.read_bytes() for file in files]
    for file, data in zip(files, held[1:] + held[:1], strict=True):
        file.write_bytes(data)
    assert numbers(start(tmp_path, 0, "f4", "f8")) == [41, 42, 81, 82, 0]
    assert numbers(start(tmp_path, 0, "f4", "f8")) == [41, 42, 81, 82, 4], "mended"


def test_data_from_before_a_change_of_the_source_is_not_taken(tmp_path):
    write(tmp_path, 10, 1_000_000_000)
    numbers(start(tmp_path, 0, "f4", "f8"))
    before = {file: file.read_bytes() for file in data_files(tmp_path)}
    write(tmp_path, 20, 1_000_000_060)
    assert numbers(start(tmp_path, 0, "f4", "f8")) == [81, 82, 161, 162, 0]
    assert set(before) == set(data_files(tmp_path)), "numba gives a new source the old names"
    for file, data in before.items():
        file.write_bytes(data)
    assert numbers(start(tmp_path, 0, "f4", "f8")) == [81, 82, 161, 162, 0]


def test_four_processes_fill_one_cache_in_any_order(tmp_path):
    kinds = ("f4", "f8", "i2", "i8", "u1")
    right = [10 * int(kind[1]) + ndim for kind in kinds for ndim in (1, 2)]
    write(tmp_path, 10, 1_000_000_000)
    for process in [start(tmp_path, seed, *kinds) for seed in range(4)]:
        assert numbers(process)[:-1] == right
    write(tmp_path, 20, 1_000_000_060)
    twice = [20 * int(kind[1]) + ndim for kind in kinds for ndim in (1, 2)]
    for process in [start(tmp_path, seed, *kinds) for seed in range(4)]:
        assert numbers(process)[:-1] == twice
