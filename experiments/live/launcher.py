"""Servers of llama.cpp by ``xllamacpp``, as processes that end with a ``with`` block (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from servegym._command_line import install_line
from servegym.experiments.live.fleet_file import ServerSpec
from servegym.experiments.live.models import make_model

START_S = 60.0
"""Seconds that a server may take until it is healthy."""
GRACE_S = 3.0
"""Seconds that it may take to end."""
_PR_SET_PDEATHSIG = 1


def healthy(url: str, timeout_s: float = 2.0) -> bool:
    """Whether ``/health`` of the server of a base address answers with status 200."""
    page = url.removesuffix("/v1") + "/health"
    try:
        with urllib.request.urlopen(page, timeout=timeout_s) as response:
            return response.status == 200
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def running(specs: Sequence[ServerSpec], folder: Path) -> Iterator[list[str]]:
    """Start servers and end them with the block, or with this process, however it dies.

    ``folder`` gets their models and logs. The block begins when all of them are healthy, with
    their base addresses.

    Raises:
        ValueError: If xllamacpp is not installed, a model or a port cannot be used, or a server
            ends or does not become healthy (with the last lines of its log); none runs then.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise ValueError(f"xllamacpp is not installed; {install_line('real')}")
    spawn = multiprocessing.get_context("spawn")
    urls: list[str] = []
    processes: list[SpawnProcess] = []
    try:
        for spec in specs:
            port, log = _port(spec), folder / f"{spec.name}.log"
            model = make_model(spec.model, spec.context, folder / "models")
            arguments = (spec, str(model), port, str(log), os.getpid())
            processes.append(spawn.Process(target=_serve, args=arguments, daemon=True))
            processes[-1].start()
            urls.append(spec.url(port))
        for spec, url, process in zip(specs, urls, processes, strict=True):
            _wait(spec.name, url, process, folder / f"{spec.name}.log")
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(GRACE_S)
            process.kill()
            process.join()


def _port(spec: ServerSpec) -> int:
    """The server's port, or a free one; another server might answer in its place."""
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


def _wait(name: str, url: str, process: SpawnProcess, log: Path) -> None:
    """Wait until a server is healthy; refuse one that ends or takes too long."""
    stop = time.monotonic() + START_S
    while not healthy(url, 0.5):
        if process.exitcode is not None:
            what = f"ended with status {process.exitcode} before it was healthy"
        elif time.monotonic() > stop:
            what = f"was not healthy after {START_S:g} s"
        else:
            time.sleep(0.05)
            continue
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        tail = " | ".join(line.strip() for line in text.splitlines()[-5:]) or "nothing"
        raise ValueError(f"server {name!r} {what}; the end of {log}: {tail}")


def _serve(spec: ServerSpec, model: str, port: int, log: str, parent: int) -> None:
    """The server's process: serve until a signal, or until the process that started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has died before
        os._exit(1)
    # Before the library starts its threads, which would take the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with open(log, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    threads = max(1, len(spec.cores))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)

    # By name: its stub file does not have all that the module has.
    xllamacpp: Any = importlib.import_module("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = model
    settings.model_alias = {spec.name}
    settings.hostnames = [spec.host]
    settings.port = port
    settings.n_parallel = spec.slots
    settings.n_ctx = spec.slots * spec.context
    settings.n_batch = settings.n_ubatch = spec.batched_tokens
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    # A request holds a thread of the server while it waits for a slot.
    settings.n_threads_http = max(64, 8 * spec.slots)
    settings.cache_ram_mib = 0
    settings.endpoint_metrics = True
    settings.endpoint_slots = True
    settings.verbosity = 1
    server = xllamacpp.Server(settings)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
