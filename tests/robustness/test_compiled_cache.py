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

MODULES = {
    "__init__": "from mine.kernel.describe import describe",
    "size": """
from servegym._jit import jit

@jit
def size(x):
    return {factor} * x.itemsize
""",
    "describe": """
from mine.kernel.size import size
from servegym._jit import inline, jit

@inline
def dimensions(x):
    return x.ndim

@jit
def describe(x):
    return size(x) + dimensions(x)
""",
}
"""The files of a package ``kernel``, where one function's code stands in another one's file."""

CALLS = """
import random, sys
import numpy as np
import mine
cases = [(kind, ndim) for kind in sys.argv[2:] for ndim in (1, 2)]
random.Random(int(sys.argv[1])).shuffle(cases)
found = {(kind, ndim): mine.describe(np.zeros((2,) * ndim, kind)) for kind, ndim in cases}
print(*(found[case] for case in sorted(found)), sum(mine.describe.stats.cache_hits.values()))
"""

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"), reason="nothing is compiled"
)


def write(folder: Path, factor: int) -> None:
    package = folder / "mine" / "kernel"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "mine" / "__init__.py").write_text("from mine.kernel import describe")
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(text.format(factor=factor))


def start(folder: Path, seed: float, *kinds: str, code: str = CALLS) -> subprocess.Popen[str]:
    """A process that calls the function with arrays of one and two dimensions of every kind."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(seed), *kinds],
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


@pytest.mark.slow
def test_data_of_another_signature_is_not_taken(tmp_path):
    write(tmp_path, 10)
    numbers(start(tmp_path, 0, "f4", "f8"))
    files = sorted((tmp_path / "cache").rglob("describe.describe*.nbc"))
    held = [file.read_bytes() for file in files]
    for file, data in zip(files, held[1:] + held[:1], strict=True):
        file.write_bytes(data)
    assert numbers(start(tmp_path, 0, "f4", "f8")) == [41, 42, 81, 82, 0]
    assert numbers(start(tmp_path, 0, "f4", "f8")) == [41, 42, 81, 82, 4], "mended"


DAMAGES = {
    "overwritten": lambda data: data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :],
    "cut": lambda data: data[:100],
    "emptied": lambda data: b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", ["nbc", "nbi"])
def test_broken_files_are_compiled_anew(tmp_path, ending, damage):
    write(tmp_path, 10)
    numbers(start(tmp_path, 0, "f8"))
    files = list((tmp_path / "cache").rglob(f"*.{ending}"))
    assert files
    for file in files:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    for process in [start(tmp_path, seed, "f8") for seed in range(2)]:  # side by side
        assert numbers(process)[:-1] == [81, 82]
    assert numbers(start(tmp_path, 0, "f8")) == [81, 82, 2], "mended"


FULL = (
    """
import resource, signal, sys
from servegym import _jit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (900, resource.RLIM_INFINITY))
"""
    + CALLS
)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_told_and_done_without(tmp_path):
    write(tmp_path, 10)
    process = start(tmp_path, 0, "f8", code=FULL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.split() == ["81", "82", "0"]
    assert f"servegym: {tmp_path / 'cache'}" in err and "compiled code cannot be kept" in err


AHEAD = """
import sys
import numpy as np
from servegym import _jit
import mine
_jit.NOTICE_AFTER_S = float(sys.argv[1])
for _ in range(2):
    _jit.compile_kernels("toy engine", [(mine.describe, (np.zeros(3),))])
before = len(mine.describe.overloads)
assert mine.describe(np.ones(2)) == 81
print(before, len(mine.describe.overloads), int("numba.np.arraymath" in sys.modules))
"""


def test_functions_compile_ahead_of_their_call_and_only_compiling_is_told(tmp_path):
    write(tmp_path, 10)
    for lines in (1, 0):  # the second process loads what the first one compiled, and no more
        process = start(tmp_path, 0.001, code=AHEAD)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert out.split() == ["1", "1", str(lines)]
        assert err.count("\n") == err.count("toy engine") == lines


@pytest.mark.slow
def test_four_processes_fill_one_cache_in_any_order(tmp_path):
    kinds = ("f4", "f8", "i2", "i8", "u1")
    right = [10 * int(kind[1]) + ndim for kind in kinds for ndim in (1, 2)]
    write(tmp_path, 10)
    for process in [start(tmp_path, seed, *kinds) for seed in range(4)]:
        assert numbers(process)[:-1] == right
    write(tmp_path, 20)
    twice = [20 * int(kind[1]) + ndim for kind in kinds for ndim in (1, 2)]
    for process in [start(tmp_path, seed, *kinds) for seed in range(4)]:
        assert numbers(process)[:-1] == twice
