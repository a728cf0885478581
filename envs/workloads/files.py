"""Reading the packaged files of this folder; what cannot be read is refused with the fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from servegym._files import MalformedFileError

DATA_DIR = Path(__file__).resolve().parent / "data"


def read_json(path: str | os.PathLike[str], fix: str) -> Any:
    """Contents of a JSON file.

    Args:
        path: The file.
        fix: What the message advises.

    Raises:
        MalformedFileError: If it cannot be read.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MalformedFileError(path, None, None, f"cannot be read ({error})", fix) from error


def read_arrays(path: str | os.PathLike[str], fix: str) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file, none of them pickled.

    Args:
        path: The file.
        fix: What the message advises.

    Raises:
        MalformedFileError: If it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib, NumPy and a lack of memory share no narrower base
        raise MalformedFileError(path, None, None, f"cannot be read ({error})", fix) from error


def read_fitted(name: str, script: str) -> Any:
    """Contents of a fitted file of the package.

    Args:
        name: The file in ``data``.
        script: Module of ``servegym.envs.workloads.build`` that makes it.

    Raises:
        MalformedFileError: If it cannot be read; says what to run.
    """
    return read_json(DATA_DIR / name, f"run `python -m servegym.envs.workloads.build.{script}`")
