"""The queue of trainings: its list, a run killed and resumed, locks, the table."""

import csv
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import baseline_rl, load_policy  # noqa: E402
from servegym.experiments.figures.routing import training as queue  # noqa: E402
from servegym.experiments.jobs import LOCK  # noqa: E402

TINY = {
    "profiles": "edge-6-heterogeneous",
    "rate_low": 8.0,
    "rate_high": 8.0,
    "eval_rates": (8.0,),
    "reward": "completed_qos",
    "num_envs": 8,
    "eval_every": 800,
    "buffer_size": 400,
    "updates_per_step": 1,
    "set": ("num_experts=3", "episode_requests=30"),
}


AT_THE_ROWS = {"baseline_rl": "expert", "direct_search": "linear"}
"""Networks of those that read the experts' rows alone."""


def tiny(steps=800, seed=1):
    return queue.TrainingRun("paper", "baseline_rl", "het8", seed, steps, TINY, "baseline_rl")


def test_the_list_has_what_the_tables_need_the_most_useful_first():
    names = [run.name for run in queue.RUNS]
    assert len(set(names)) == len(names)
    assert [run.variant for run in queue.RUNS[:2]] == ["sac_han", "baseline_rl"]
    count = Counter((run.group, run.variant, run.point) for run in queue.RUNS)
    for point in ("het8", "linear5"):
        for variant in ("sac_han", "baseline_rl_dsa", *AT_THE_ROWS):
            assert count["paper", variant, point] == 5
    for variant in ("residual", "baseline_rl"):
        assert count["general", variant, "het4-11"] == 3
    first = [run for run in queue.RUNS if run.group == "paper" and run.point == "het8"]
    assert [run.seed for run in first[:12]] == [1] * 4 + [2] * 4 + [3] * 4


def test_the_papers_learners_start_at_nothing_and_have_its_rewards():
    for run in queue.RUNS:
        if run.group == "paper":
            assert run.from_nothing and not run.settings.get("privileged_critic", False)
            own = "qos_aware" if run.variant == "sac_han" else "completed_qos"
            assert run.settings["reward"] == own
            assert run.network == AT_THE_ROWS.get(run.variant, "han")
            assert run.steps >= (400_000 if run.variant in AT_THE_ROWS else 1_000_000)


def test_every_command_is_one_that_the_agent_takes(tmp_path):
    tyro = pytest.importorskip("tyro")
    for run in queue.RUNS:
        words = run.command(tmp_path, 5)[3:]
        config = (tyro.conf.FlagConversionOff,)
        agent = importlib.import_module(run.command(tmp_path, 5)[2])
        args = tyro.cli(agent.Args, args=words, config=config)
        assert (args.seed, args.total_timesteps, args.run_name) == (run.seed, run.steps, run.name)
        assert args.resume and args.checkpoint_every == 5
        for key, value in run.arguments.items():
            assert getattr(args, key) == value, (run.name, key)


def test_select():
    assert [run.seed for run in queue.select(["general_residual"])] == [1, 2, 3]
    assert len(queue.select([])) == len(queue.RUNS)
    with pytest.raises(ValueError, match="only is 'genral'.*did you mean"):
        queue.select(["genral"])


def test_trains_writes_its_row_and_does_nothing_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "POLL_S", 0.1)
    runs, table = tmp_path / "runs", tmp_path / "table.csv"
    table.write_text("run,val_qos\nelsewhere,0.5\n")
    assert queue.train_all([tiny()], runs, table, niceness=0) == {tiny().name: "finished"}
    rows = {row["run"]: row for row in csv.DictReader(table.open())}
    assert set(rows) == {"elsewhere", tiny().name}  # rows of other machines stay
    row = rows[tiny().name]
    assert row["steps"] == "800" and row["prior"] == "False"
    log = [json.loads(line) for line in (runs / tiny().name / "metrics.jsonl").open()]
    best = max(line["eval/avg_qos"] for line in log if "eval/avg_qos" in line)
    assert float(row["val_qos"]) == pytest.approx(best, abs=1e-5)
    assert float(row["seconds"]) > 0 and len(row["sources"]) == 12
    assert load_policy(runs / tiny().name).name == "baseline_rl"
    assert not (runs / tiny().name / "snapshot.pt").exists()

    def fail(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(queue, "run_process", fail)
    assert queue.train_all([tiny()], runs, table, niceness=0) == {tiny().name: "finished"}


@pytest.mark.slow
def test_a_killed_run_goes_on_and_logs_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "POLL_S", 0.05)
    run, straight, broken = tiny(1600), tmp_path / "straight", tmp_path / "broken"
    given = {"seed": run.seed, "total_timesteps": 1600, "run_name": run.name}
    baseline_rl.train(baseline_rl.Args(**run.arguments, **given, out_dir=str(straight)))
    folder = broken / run.name
    folder.mkdir(parents=True)
    child = subprocess.Popen(run.command(broken, 400), stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 200
        while not (folder / "snapshot.pt").exists() and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not (folder / queue.RESULT).exists()
    assert queue.state_of(run, broken) == "begun"
    assert queue.train_one(run, broken, snapshot_steps=400, niceness=0) == "finished"

    def log(base):
        lines = [json.loads(line) for line in (base / run.name / "metrics.jsonl").open()]
        return [{k: v for k, v in line.items() if k != "charts/SPS"} for line in lines]

    assert log(straight) == log(broken)


def test_a_run_that_another_process_holds_is_left_alone(tmp_path):
    run = tiny()
    folder = tmp_path / run.name
    folder.mkdir()
    code = (
        "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
        "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / LOCK)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        assert queue.state_of(run, tmp_path) == "running"
        assert queue.train_one(run, tmp_path) == "running"
    finally:
        holder.kill()
        holder.wait()
    assert queue.state_of(run, tmp_path) == "waiting"


def test_the_deadline_stops_a_run_and_a_failure_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(queue, "POLL_S", 0.05)
    run = tiny(10_000_000)
    assert queue.train_one(run, tmp_path, time.monotonic() + 0.3) == "stopped"
    bad = replace(tiny(seed=2), settings={**TINY, "reward": "unknown"})
    table = tmp_path / "table.csv"
    found = queue.train_all([bad], tmp_path, table, niceness=0)
    assert found[bad.name].startswith("failed") and not table.exists()
    assert "unknown" in (tmp_path / bad.name / queue.LOG).read_text()
    found = queue.train_all([run], tmp_path, table, max_hours=1e-9)
    assert found[run.name] in ("begun", "waiting")


def test_bad_arguments(tmp_path):
    for name, value in (("workers", 0), ("max_hours", 0.0), ("max_hours", math.nan)):
        with pytest.raises(ValueError, match=name):
            queue.train_all([], tmp_path, tmp_path / "t.csv", **{name: value})
    with pytest.raises(ValueError, match="steps is 0"):
        queue.main(["--steps", "0", "--runs", str(tmp_path)])


def test_the_list_is_printed(tmp_path, capsys):
    assert queue.main(["--list", "--only", "general", "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "general_residual_het4-11_s3" in printed and "paid_forward" in printed
    assert os.listdir(tmp_path) == []
