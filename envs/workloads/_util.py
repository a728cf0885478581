"""Small functions shared by the workload modules."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from servegym.envs._checks import real
from servegym.envs.workloads.errors import MalformedFileError

DATA_DIR = Path(__file__).resolve().parent / "data"


def unknown_name(argument: str, given: object, allowed: Iterable[str]) -> ValueError:
    """ValueError for a name that is not one of ``allowed``, with the nearest valid one."""
    names = list(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{argument}={given!r} is not one of {names}.{hint}")


def reject_unknown_kwargs(owner: str, kwargs: dict[str, Any], allowed: Iterable[str]) -> None:
    """Raise ValueError naming the first keyword of ``kwargs`` that ``owner`` does not take."""
    names = list(allowed)
    for key in kwargs:
        if key not in names:
            error = unknown_name("keyword", key, names)
            raise ValueError(f"{owner}: {error}")


def positive(argument: str, value: Any) -> float:
    """Return ``value`` as a finite float > 0, else ValueError."""
    return real(argument, value, 0.0, open_low=True)


def write_atomic(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary one in the same folder, so that none is ever half there."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
        # mkstemp makes the file private to its owner; give it the usual mode of a new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write ``content`` as indented JSON, atomically."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomic(path, lambda stream: stream.write(text.encode()))


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
        script: Module of this package that makes it.

    Raises:
        MalformedFileError: If it cannot be read; says what to run.
    """
    path = DATA_DIR / name
    return read_json(path, f"run `python -m servegym.envs.workloads.{script}`")


def fit_arguments(
    doc: str | None, name: str, traces: Sequence[str], argv: list[str] | None
) -> tuple[list[Path], Path]:
    """Command line of a script that fits traces.

    Args:
        doc: The script's docstring.
        name: The file in ``data`` that it writes by default.
        traces: The traces, below the folder that ``--data`` or ``$SERVEGYM_DATA`` names.
        argv: Arguments; those of the process if None.

    Returns:
        The traces' paths and the file to write; the process ends where a trace is missing.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=data_file(), help="folder of the traces")
    parser.add_argument("--out", type=Path, default=DATA_DIR / name)
    args = parser.parse_args(argv)
    if args.data is None:
        parser.error("give --data FOLDER, or set SERVEGYM_DATA to it")
    paths = [args.data / trace for trace in traces]
    for path in paths:
        if not path.is_file():
            parser.error(f"{path} is missing")
    return paths, args.out


def data_file(*parts: str) -> Path | None:
    """Path of a measured file below ``$SERVEGYM_DATA``, or None when the variable is not set."""
    root = os.environ.get("SERVEGYM_DATA")
    return Path(root).joinpath(*parts) if root else None
