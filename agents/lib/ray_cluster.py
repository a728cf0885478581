"""Jobs on a Ray cluster: connect or start one, run every job once, survive lost workers.

To Ray it adds the choice of the cluster by one word (``--ray WHERE``), the check that all machines
run the same versions, else results differ, and errors that name the failed job.
"""

# Ray is an extra that need not be installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from servegym._command_line import install_line
from servegym._versions import versions

RETRIES = 3
"""Times that a job is run again after its worker was lost."""

STORE_BYTES = 256 * 2**20
"""Shared memory of a local cluster; what does not fit goes to the disk."""

COMPARED = ("numpy", "scipy", "numba", "torch")
"""Further packages whose versions the results depend on."""


def check_ray(where: str, *modules: str) -> int | None:
    """Check what ``--ray`` was given, and that Ray and its ``modules`` are there; starts nothing.

    ``where`` is ``"auto"``, the cluster that runs already (``RAY_ADDRESS``, or one of this
    machine); ``"local"``, one of this machine's processors for the time of the command; or
    ``"local:N"`` with N workers, the number that is returned. ModuleNotFoundError says what to
    install.
    """
    kind, colon, number = where.partition(":")
    count = None
    if colon and kind == "local" and number.isdecimal() and int(number) > 0:
        count = int(number)
    elif colon or kind not in ("auto", "local"):
        raise ValueError(
            f"ray is {where!r}; allowed are 'auto' (a cluster that runs), 'local' (this machine) "
            "and 'local:N' (with N workers, one or more)"
        )
    for module in ("ray", *modules):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ModuleNotFoundError(
                f"{module} is not installed; {install_line('ray')}", name=module
            ) from error
    return count


@contextmanager
def cluster(where: str) -> Iterator[Any]:
    """Ray, connected at `check_ray`'s word; a cluster that was started here ends with the block.

    In a process that is connected already, ``"auto"`` takes that cluster.
    """
    requested = check_ray(where)
    # No report of the use goes out, and the workers get the share of the processors that this
    # process would have had (Ray's default is the lowest priority but four), unless the user sets
    # another.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    if where == "auto" and ray.is_initialized():
        yield ray
        return
    if ray.is_initialized():
        raise ValueError(f"ray is {where!r}, but this process has a cluster already; use 'auto'")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if where == "auto":
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address="auto", **common)
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(
                "ray is 'auto', but no cluster was found; start one (ray start --head), name it "
                f"in RAY_ADDRESS, or use 'local' ({' '.join(str(error).split())[:200]})"
            ) from error
    else:
        ray.init(
            address="local",
            num_cpus=requested,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            **common,
        )
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """ValueError if an address such as 10.0.0.1:6379 is silent: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS is {address!r}, where no cluster answers ({error})"
        ) from error


def run_jobs(
    function: Callable[..., Any], jobs: Sequence[Sequence[Any]], names: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """Run ``function(*job)`` for every job on the connected cluster, one processor each.

    Yields index and result as they end, every index once. A job whose worker is lost runs again,
    and may change nothing outside. One that raises does not: the others are stopped and the error
    is raised here. ``names`` of the jobs stand in errors; an object that several jobs have is sent
    to a machine once. RuntimeError: a worker is lost again and again, or versions differ.
    """
    import ray

    task = ray.remote(_call).options(num_cpus=1, max_retries=RETRIES)
    driver = (os.getcwd(), versions(COMPARED))
    uses = Counter(id(argument) for job in jobs for argument in job)
    stored: dict[int, Any] = {}

    def reference(argument: Any) -> Any:
        if uses[id(argument)] == 1 or isinstance(argument, str | int | float | None):
            return argument
        if id(argument) not in stored:
            stored[id(argument)] = ray.put(argument)
        return stored[id(argument)]

    running = {
        task.remote(driver, function, *map(reference, job)): index for index, job in enumerate(jobs)
    }
    try:
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                # The error as the job raised it, not Ray's copy with a page of traceback.
                cause = error.cause if isinstance(error.cause, Exception) else error
                raise cause from error
            except ray.exceptions.RayError as error:
                raise RuntimeError(
                    f"{names[running[done]]}: its worker was lost {RETRIES + 1} times "
                    f"({' '.join(str(error).split())[:300]})"
                ) from error
            yield running.pop(done), result
    finally:
        for unfinished in running:
            ray.cancel(unfinished, force=True)


def _call(driver: tuple[str, dict[str, str]], function: Callable[..., Any], *job: Any) -> Any:
    """A job on its worker, in the driver's working folder where the machine has one so named."""
    folder, expected = driver
    installed = versions(COMPARED)
    differ = [
        f"{k} {installed[k]} and not {expected[k]}" for k in expected if installed[k] != expected[k]
    ]
    if differ:
        raise RuntimeError(f"machine {os.uname().nodename} of the cluster has {', '.join(differ)}")
    if os.path.isdir(folder):
        os.chdir(folder)
    if "torch" in sys.modules:  # as where a checkpoint is loaded: sums do not depend on threads
        sys.modules["torch"].set_num_threads(1)
    return function(*job)
