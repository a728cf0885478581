"""The command line that the modules fitting traces share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from servegym._files import measured_data
from servegym.envs.workloads.files import DATA_DIR


def fit_arguments(
    doc: str | None, name: str, traces: Sequence[str], argv: list[str] | None
) -> tuple[list[Path], Path]:
    """Command line of a script that fits traces.

    Args:
        doc: The script's docstring.
        name: The file in ``data`` that it writes by default; the folder itself if empty.
        traces: The traces, below the folder that ``--data`` or ``$SERVEGYM_DATA`` names.
        argv: Arguments; those of the process if None.

    Returns:
        The traces' paths and what to write; the process ends where a trace is missing.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=measured_data(), help="folder of the traces")
    parser.add_argument("--out", type=Path, default=DATA_DIR / name)
    args = parser.parse_args(argv)
    if args.data is None:
        parser.error("give --data FOLDER, or set SERVEGYM_DATA to it")
    paths = [args.data / trace for trace in traces]
    for path in paths:
        if not path.is_file():
            parser.error(f"{path} is missing")
    return paths, args.out
