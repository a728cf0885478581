"""Sweeps through Ray Tune: the local runner's files, tables and values; killed and gone on with."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytest.importorskip("ray.exceptions", reason="Ray is not installed: pip install '.[ray]'")
pytest.importorskip("optuna")
pytest.importorskip("yaml")
pytest.importorskip("matplotlib")
pytest.importorskip("ray.tune", reason="Tune is not installed: pip install '.[ray]'")


from servegym.experiments.cluster import sweep as ray_sweep
from servegym.experiments.sweeps import run as local
from servegym.experiments.sweeps.spec import read_sweep

pytestmark = [pytest.mark.usefixtures("two_workers"), pytest.mark.slow, pytest.mark.timeout(600)]

BAYES = """
program: agents/ppo.py
method: bayes
metric: {name: eval/score, goal: minimize}
parameters:
  width: {values: [8, 16, 32]}
  learning_rate: {min: 0.001, max: 0.1, distribution: log_uniform_values}
  num_steps: {min: 1, max: 9}
  arch: {value: mlp}
"""

GRID = """
program: agents/ppo.py
method: grid
metric: {name: eval/score, goal: minimize}
parameters:
  width: {values: [8, 16]}
  learning_rate: {values: [0.001, 0.01, 0.1]}
"""

# In place of an agent: logs the square of the distance to width 16, learning rate 0.01.
AGENT = """
import json, math, os, signal, sys, time
from pathlib import Path
a = dict(word[2:].split("=", 1) for word in sys.argv[1:])
run = Path(a["out_dir"]) / a["run_name"]
loss = (float(a["width"]) / 16 - 1) ** 2 + math.log10(float(a["learning_rate"]) / 0.01) ** 2
(run / "arguments.json").write_text(json.dumps(a))
with open(Path(__file__).with_name("begun"), "a") as log:
    print(a["width"], a["learning_rate"], file=log)
if a.get("fail"):
    sys.exit(5)
with open(run / "metrics.jsonl", "w") as log:
    for step in range(1, 5):
        print(json.dumps({"global_step": step}), file=log, flush=True)
        print(json.dumps({"eval/score": loss + 1 / step}), file=log, flush=True)
        deadly = Path(__file__).with_name("deadly")
        if step == 2 and deadly.exists():
            deadly.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        time.sleep(float(a.get("pause", 0)))
    print(json.dumps({"eval/score": loss + 7}), file=log)
"""


@pytest.fixture
def agent(tmp_path, monkeypatch):
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    monkeypatch.setattr(local, "agent_command", swapped(str(script)))
    monkeypatch.setattr(local, "POLL_S", 0.02)
    return script


def swapped(script, real=local.agent_command):
    """The agent's command line with the script above as the agent."""
    return lambda *a: [sys.executable, script, *real(*a)[3:]]


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(textwrap.dedent(text))
    return read_sweep(path)


def table(folder, *left_out):
    with open(folder / "trials.csv", newline="") as stream:
        return [
            {k: v for k, v in row.items() if k not in left_out} for row in csv.DictReader(stream)
        ]


def test_one_run_at_a_time_is_the_local_sweep(tmp_path, agent):
    """The same choices of the same sampler, the same values, the same table but for seconds."""
    sweep = written(tmp_path, BAYES)
    local.run_sweep(sweep, 5, 1, tmp_path / "here", seed=3)
    out = ray_sweep.run_sweep(sweep, 5, 1, tmp_path / "there", seed=3)
    wanted = table(tmp_path / "here", "seconds")
    assert len(wanted) == 5 and table(out, "seconds") == wanted
    assert (out / "importance.csv").read_bytes() == (
        tmp_path / "here" / "importance.csv"
    ).read_bytes()
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((out / "tune_00" / "trial_0004" / "attempt_0" / "arguments.json").read_text())
    assert told["arch"] == "mlp" and told["track"] == "False"


def test_a_grid_outlives_a_killed_worker_and_goes_on_to_more_runs(tmp_path, agent, capsys):
    sweep = written(tmp_path, GRID)
    (tmp_path / "deadly").touch()
    out = ray_sweep.run_sweep(sweep, 4, 2, tmp_path / "out")
    assert not (tmp_path / "deadly").exists() and len(list(out.glob("*/*/attempt_1"))) == 1
    assert len((tmp_path / "begun").read_text().splitlines()) == 5  # one was run again
    first = table(out)
    assert len(first) == 4 and {row["state"] for row in first} == {"complete"}
    ray_sweep.run_sweep(sweep, 100, None, tmp_path / "out")
    assert len((tmp_path / "begun").read_text().splitlines()) == 7
    rows = table(out)
    points = [(row["width"], row["learning_rate"]) for row in rows]
    assert sorted(points) == sorted((w, r) for w in ("8", "16") for r in ("0.001", "0.01", "0.1"))
    assert sorted(int(row["trial"]) for row in rows) == list(range(6))
    assert all(row in rows for row in first)
    for row in rows:
        rate, width = float(row["learning_rate"]), float(row["width"])
        best = (width / 16 - 1) ** 2 + math.log10(rate / 0.01) ** 2 + 1 / 4
        assert float(row["eval/score"]) == pytest.approx(best) and row["evaluations"] == "5"
    ray_sweep.run_sweep(sweep, 100, None, tmp_path / "out")  # complete: nothing is run again
    assert table(out) == rows
    assert capsys.readouterr().out.count("trial_0005: eval/score") == 1


def test_a_killed_sweep_goes_on_where_it_was(tmp_path, agent):
    """The process with its own cluster is killed; the same call ends the sweep."""
    text = BAYES.replace("{value: mlp}", "{value: mlp}\n  pause: {value: 0.5}")
    sweep = written(tmp_path, text)
    script = tmp_path / "drive.py"
    script.write_text(
        f"""
import sys
from pathlib import Path
from servegym.experiments.cluster import sweep as ray_sweep
from servegym.experiments.sweeps import run as sweep
from servegym.experiments.sweeps.spec import read_sweep
real = sweep.agent_command
sweep.agent_command = lambda *a: [sys.executable, {str(agent)!r}, *real(*a)[3:]]
ray_sweep.run_sweep(
    read_sweep({str(sweep.path)!r}), 4, 1, Path({str(tmp_path / "out")!r}), ray="local:1"
)
"""
    )
    environment = {**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "0.2"}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.DEVNULL
    )
    begun = tmp_path / "begun"
    limit = time.monotonic() + 120
    while not (begun.exists() and len(begun.read_text().splitlines()) == 3):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    time.sleep(0.7)
    with pytest.raises(ValueError, match="another process runs"):
        ray_sweep.run_sweep(sweep, 4, 1, tmp_path / "out")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    rows = table(ray_sweep.run_sweep(sweep, 4, 1, tmp_path / "out"))
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert sorted(int(row["trial"]) for row in rows) == list(range(4))
    runs = [tuple(line.split()) for line in begun.read_text().splitlines()]
    # The first two ended before; the third was in its middle and is the one that ran again.
    assert len(runs) == 5 and runs[3] == runs[2] and len(set(runs)) == 4
    chosen = {(row["width"], row["learning_rate"]) for row in rows}
    assert chosen == set(runs)
