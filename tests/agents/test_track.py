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


@pytest.mark.slow
def test_a_run_of_a_sweep_is_kept_offline_with_every_number(root: Path, tmp_path: Path) -> None:
    """What ``wandb agent`` starts, by wandb's own functions, but for the server's choice of values.

    The values are those of a sweep file, a few of them smaller.
    """
    import yaml
    from wandb.proto import wandb_internal_pb2 as proto
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
    from wandb.sdk.lib import config_util

    sweep = yaml.safe_load((root / "experiments" / "sweeps" / "ppo.yaml").read_text())
    values = {
        name: spec.get("value", spec.get("values", [spec.get("max")])[0])
        for name, spec in sweep["parameters"].items()
    }
    assert values["track"] is True
    small = {
        "total_timesteps": 256,
        "num_envs": 4,
        "num_steps": 16,
        "eval_every": 128,
        "eval_episodes": 2,
        "set": "episode_requests=30",
        "out_dir": str(tmp_path),
        "run_name": "one",
    }
    job = {"args": {name: {"value": value} for name, value in {**values, **small}.items()}}
    kept = tmp_path / "wandb" / "sweep-s1" / "config-r1.yaml"
    kept.parent.mkdir(parents=True)
    config_util.save_config_file_from_dict(str(kept), job["args"])
    parts = {
        **create_sweep_command_args(job),
        "env": ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [sweep["program"]],
    }
    words = [word for part in create_sweep_command() for word in parts[part.strip("${}")]]
    assert words[:3] == ["/usr/bin/env", "python", "agents/ppo.py"]
    subprocess.run(
        words,
        env={
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_SWEEP_ID": "s1",
            "WANDB_RUN_ID": "r1",
            "WANDB_SWEEP_PARAM_PATH": str(kept),
        },
        cwd=root,
        check=True,
        capture_output=True,
        timeout=240,
    )
    (file,) = (tmp_path / "one").glob("wandb/offline-run-*/*.wandb")
    (run,) = [r.run for r in map(proto.Record.FromString, records(file)) if r.HasField("run")]
    assert (run.run_id, run.sweep_id) == ("r1", "s1")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    given = {name: value for name, value in {**values, **small}.items() if name in values}
    assert {name: config[name] for name in given} == given
    rows = [{k: v for k, v in row.items() if k[0] != "_"} for row in history(file)]
    log = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    assert rows == [json.loads(line) for line in log]
    assert sum(sweep["metric"]["name"] in row for row in rows) == 3  # the first of random weights
