"""Sweep files, and the local runner that takes the same files as wandb."""

import csv
import dataclasses
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import tyro

from servegym.agents.lib import evaluation
from servegym.experiments.sweeps import run as running
from servegym.experiments.sweeps.run import run_sweep
from servegym.experiments.sweeps.spec import list_sweeps, read_sweep

GOOD = """
program: agents/ppo.py
method: bayes
metric: {name: eval/score, goal: minimize}
parameters:
  width: {values: [8, 16, 32]}
  learning_rate: {min: 0.001, max: 0.1, distribution: log_uniform_values}
  num_steps: {min: 1, max: 9}
  arch: {value: mlp}
"""

# In place of an agent: logs the square of the distance to width 16, learning rate 0.01.
AGENT = """
import json, math, sys, time
from pathlib import Path
a = dict(word[2:].split("=", 1) for word in sys.argv[1:])
run = Path(a["out_dir"]) / a["run_name"]
loss = (float(a["width"]) / 16 - 1) ** 2 + math.log10(float(a["learning_rate"]) / 0.01) ** 2
(run / "arguments.json").write_text(json.dumps(a))
if a.get("fail"):
    sys.exit("no such thing")
with open(run / "metrics.jsonl", "w") as log:
    for step in range(1, 5):
        print(json.dumps({"global_step": step}), file=log, flush=True)
        print(json.dumps({"eval/score": loss + 1 / step}), file=log, flush=True)
        time.sleep(float(a.get("pause", 0)))
    print(json.dumps({"eval/score": loss + 7}), file=log)
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    real = running.agent_command
    monkeypatch.setattr(
        running, "agent_command", lambda *a: [sys.executable, str(script), *real(*a)[3:]]
    )
    monkeypatch.setattr(running, "POLL_S", 0.02)
    return script


def written(tmp_path: Path, text: str = GOOD) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "trials.csv", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("name", list_sweeps())
def test_every_argument_of_a_shipped_sweep_is_one_of_its_agent(name: str) -> None:
    sweep = read_sweep(name)
    module = importlib.import_module(sweep.module)
    known = {field.name for field in dataclasses.fields(module.Args)}
    arguments = [(name, value) for name, value in sweep.constants.items()]
    for name, values in sweep.searched.items():
        ends = getattr(values, "choices", None) or (values.low, values.high)
        arguments += [(name, value) for value in ends]
    for name, value in arguments:
        assert name in known
        words = [f"--{name}={value}"]  # as `wandb agent` writes it
        args = tyro.cli(module.Args, args=words, config=(tyro.conf.FlagConversionOff,))
        assert getattr(args, name) in (value, (value,))
    source = Path(module.__file__).read_text() + Path(evaluation.__file__).read_text()
    assert sweep.metric.partition("/")[2] in source


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("method: bayes", "method: bays", "method='bays' is unknown"),
        ("agents/ppo.py", "agents/no_such.py", "no agent of servegym has it"),
        ("min: 0.001", "min: 0", "distribution='log_uniform_values' is unknown"),
        ("min: 0.001", "min: .nan", "learning_rate.min=nan must be a finite number"),
        ("{min: 1, max: 9}", "{min: 1}", "num_steps needs value, values, or min and max"),
        ("values: [8, 16, 32]", "values: [[8], 16]", "is no number, text, true or false"),
        ("metric: {name: eval/score, goal: minimize}", "", "metric is missing"),
        ("method: bayes", "method: bayes\nmethods: 1", "key of a sweep='methods' is unknown"),
        (
            "method: bayes",
            "method: bayes\nearly_terminate: {type: hyperband, strict: true}",
            "key of early_terminate='strict' is unknown",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_name(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ValueError, match="mine.yaml") as error:
        read_sweep(written(tmp_path, GOOD.replace(old, new)))
    assert message in str(error.value)


def test_unknown_sweeps_and_counts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'sac_han'"):
        read_sweep("sac_hann")
    with pytest.raises(ValueError, match="no such file"):
        read_sweep("nowhere/there.yaml")
    for counts, message in (((0, 1), "trials=0"), ((1, 0), "workers=0")):
        with pytest.raises(ValueError, match=message):
            run_sweep(read_sweep(written(tmp_path)), *counts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_runs_are_chosen_in_range_the_best_evaluation_counts_and_a_sweep_goes_on(
    tmp_path: Path, agent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = read_sweep(written(tmp_path))
    run_sweep(sweep, 1, 1, tmp_path / "out")
    first = {row["trial"]: row["eval/score"] for row in table(tmp_path / "out")}
    capsys.readouterr()
    out = run_sweep(sweep, 5, 2, tmp_path / "out")
    rows = table(out)
    assert first.items() <= {row["trial"]: row["eval/score"] for row in rows}.items()
    assert len(rows) == 5 and {row["state"] for row in rows} == {"complete"}
    values = [float(row["eval/score"]) for row in rows]
    assert values == sorted(values)
    for row in rows:
        assert row["width"] in ("8", "16", "32") and 1 <= int(row["num_steps"]) <= 9
        rate, width = float(row["learning_rate"]), float(row["width"])
        assert 0.001 <= rate <= 0.1
        # 1/4 is the agent's best evaluation; its last one is 7 worse.
        expected = (width / 16 - 1) ** 2 + math.log10(rate / 0.01) ** 2 + 1 / 4
        assert float(row["eval/score"]) == pytest.approx(expected)
        told = out / "runs" / f"trial_{int(row['trial']):04d}" / "arguments.json"
        assert json.loads(told.read_text())["arch"] == "mlp"
    assert len(re.findall(r"^trial_", capsys.readouterr().out, re.M)) == 4
    other = read_sweep(written(tmp_path, GOOD.replace("[8, 16, 32]", "[8, 16]")))
    for changed, fixed in ((other, {}), (sweep, {"width": 8})):
        with pytest.raises(ValueError, match="holds another search"):
            run_sweep(changed, 7, 1, out, fixed=fixed)


def test_a_metric_that_no_run_logs_is_named(tmp_path: Path, agent: Path) -> None:
    absent = read_sweep(written(tmp_path, GOOD.replace("eval/score", "eval/scores")))
    with pytest.raises(RuntimeError, match="'eval/scores' is not in the log .*: eval/score, glob"):
        run_sweep(absent, 9, 1, tmp_path / "other")


def test_a_sweep_whose_runs_all_fail_says_so(tmp_path: Path, agent: Path) -> None:
    text = GOOD.replace("{value: mlp}", "{value: mlp}\n  fail: {value: 1}")
    with pytest.raises(RuntimeError, match="every run failed"):
        run_sweep(read_sweep(written(tmp_path, text)), 3, 1, tmp_path / "out")
    assert [row["state"] for row in table(tmp_path / "out")] == ["fail"] * 3


@pytest.mark.slow
def test_a_killed_sweep_runs_its_unfinished_trials_again(tmp_path: Path, agent: Path) -> None:
    path = written(tmp_path, GOOD.replace("{value: mlp}", "{value: mlp}\n  pause: {value: 0.6}"))
    script = tmp_path / "drive.py"
    script.write_text(
        f"""
import sys
from pathlib import Path
from servegym.experiments.sweeps import run as sweep
from servegym.experiments.sweeps.spec import read_sweep
real = sweep.agent_command
sweep.agent_command = lambda *a: [sys.executable, {str(agent)!r}, *real(*a)[3:]]
sweep.run_sweep(read_sweep({str(path)!r}), 3, 2, Path({str(tmp_path / "out")!r}))
"""
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL)
    begun = tmp_path / "out" / "runs" / "trial_0001" / "arguments.json"
    limit = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    with pytest.raises(ValueError, match="another process is at work"):
        run_sweep(read_sweep(path), 3, 1, tmp_path / "out")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = json.loads(begun.read_text())
    out = run_sweep(read_sweep(path), 3, 3, tmp_path / "out")
    rows = [row for row in table(out) if row["state"] == "complete"]
    assert len(rows) == 3
    assert left["learning_rate"] in [row["learning_rate"] for row in rows]
