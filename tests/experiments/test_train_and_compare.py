"""The run behind make train, at smoke size, and what it reads, prints and draws."""

import csv
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from servegym.experiments import train_and_compare as run

from ..runner import servegym

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_trains_compares_and_saves(tmp_path, capsys):
    words = ["--quick", "--steps", "1300", "--episodes", "2", "--out", str(tmp_path)]
    assert run.main(words) == 0
    printed = capsys.readouterr().out
    assert "of 1,300 decisions" in printed and "gains at 5/8/10" in printed
    assert f"{run.ENV_ID}, from random weights: 1,300 decisions" in printed
    assert f"agents/{run.AGENT.rpartition('.')[2]}.py" in printed.splitlines()[1]
    assert f"Picture: {tmp_path}/first_command.png" in printed
    for command in ("evaluate", "plot", "render"):
        assert any(line.startswith(f"  servegym {command} ") for line in printed.splitlines())
    curve = list(csv.DictReader((tmp_path / "first_command_curve.csv").open()))
    drawn = [row for row in curve if row["policy"] == "trained"]
    steps = [int(row["decisions"]) for row in drawn]
    assert steps[0] == 0 and steps[-1] >= 1300 and steps == sorted(steps)
    assert 0 <= float(drawn[0]["avg_qos"]) < 1 and float(drawn[0]["cpu_s"]) == 0
    table = list(csv.DictReader((tmp_path / "first_command.csv").open()))
    assert len(table) == 3 * 7 and {row["rate"] for row in table} == {"5.0", "8.0", "10.0"}
    assert (tmp_path / "first_command.png").read_bytes()[:8] == PNG
    assert (tmp_path / "training.log").stat().st_size > 0
    checkpoint = tmp_path / "last.safetensors"
    arguments = ["evaluate", "servegym/LLMRouting-v1", "--policy", str(checkpoint)]
    arguments += ["--episodes", "2", "--set", "episode_requests=30"]
    result = servegym(*arguments)
    assert result.exit_code == 0 and "sac_rows" in result.output, result.output


def test_a_training_that_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "BASELINES", ())
    command = [
        sys.executable,
        "-c",
        "import time; time.sleep(0.2); raise SystemExit('it broke')",
    ]
    with pytest.raises(RuntimeError, match="it broke"):
        run.measure(command, 10, tmp_path, 1, True)


WAITS = """
import signal, sys, time
def end(number, _):
    open("saved", "w").write(str(number))
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_training_by_itself_and_is_told(tmp_path, monkeypatch, capsys, number):
    """As often as it comes: `timeout` sends one to a program and one to its group."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "BASELINES", ("random",))
    monkeypatch.setattr(run, "training_command", lambda *_: [sys.executable, "-c", WAITS])

    def interrupted(policy):
        log = tmp_path / "runs" / "train" / "training.log"
        while "ready" not in log.read_text():
            time.sleep(0.01)
        (log.parent / "last.safetensors").touch()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr(run, "validate", interrupted)
    before = signal.getsignal(number)
    assert run.main([]) == 128 + number
    assert (tmp_path / "saved").read_text() == str(int(number))
    told = capsys.readouterr().out.splitlines()[-1]
    folder = Path("runs", "train")
    assert told.startswith(f"interrupted: the policy so far is {folder}/last.safetensors")
    assert told.endswith(f"--policy {folder}/last.safetensors --set rate=8")
    assert signal.getsignal(number) is before
    assert run.take_folder(None, "train") == Path("runs", "train_2")


def test_no_run_is_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [str(run.take_folder(None, "train")) for _ in range(3)]
    assert names == ["runs/train", "runs/train_2", "runs/train_3"]
    monkeypatch.setattr(run, "train_and_compare", lambda *_: pytest.fail("work was done"))
    Path("runs/train_2/first_command.csv").touch()
    with pytest.raises(ValueError, match="runs/train_2 is not empty"):
        run.main(["--out", "runs/train_2"])


def evaluation(step, qos):
    return {"global_step": step, "charts/cpu_s": step / 100} | {f"eval/{k}": qos for k in run.KEYS}


def rows_of(qos):
    return [
        {"policy": name, "rate": rate, "avg_qos": value - rate / 100}
        for name, values in qos.items()
        for rate in run.RATES
        for value in values
    ]


OTHERS = {name: [0.4, 0.5, 0.6] for name in run.BASELINES}


def test_the_table_fits_100_columns_and_the_picture_is_drawn(capsys):
    rows = rows_of(OTHERS) + rows_of({"trained": [0.62, 0.63, 0.67]})
    table = run.summarise_comparison(rows)
    curve = run.learning_curve([evaluation(0, 0.2), evaluation(400, 0.7)])
    curve += [{"policy": n, "cpu_s": None, "avg_qos": 0.4} for n in OTHERS]
    notes = run.findings(table, curve)
    assert notes[-1].endswith("(.400) between 0 and 400 decisions (0.0 to 4.0 CPU s)")
    run.print_comparison(table, [0.75] * 3, notes)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for name in ("trained", "least_outstanding", "random", "ceiling"):
        assert sum(line.split()[:1] == [name] for line in lines) == 1
    assert run.plot(curve, table)[:8] == PNG


def test_gains_are_over_the_best_heuristic_by_its_interval():
    rows = rows_of({"good": [0.65, 0.66, 0.67], "bad": [0.1, 0.2, 0.3]})
    trained = rows_of({"trained": [0.66, 0.67, 0.68]})
    for found in run.findings(run.summarise_comparison(rows + trained), []):
        assert "trained is above the best, good: +.0100 [+.0100, +.0100]" in found
    trained = rows_of({"trained": [0.64, 0.66, 0.69]})
    found = run.findings(run.summarise_comparison(rows + trained), [])
    assert "trained is not distinguished from the best, good" in found[0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--steps", "0"], "--steps"),
        (["--episodes", "0"], "--episodes"),
        (["--out", "/proc/x/y"], "/proc/x"),
    ],
)
def test_bad_arguments(argv, named):
    with pytest.raises((ValueError, OSError), match=named):
        run.main(argv)
