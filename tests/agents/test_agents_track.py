"""``--track``: what wandb keeps of a run, without an account or a network."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("wandb")


def records(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of seven bytes.

    Blocks of 32 KiB hold chunks of CRC (4 bytes), length (2), type (1; 1 whole, 2 first, 3 middle,
    4 last) and data; the rest of a block too short for a chunk is padding.
    """
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


def history(file: Path) -> list[dict[str, float]]:
    """The logged rows of an offline run."""
    from wandb.proto import wandb_internal_pb2 as proto

    rows = []
    for data in records(file):
        record = proto.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def test_an_offline_run_holds_every_logged_number(tmp_path: Path) -> None:
    words = "--total_timesteps=256 --num_envs=4 --num_steps=16 --eval_every=128 --eval_episodes=2"
    subprocess.run(
        [
            sys.executable, "-m", "servegym.agents.ppo", *words.split(), "--width=8",
            "--set=episode_requests=30", "--track=True", f"--out_dir={tmp_path}", "--run_name=one",
        ],
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    (file,) = (tmp_path / "one").glob("wandb/offline-run-*/*.wandb")
    rows = [{k: v for k, v in row.items() if k[0] != "_"} for row in history(file)]
    log = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    assert rows == [json.loads(line) for line in log]
    assert sum("eval/score" in row for row in rows) == 2
