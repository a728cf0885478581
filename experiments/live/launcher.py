"""Start the servers of a fleet, watch over them and end them (Linux).

Every server has a watchdog (:mod:`~servegym.experiments.live.watchdog`) that ends it together with
the process that started it, also when that process is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from servegym._command_line import install_line, run_main
from servegym._files import locked, write_text
from servegym.experiments.live import fleet_file, llama_server, watchdog
from servegym.experiments.live.models import make_model
from servegym.hardware_profiles import load

START_S = {"llama.cpp": 60.0, "vllm": 300.0, "simulated": 180.0}
"""Seconds that an engine may take until it is healthy."""
ENDPOINTS = "endpoints.json"
_SUPERVISOR = "supervisor.json"
_READY = b"\0"


def healthy(endpoint: fleet_file.Endpoint, timeout_s: float = 2.0) -> bool:
    """Whether ``/health`` of a server answers with status 200."""
    url = endpoint.url.removesuffix("/v1") + "/health"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return response.status == 200
    except (OSError, ValueError):
        return False


def _port(spec: fleet_file.ServerSpec) -> int:
    """The server's port, or a free one; one that is in use is refused."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((spec.host, spec.port))
        except OSError as error:
            raise ValueError(
                f"server {spec.name!r}: port {spec.port} of {spec.host} cannot be used: "
                f"{error.strerror}"
            ) from None
        return probe.getsockname()[1]


def _tail(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    end = " | ".join(line.strip() for line in text.splitlines()[-5:]) or "nothing"
    full = shutil.disk_usage(path.parent).free < 1 << 20
    return f"{end}; the disk of {path.parent} is full" if full else end


def _hold(folder: Path) -> BinaryIO:
    """Hold a folder for the servers of one fleet; refuse one that another holds."""
    folder.mkdir(parents=True, exist_ok=True)
    return locked(folder / "lock", f"{folder}: servers run there; `servegym real down` ends them")


def _wait(endpoint: fleet_file.Endpoint, keeper: subprocess.Popen[bytes]) -> None:
    """Wait until a server is healthy; refuse one that ends or takes too long."""
    limit_s = START_S[endpoint.engine]
    stop = time.monotonic() + limit_s
    while not healthy(endpoint, 0.5):
        if keeper.poll() is not None:
            what = f"ended with status {keeper.returncode} before it was healthy"
        elif time.monotonic() > stop:
            what = f"was not healthy after {limit_s:g} s"
        else:
            time.sleep(0.05)
            continue
        raise ValueError(
            f"server {endpoint.name!r} {what}; the end of {endpoint.log}: "
            f"{_tail(Path(endpoint.log))}"
        )


def command(
    spec: fleet_file.ServerSpec, model: Path, port: int
) -> tuple[list[str], dict[str, str]]:
    """The command of a server and its environment; ``model`` is its GGUF file or folder.

    Raises:
        ValueError: If the engine is not installed, or a simulated one's profile cannot be read.
    """
    python = spec.python or sys.executable
    if spec.python and not os.access(spec.python, os.X_OK):
        raise ValueError(f"server {spec.name!r}: python is {spec.python!r}; no program is there")
    threads = max(1, len(spec.cores))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    flags: dict[str, object] = {"model": model, "host": spec.host, "port": port}
    if spec.engine == "llama.cpp":
        if not spec.python and importlib.util.find_spec("xllamacpp") is None:
            raise ValueError(
                f"server {spec.name!r}: xllamacpp is not installed; {install_line('real')}"
            )
        words = [python, llama_server.__file__]
        flags |= {"name": spec.name, "slots": spec.slots, "context": spec.context}
        flags |= {"batched_tokens": spec.batched_tokens, "threads": threads}
    elif spec.engine == "vllm":
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        flags |= {"served_model_name": spec.name, "dtype": "bfloat16", "max_num_seqs": spec.slots}
        flags |= {"max_model_len": spec.context, "max_num_batched_tokens": spec.batched_tokens}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, spec.cores)) or "auto"
        # The tree that runs servegym is no part of the other interpreter's.
        environment.pop("PYTHONPATH", None)
    else:
        try:
            load(spec.profile)
        except ValueError as error:
            raise ValueError(f"server {spec.name!r}: {error}") from None
        words = [python, "-m", "servegym.experiments.live.serve.command"]
        flags |= {"name": spec.name, "model": spec.model or spec.name, "profile": spec.profile}
        flags |= {"slots": spec.slots, "context": spec.context}
        flags["batched_tokens"] = spec.batched_tokens
    for key, value in {**flags, **spec.options}.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return words, environment


