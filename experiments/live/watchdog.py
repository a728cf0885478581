"""Keeps one server: ends all its processes when it ends, or when whoever started it is gone.

Run as a script with a command; standard input is a pipe that closes when the process that holds
the other end dies, however it dies. The server and all that it started are ended then. Only the
standard library is used, so that any interpreter can run the file.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3.0


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has died before
        os._exit(1)


def _children() -> list[int]:
    """Processes below this one, orphans of the server among them."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(pid) for pid in listing.split()]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the server, then whatever it left behind."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
    while left := _children():
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        time.sleep(0.01)


def main(arguments: list[str]) -> int:
    """Keep the command ``arguments`` until it ends or the pipe closes; its exit status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    here = os.getpid()
    child = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, preexec_fn=lambda: _die_with(here)
    )
    while child.poll() is None:
        ready, _, _ = select.select([0, wake], [], [], 1.0)
        if 0 in ready:
            break
        if wake in ready and any(n != signal.SIGCHLD for n in os.read(wake, 64)):
            break
    _end(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
