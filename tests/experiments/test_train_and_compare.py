"""The run behind make train, at smoke size, and its checkpoint in the evaluator."""

import csv

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from servegym.experiments import train_and_compare as run  # noqa: E402
from servegym.experiments.cli import app  # noqa: E402


@pytest.mark.slow
def test_trains_compares_and_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRAIN_STEPS", "960")
    monkeypatch.setattr(run, "RATES", (5.0, 8.0))
    run.main(["--quick", "--episodes", "2", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "sac_han gains at 8/s" in printed and "drop %" in printed
    rows = list(csv.DictReader((tmp_path / "comparison.csv").open()))
    assert len(rows) == 2 * 2 * (len(run.BASELINES) + 1)
    by_episode = {}
    for row in rows:
        by_episode.setdefault((row["rate"], row["seed"]), set()).add(row["ceiling"])
    # The ceiling depends on the requests alone: one value an episode, whatever the policy.
    assert all(len(values) == 1 for values in by_episode.values())
    assert (tmp_path / "comparison.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

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
    assert "sac_han" in result.output


@pytest.mark.parametrize(
    "argv",
    [["--steps", "0"], ["--episodes", "0"], ["--checkpoint", "nowhere"], ["--out", "/proc/x/y"]],
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
