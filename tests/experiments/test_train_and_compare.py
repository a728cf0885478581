"""The run behind make train, at smoke size, and its checkpoint in the evaluator."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from servegym.agents.lib.evaluation import evaluate_router  # noqa: E402
from servegym.baselines.llm_routing.greedy_qos import GreedyQos  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.experiments import train_and_compare as run  # noqa: E402
from servegym.experiments.cli import app  # noqa: E402


@pytest.mark.slow
def test_trains_compares_and_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRAIN_STEPS", "960")
    monkeypatch.setattr(run, "RATES", (5.0, 8.0))
    run.main(["--quick", "--episodes", "2", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "trained gains at 8/s" in printed and "part 2 of 2" in printed
    rows = list(csv.DictReader((tmp_path / "comparison.csv").open()))
    assert len(rows) == 2 * 2 * (len(run.BASELINES) + 1)
    by_episode = {}
    for row in rows:
        by_episode.setdefault((row["rate"], row["seed"]), set()).add(row["ceiling"])
    # The ceiling depends on the requests alone: one value an episode, whatever the policy.
    assert all(len(values) == 1 for values in by_episode.values())
    curve = list(csv.DictReader((tmp_path / "first_command_curve.csv").open()))
    drawn = [int(row["decisions"]) for row in curve if row["policy"] == "trained"]
    assert len(drawn) >= 2 and drawn == sorted(drawn)
    for name in ("comparison", "first_command_curve"):
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    notes = json.loads((tmp_path / "first_command.json").read_text())["notes"]
    assert [one["rate"] for one in notes] == [5.0, 8.0]

    checkpoint = tmp_path / "router.safetensors"
    result = CliRunner().invoke(
        app,
        [
            "evaluate",
            "servegym/LLMRoutingFlat-v0",
            "--policy",
            str(checkpoint),
            "--policy",
            "random",
        ]
        + ["--episodes", "2", "--set", "episode_requests=30"],
    )
    assert result.exit_code == 0, result.output
    assert "rpi" in result.output


def test_a_cluster_is_for_the_rollouts_and_a_wrong_one_is_refused_first(tmp_path, capsys):
    commands = run.training_commands(100, 10, 1, tmp_path, False, "local:2")
    assert ["--ray" in words for words in commands] == [False, True]
    assert commands[1][commands[1].index("--ray") + 1] == "local:2"
    with pytest.raises(SystemExit):
        run.main(["--ray", "remote", "--out", str(tmp_path / "new")])
    assert "ray is 'remote'; allowed are 'auto'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_lines_are_on_the_episodes_of_the_training_evaluation():
    system = RoutingSystem.from_kwargs()
    greedy = GreedyQos(system)
    wanted = evaluate_router(greedy.act, run.ENV_ID, {}, (9.0, 5.0), run.VALIDATION_EPISODES, 500)[
        "eval/avg_qos"
    ]
    assert run.validation_qos("greedy_qos", (9.0, 5.0)) == pytest.approx(wanted, rel=1e-6)


def test_points_of_both_runs_follow_one_another(tmp_path):
    assert run.read_points(tmp_path) == [[(0, 0.0)], []]
    for name, rows in (
        ("search", ['{"global_step": 50, "eval/avg_qos": 0.2}', '{"global_step": 100}']),
        ("rollouts", ['{"charts/decisions": 30, "eval/avg_qos": 0.4}', '{"charts/deci']),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows))
    # What follows the last end of a line is not read: it may be half written.
    assert run.read_points(tmp_path) == [[(0, 0.0), (50, 0.2)], [(80, 0.4)]]


def test_gains_are_over_the_best_heuristic_by_its_interval():
    qos = {"trained": [0.66, 0.67, 0.68], "good": [0.65, 0.66, 0.67], "bad": [0.1, 0.2, 0.3]}
    rows = [
        {
            "policy": name,
            "rate": 5.0,
            "seed": k,
            "avg_qos": value,
            "training": 1 if name == "trained" else None,
        }
        for name, values in qos.items()
        for k, value in enumerate(values)
    ]
    table = run.summarise_comparison(rows, [5.0])
    assert [row["policy"] for row in table] == list(qos)
    np.testing.assert_allclose([row["qos"] for row in table], [0.67, 0.66, 0.2])
    (found,) = run.findings(table, [5.0])
    assert (found["best"], found["verdict"]) == ("good", "above")
    assert found["gain"] == pytest.approx(0.01) and found["gain_low"] == pytest.approx(0.01)
    # A second training that is worse by .03 takes the gain to the middle and widens the interval.
    rows += [row | {"training": 2, "avg_qos": row["avg_qos"] - 0.03} for row in rows[:3]]
    (found,) = run.findings(run.summarise_comparison(rows, [5.0]), [5.0])
    assert found["gain"] == pytest.approx(-0.005) and found["gain_low"] < -0.01
    assert found["verdict"] == "not distinguished from"


@pytest.mark.parametrize(
    "argv",
    [
        ["--steps", "0"],
        ["--labels", "0"],
        ["--episodes", "0"],
        ["--checkpoint", "nowhere"],
        ["--out", "/proc/x/y"],
    ],
)
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(argv)
    assert stop.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_bad_checkpoint_is_refused(tmp_path):
    fake = tmp_path / "fake.safetensors"
    fake.write_bytes(b"not a checkpoint")
    result = CliRunner().invoke(
        app, ["evaluate", "servegym/LLMRouting-v0", "--policy", str(fake), "--episodes", "1"]
    )
    assert result.exit_code == 2
    assert "fake.safetensors" in result.stderr and "Traceback" not in result.output
