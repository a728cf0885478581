"""The experiment around the placement agents: budgets, controls, resuming, verdicts."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from servegym.baselines.expert_placement.system import PlacementSystem  # noqa: E402
from servegym.envs.expert_placement.config import build_problem  # noqa: E402
from servegym.envs.expert_placement.env import ExpertPlacementEnv  # noqa: E402
from servegym.experiments.figures.beyond.placement import learning as placement_learning  # noqa: E402
from servegym.experiments.figures.beyond.placement.learning import (  # noqa: E402
    Control,
    calls_a_request,
    main,
    training_calls,
)


@pytest.mark.parametrize("mix", ["by_server", "mixed"])
def test_calls_of_a_request_are_those_simulated(mix):
    env = ExpertPlacementEnv(model="toy", epochs=1, mean_interarrival_s=1.0, task_mix=mix)
    env.reset(seed=0)
    plan = np.ones((3, 4), np.float32)
    env.step({"migrate": 1, "plan": plan})
    simulated = int(env.system.simulator.state.meta["calls"][0])
    requests = env.episode_kpis()["requests"]
    assert calls_a_request(env.problem) == pytest.approx(simulated / requests, rel=0.01)
    args = SimpleNamespace(
        set=("model=toy", "epoch_s=50"),
        num_envs=5,
        epochs=1,
        total_timesteps=12,
        eval_every=4,
        eval_episodes=2,
    )
    policy = SimpleNamespace(args=args, start=None)
    # Two updates of five decisions, evaluations of two episodes of twelve at 0, 5 and 10.
    decisions = (2 * 5 + 3 * 2 * 12) * 15 * calls_a_request(env.problem)
    assert training_calls(policy) == pytest.approx(decisions, rel=0.05)
    policy.start = SimpleNamespace(calls=1e9)
    assert training_calls(policy) == pytest.approx(decisions + 1e9, rel=1e-3)


def test_controls_place_once_by_the_decoder_alone():
    env = ExpertPlacementEnv(model="toy", epochs=2, action_mode="expert_score")
    seen, _ = env.reset(seed=0)
    rows = {name: part[None].repeat(2, 0) for name, part in seen.items()}
    plans = {}
    for name in ("start", "random", "constant"):
        control = Control(name, env.problem.cluster)
        control.reset(2, seed=1)
        action = control.act(rows)
        plans[name] = action["plan"]
        assert action["migrate"].tolist() == [1, 1]
        assert env.action_space["plan"].contains(action["plan"][0])
        rows["progress"] += 0.5
        assert control.act(rows)["migrate"].tolist() == [0, 0]
        rows["progress"] -= 0.5
    assert np.ptp(plans["constant"]) == 0
    assert (plans["random"][0] != plans["random"][1]).any()
    assert (plans["start"][0] == plans["start"][1]).all()


def test_the_findings_compare_agents_with_their_rivals():
    def found_of(latency, number=5):
        episodes = [
            {"policy": name, "mean_latency_s": value + 0.01 * k}
            for name, value in latency.items()
            for k in range(number)
        ]
        rows = [
            {
                "policy": name,
                "mean_latency_s": value,
                "mean_latency_s_low": value - 0.1,
                "mean_latency_s_high": value + 0.1,
            }
            for name, value in latency.items()
        ]
        notes = placement_learning._findings(rows, episodes)
        return {(one.get("policy"), one.get("against")): one for one in notes}

    won = found_of({"prism": 10.0, "whole_layer": 5.0, "start": 5.0, "ppo_placement": 4.0})
    one = won["ppo_placement", "whole_layer"]
    assert one["change_pct"][0] == pytest.approx(-19.9, abs=0.05)
    assert one["verdict"] == "lower; intervals apart" and one["episodes"] == 5
    assert not any("as_their_start" in one for one in won.values())
    same = found_of(
        {
            "prism": 9.0,
            "whole_layer": 5.0,
            "best_start": 4.0,
            "start": 4.0,
            "ppo_placement": 4.0,
            "mappo_placement": 4.1,
        }
    )
    assert same["best_start", "whole_layer"]["change_pct"][0] == pytest.approx(-19.9, abs=0.05)
    assert same[None, None]["as_their_start"] == ["ppo_placement"]
    lost = found_of({"whole_layer": 5.0, "ppo_placement": 5.05})["ppo_placement", "whole_layer"]
    assert lost["change_pct"][0] == pytest.approx(1.0, abs=0.05) and lost["verdict"] == "not lower"
    near = found_of({"whole_layer": 5.0, "ppo_placement": 4.95, "latency_dp_usual": 4.97})
    verdict = near["ppo_placement", "whole_layer"]["verdict"]
    assert verdict == "lower on the same episodes; intervals of the means overlap"
    usual = near["ppo_placement", "latency_dp_usual"]["change_pct"][0]
    assert usual == pytest.approx(-0.4, abs=0.05)
    few = found_of({"whole_layer": 5.0, "ppo_placement": 4.0}, number=4)
    assert few["ppo_placement", "whole_layer"]["verdict"].endswith("too few for a verdict")


def test_rivals_of_changing_tasks_know_their_mix():
    kwargs = {"model": "toy", "epochs": 1, "action_mode": "placement"}
    for rotate_s, shares in ((0.0, [1, 0]), (10.0, [0.5, 0.5])):
        problem = build_problem(**kwargs, rotate_s=rotate_s)
        described = PlacementSystem.from_problem(problem)
        tasks = len(described.task_counts)
        wanted = described.task_counts[0] if rotate_s == 0 else described.task_counts.mean(axis=0)
        np.testing.assert_allclose(placement_learning.usual_counts(described)[0], wanted)
        assert tasks > 1 and shares[0] >= described.long_run_shares.max() - 1e-12
    fixed = placement_learning._latency_dp_usual(described)
    assert fixed.name == "latency_dp_usual" and fixed.placement.any(axis=0).all()


def test_a_repeated_command_plays_nothing_again(tmp_path, monkeypatch, capsys):
    toy = {"model": "toy"}
    real_problem, real_evaluate = placement_learning.build_problem, placement_learning.evaluate
    monkeypatch.setattr(
        placement_learning, "build_problem", lambda **kwargs: real_problem(**kwargs, **toy)
    )
    monkeypatch.setattr(
        placement_learning,
        "evaluate",
        lambda env_id, policies, episodes, seed, kwargs, num_envs: real_evaluate(
            env_id, policies, episodes, seed, {**kwargs, **toy}, num_envs
        ),
    )
    empty = tmp_path / "none"
    empty.mkdir()
    command = [
        "--quick",
        "--figure",
        "edge_hetero",
        "summary",
        "--out",
        str(tmp_path),
        "--checkpoints",
        str(empty),
        "--search-calls",
        "1e4",
        "--search-episodes",
        "1",
    ]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "edge_hetero random: 2/2" in first
    with open(tmp_path / "learning.csv", newline="") as stream:
        rows = {row["policy"]: row for row in csv.DictReader(stream)}
    assert {float(row["episodes"]) for row in rows.values()} == {1.0, 2.0}
    assert float(rows["whole_layer"]["mean_latency_s"]) > 0
    assert (tmp_path / "learning.png").stat().st_size > 5_000
    played = placement_learning.evaluate
    monkeypatch.setattr(placement_learning, "evaluate", None)
    assert main(command) == 0
    assert "edge_hetero random: 2/2" not in capsys.readouterr().out
    monkeypatch.setattr(placement_learning, "evaluate", played)
    command[-3] = "2e4"  # another budget: only the search is played again
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "latency_local_search: 1/1" in again and "random: 2/2" not in again
