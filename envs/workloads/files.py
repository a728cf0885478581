"""Reading the packaged files of this folder, and checking arrays; errors say what to do."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from servegym._files import MalformedFileError, read_json

DATA_DIR = Path(__file__).resolve().parent / "data"


def read_arrays(path: str | os.PathLike[str], fix: str) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file, none of them pickled.

    Raises:
        MalformedFileError: With the advice ``fix``, if it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib, NumPy and a lack of memory share no narrower base
        raise MalformedFileError(path, None, None, f"cannot be read ({error})", fix) from error


@cache
def read_fitted(name: str) -> Any:
    """Contents of a fitted file in ``data``."""
    return read_json(DATA_DIR / name, "reinstall the package")


def frozen(values: Any, dtype: Any) -> np.ndarray:
    """A read-only array in C order, a copy where the given one is none."""
    array = np.asarray(values)
    if array.dtype != dtype or array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, dtype=dtype, order="C")
        array.setflags(write=False)
    return array


def checked(
    name: str,
    values: Any,
    shape: tuple[int, ...],
    low: float | None,
    high: float | None,
    dtype: type,
) -> np.ndarray:
    """The values as a read-only array, whole numbers where ``dtype`` is one of integers.

    They are from ``low`` to ``high``, or what ``dtype`` holds where that is None.

    Raises:
        ValueError: Naming the field and the place of what is wrong.
    """
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, it must be {shape}.")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} has dtype {array.dtype}, it must be numeric.")
    whole = np.issubdtype(dtype, np.integer)
    bad = ~np.isfinite(array)
    problem = "it must be finite"
    if not bad.any() and whole:
        bad = array != np.floor(array)
        problem = "it must be a whole number"
    if not bad.any():
        info = np.iinfo(dtype) if whole else np.finfo(dtype)
        least = info.min if low is None else low
        most = info.max if high is None else high
        bad = (array < least) | (array > most)
        problem = f"it must be in [{least}, {most}]"
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}{list(where)} is {array[where]}, {problem}.")
    return frozen(array, dtype)
