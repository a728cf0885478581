"""The table and curves of what PPO learns on the serverless family."""

import json
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from servegym.agents import ppo_serverless  # noqa: E402
from servegym.baselines.registry import make_policy  # noqa: E402
from servegym.baselines.serverless_moe.system import ServerlessSystem  # noqa: E402
from servegym.experiments.evaluate import evaluate  # noqa: E402
from servegym.experiments.figures.beyond.serverless import learning  # noqa: E402
from servegym.experiments.output import read_rows  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402


def test_shares_of_a_constant_and_of_two_plans():
    constant = learning.shares([np.full((3, 5), 2)] * 4)
    assert (constant["repeated"], constant["plans"]) == (1.0, 1.0)
    assert all(constant[f"entropy_{part}"] == 0.0 for part in learning.PARTS)
    assert all(constant[f"commonest_{part}"] == 1.0 for part in learning.PARTS)
    first, second = np.zeros((2, 5), int), np.array([[1, 0, 0, 0, 0]] * 2)
    two = learning.shares([first, second, second, second])
    assert two["repeated"] == pytest.approx(2 / 3) and two["plans"] == 2
    assert two["commonest_b"] == 0.75 and two["commonest_z"] == 1.0
    assert two["entropy_b"] == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))


def test_share_of_a_gap_that_is_closed():
    rng = np.random.default_rng(0)
    rival = rng.normal(-0.6, 0.05, 20)
    ahead = rival + 0.1
    share, low, high = learning.closed(rival + 0.06, rival, ahead)
    assert (share, low, high) == pytest.approx((0.6, 0.6, 0.6))  # the same in every episode
    seeds = np.stack([rival + gain for gain in (0.05, 0.06, 0.07)])
    share, low, high = learning.closed(seeds, rival, ahead)  # Student's t over the trainings
    half = 4.303 * 0.1 / np.sqrt(3)
    assert (share, low, high) == pytest.approx((0.6, 0.6 - half, 0.6 + half), abs=1e-3)
    share, low, high = learning.closed(rival + rng.normal(0.06, 0.02, 20), rival, ahead)
    assert low < share < high and high - low < 0.4


def test_curves(tmp_path):
    (tmp_path / "seed_1").mkdir()
    entries = [
        {"global_step": 10, "charts/reward": -1.0, "losses/entropy": 2.0},
        {"global_step": 20, "charts/reward": -0.5, "losses/entropy": 1.0, "eval/score": -0.4},
        {"global_step": 30, "charts/reward": -0.3, "losses/entropy": 0.5, "eval/score": -0.2},
    ]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (tmp_path / "seed_1" / "metrics.jsonl").write_text(text)
    found = {(r["step"], r["quantity"]): r["value"] for r in learning.curves(tmp_path)}
    assert found == {
        (20, "val_reward"): -0.4,
        (20, "train_reward"): -0.75,
        (20, "entropy"): 1.5,
        (30, "val_reward"): -0.2,
        (30, "train_reward"): -0.3,
        (30, "entropy"): 0.5,
    }


def test_table_and_figure(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    run = ppo_serverless.train(
        ppo_serverless.Args(
            set=("episode_requests=10",),
            teacher="",
            num_envs=8,
            group_size=2,
            num_steps=4,
            total_timesteps=64,
            eval_episodes=2,
            width=8,
            out_dir=str(runs),
            run_name="seed_1",
        )
    )
    assert run.exists()
    monkeypatch.setattr(learning, "BASELINES", ("mix", "keep_alive", "lookahead"))
    monkeypatch.setattr(learning, "RIVALS", ("mix",))
    monkeypatch.setattr(learning, "measure", partial(learning.measure, episode_requests=10))
    given = ["--out", str(tmp_path), "--episodes", "3", "--figure", "baselines", "learning"]
    assert learning.main([*given, "--checkpoints", str(runs)]) == 0
    rows = {row["policy"]: row for row in read_rows(tmp_path / "learning.csv")}
    rivals = read_rows(tmp_path / "learning_baselines.csv")
    assert len(rivals) == 9
    ours, mix, ahead = (
        np.array([row["mean_reward"] for row in source if row["policy"] == name])
        for source, name in (
            (learning.measure(learning.load_policy(run), 0, 3), "ppo_serverless"),
            (rivals, "mix"),
            (rivals, "lookahead"),
        )
    )
    row = rows["ppo_serverless seed_1"]
    assert row["mean_reward"] == pytest.approx(ours.mean())
    assert row["closed_mix"] == pytest.approx((ours - mix).mean() / (ahead - mix).mean())
    assert rows["ppo_serverless, all seeds"]["mean_reward"] == pytest.approx(ours.mean())
    assert (tmp_path / "learning.png").stat().st_size > 10_000
    first = read_record(tmp_path / "learning.csv")["notes"][0]
    apart = row["minus_mix_low"] > 0
    assert (first["rival"], first["apart"]) == ("mix", apart)


@pytest.mark.parametrize("name", ["random", "remoe_sticky", "gpu", "grid_optimum"])
def test_a_recorded_policy_plays_as_it_would_alone(name):
    """Draws, memory, the environment it asks for or is bound to: all as without the recorder."""
    kwargs = {"model": "toy", "episode_requests": 8, "split": "eval"}
    system = ServerlessSystem.from_kwargs(**kwargs)
    alone, inner = (make_policy(name, system, family="serverless_moe") for _ in range(2))
    recorder = learning.Recorder(inner, f"{name} recorded")
    rows = evaluate(learning.ENV_ID, [alone, recorder], 3, env_kwargs=kwargs)
    returns = {row["policy"]: [] for row in rows}
    for row in rows:
        returns[row["policy"]].append(row["return"])
        assert row["clairvoyant"] == (name == "grid_optimum")
    assert returns[name] == returns[f"{name} recorded"] and np.isfinite(returns[name]).all()
    assert np.array(recorder.actions).shape == (8, 3, 5)


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="checkpoints"):
        learning.main(
            ["--out", str(tmp_path), "--figure", "learning", "--checkpoints", str(tmp_path)]
        )
