"""Writes that fail or are killed: the old file stays, and no half of a new one has its name."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from servegym.experiments.evaluation.output import read_rows, write_csv


class Writer(NamedTuple):
    """A file that is written in versions."""

    name: str
    write: Callable[[Path, int], object]
    read: Callable[[Path], int]  # the version, having read all of it


def _one(values: Any) -> int:
    """The number that everything in a file must be."""
    found = np.unique(np.asarray(values))
    assert found.size == 1, found
    return int(found[0])


def _checkpoint(path: Path, version: int) -> None:
    import torch

    from servegym.agents.lib.checkpoint import write_checkpoint

    net = torch.nn.Linear(300, 300)
    with torch.no_grad():
        for part in net.parameters():
            part.fill_(version)
    write_checkpoint(net, {"agent": "ppo"}, path)


def _read_tensors(path: Path) -> int:
    from safetensors.numpy import load_file

    return _one(np.concatenate([x.ravel() for x in load_file(path).values()]))


def _snapshot(path: Path, version: int) -> None:
    import torch

    from servegym.agents.lib.arguments import RunArgs
    from servegym.agents.lib.snapshots import save_snapshot

    content = {"weights": torch.full((300, 300), float(version)), "text": "x" * 4096}
    save_snapshot(path, "ppo", RunArgs(), content)


WRITERS = [
    Writer(
        "rows.csv",
        lambda path, version: write_csv(path, [{"a": version, "b": "text"}] * 3000),
        lambda path: _one([row["a"] for row in read_rows(path)]),
    ),
    Writer("best.safetensors", _checkpoint, _read_tensors),
    Writer("snapshot.safetensors", _snapshot, _read_tensors),
]


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.name)
def writer(request) -> Writer:
    """A writer whose libraries are here."""
    if request.param.name.endswith(".safetensors"):
        pytest.importorskip("torch").set_num_threads(1)
        pytest.importorskip("safetensors")
    return request.param


def test_a_full_disk(writer, tmp_path):
    """The kernel refuses every byte of a file past a limit, as where there is no space left."""
    path = tmp_path / writer.name
    writer.write(path, 1)
    assert path.stat().st_size > 1000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, before[1]))
        with pytest.raises(OSError) as refused:
            writer.write(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.filename == str(path)
    assert writer.read(path) == 1
    assert os.listdir(tmp_path) == [writer.name], "the temporary file is gone"


def test_a_full_disk_is_named_by_what_grows_line_by_line(tmp_path):
    from servegym.hardware_profiles.measure.table import ResumableTable

    (tmp_path / "table.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '.*table.csv'"):
        ResumableTable(tmp_path / "table.csv", ("a",), ("a",))


def _write_on(writer: Writer, path: Path, written: Any) -> None:
    version = 1
    while True:
        version = version % 60 + 1
        writer.write(path, version)
        written.release()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_in_the_middle(writer, tmp_path):
    path = tmp_path / writer.name
    writer.write(path, 1)
    fork, seen = multiprocessing.get_context("fork"), set()
    for k in range(30):
        written = fork.Semaphore(0)
        child = fork.Process(target=_write_on, args=(writer, path, written))
        child.start()
        for _ in range(1 + k % 3):  # however busy the machine is
            assert written.acquire(timeout=60)
        time.sleep(0.003 * (k % 6))
        child.kill()
        child.join()
        seen.add(writer.read(path))
        if k > 2 and len(seen) > 1:
            break
    assert seen <= set(range(1, 61)) and len(seen) > 1, "it was killed while it wrote"