class Fleet:
    """Servers that run as long as a ``with`` block, or until :meth:`stop`.

    ``folder`` has their logs, models and endpoints; ``lock`` is its lock, if the caller holds it.

    Attributes:
        endpoints: The servers that run, in the order of ``specs``.

    Raises:
        ValueError: If other servers run in the folder, a model or a port cannot be used, an engine
            is not installed, or a server ends or does not become healthy (with the last lines of
            its log); none runs then.
    """

    def __init__(
        self, specs: Sequence[fleet_file.ServerSpec], folder: Path, lock: BinaryIO | None = None
    ) -> None:
        self.folder = folder
        self.endpoints: list[fleet_file.Endpoint] = []
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._lock = _hold(self.folder) if lock is None else lock
        (self.folder / ENDPOINTS).unlink(missing_ok=True)
        try:
            for spec in specs:
                self._start(spec)
            for endpoint, keeper in zip(self.endpoints, self._keepers, strict=True):
                _wait(endpoint, keeper)
            fleet_file.write_endpoints(self.folder / ENDPOINTS, self.endpoints)
        except BaseException:
            self.stop()
            raise

    def _start(self, spec: fleet_file.ServerSpec) -> None:
        port = _port(spec)
        model = Path("-")
        words, environment = command(spec, model, port)  # refused before a model is made
        if spec.engine != "simulated":
            model = make_model(spec.model, spec.context, self.folder / "models")
            words, environment = command(spec, model, port)
        log = self.folder / f"{spec.name}.log"
        # The main thread of the watchdog starts the server, so the affinity is inherited.
        pinned = ["taskset", "-c", ",".join(map(str, spec.cores))] if spec.cores else []
        with log.open("wb") as out:
            keeper = subprocess.Popen(
                [*pinned, sys.executable, "-I", watchdog.__file__, *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._keepers.append(keeper)
        self.endpoints.append(spec.endpoint(port, keeper.pid, str(log)))

    def dead(self) -> list[str]:
        """Names of the servers that have ended."""
        pairs = zip(self.endpoints, self._keepers, strict=True)
        return [endpoint.name for endpoint, keeper in pairs if keeper.poll() is not None]

    def stop(self) -> None:
        """End all servers; a second call does nothing."""
        for keeper in self._keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()  # which the watchdog watches
        for keeper in self._keepers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(2 * watchdog.GRACE_S)
            # Also what a watchdog that was killed itself has left of its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(keeper.pid, signal.SIGKILL)
            keeper.wait()
        self._keepers = []
        if not self._lock.closed:
            (self.folder / ENDPOINTS).unlink(missing_ok=True)
            self._lock.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# -- servers in the background -----------------------------------------------------------------


def _started(pid: int) -> str:
    """When a process was started, in ticks; empty if there is none. Numbers come again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]


def _supervisor(folder: Path) -> int:
    """The supervisor's process, 0 if none runs."""
    try:
        entry = json.loads((folder / _SUPERVISOR).read_text(encoding="utf-8"))
        pid, started = int(entry["pid"]), str(entry["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return pid if started and _started(pid) == started else 0


def up(fleet: Path, folder: Path) -> list[fleet_file.Endpoint]:
    """Start the servers of FLEET.toml in the background; they are all healthy.

    Raises:
        ValueError: If the file cannot be used, servers of the folder run already, or one does not
            start.
    """
    for spec in fleet_file.read_fleet(fleet):
        command(spec, Path("-"), spec.port)
    _hold(folder).close()
    with (folder / "supervisor.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, os.fspath(fleet), os.fspath(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdout as output:
            cause = output.read()  # until the supervisor closes it
        if cause != _READY:
            # Not by a file: the disk may be full.
            raise ValueError(
                cause.decode()
                or f"it was ended before all servers ran; {folder / 'supervisor.log'}: "
                f"{_tail(folder / 'supervisor.log')}"
            )
        endpoints = fleet_file.read_endpoints(folder / ENDPOINTS)
        with process.stdin as stdin:
            stdin.write(_READY)  # from here on they run without this process
        return endpoints
    except BaseException:
        process.terminate()
        process.wait()
        raise


def status(folder: Path) -> list[tuple[fleet_file.Endpoint, str]]:
    """The servers of a folder and how each is: ``healthy``, ``silent`` or ``ended``.

    Raises:
        ValueError: If no servers run there.
    """
    if not _supervisor(folder) or not (folder / ENDPOINTS).exists():
        raise ValueError(f"{folder}: no servers run there; `servegym real up` starts them")
    return [
        (one, "ended" if not _started(one.pid) else "healthy" if healthy(one) else "silent")
        for one in fleet_file.read_endpoints(folder / ENDPOINTS)
    ]


def down(folder: Path) -> bool:
    """End the servers of a folder; whether any ran."""
    pid = _supervisor(folder)
    if pid:
        os.kill(pid, signal.SIGTERM)
        stop = time.monotonic() + 30.0
        while _supervisor(folder):
            if time.monotonic() > stop:
                os.kill(pid, signal.SIGKILL)  # the watchdogs end the servers then
            time.sleep(0.02)
    for name in (ENDPOINTS, _SUPERVISOR):
        (folder / name).unlink(missing_ok=True)
    return bool(pid)


def _follow() -> None:
    """End this process if the one that started it ends before it has heard that all servers run."""
    if os.read(0, 1) != _READY:
        os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """The supervisor, of FLEET.toml and the folder: holds a fleet until a signal comes.

    Standard output tells `_READY`, or why the fleet does not start; input, that it was heard.
    """
    fleet, folder = map(Path, arguments or sys.argv[1:])

    def stop(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    threading.Thread(target=_follow, daemon=True).start()
    try:
        lock = _hold(folder)
        entry = {"pid": os.getpid(), "started": _started(os.getpid())}
        write_text(folder / _SUPERVISOR, json.dumps(entry))
        with Fleet(fleet_file.read_fleet(fleet), folder, lock):
            os.write(1, _READY)
            os.dup2(2, 1)
            while True:
                signal.pause()
    except Exception as error:
        with contextlib.suppress(OSError):
            os.write(1, f"{error}".encode())
        if not isinstance(error, (OSError, ValueError)):
            raise
        return 1


if __name__ == "__main__":
    run_main(main)
