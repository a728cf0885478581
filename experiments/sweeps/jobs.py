"""The runs of a sweep as processes, each with a log, that can be stopped."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["interrupt_on_sigterm", "lock_sweep", "run_process"]

LOCK = "lock"
"""The file in a folder that is locked."""


@contextmanager
def lock_sweep(folder: Path) -> Iterator[None]:
    """Hold the folder of a sweep.

    Raises:
        ValueError: If another process holds it.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out is {str(folder)!r}, whose sweep another process runs") from None
        yield
    finally:
        os.close(handle)  # unlocks


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM as on Ctrl-C, so that no child outlives its parent."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_process(
    command: Sequence[str], log: Path, stop: Callable[[], bool], poll_s: float, **options: Any
) -> int | None:
    """Run a command to its end, or until it is to stop.

    Args:
        command: The program and its arguments.
        log: File to which the output is appended.
        stop: Called every ``poll_s`` seconds while the process runs; true terminates it.
        poll_s: Seconds between two calls of ``stop``.
        **options: Further arguments of `subprocess.Popen`.

    Returns:
        The exit status, or None if the process was terminated because of ``stop``.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C goes to this process alone, which ends the other
            **options,
        )
        try:
            while True:
                try:
                    return process.wait(poll_s)
                except subprocess.TimeoutExpired:
                    if stop():
                        return None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
