"""Training with RLlib on a local Ray: remote sampling, the checkpoint, and its evaluation."""

import csv
import json
import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="RLlib needs torch")
pytest.importorskip("ray.exceptions", reason="Ray is not installed: pip install 'serve-gym[ray]'")
pytest.importorskip("ray.rllib", reason="RLlib is not installed: pip install 'serve-gym[ray]'")

import ray
import torch

from servegym.experiments.cluster import rllib as ray_rllib
from servegym.experiments.cluster import rllib_policy as ray_rllib_policy
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate, make_envs

from .settings import PLACEMENT

torch.set_num_threads(1)
pytestmark = [pytest.mark.usefixtures("two_workers"), pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = [
    "--iterations",
    "2",
    "--batch",
    "120",
    "--num-envs",
    "2",
    "--width",
    "16",
    "--episodes",
    "3",
    "--ray",
    "auto",
]


def table(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def test_routing_is_trained_saved_and_evaluated(tmp_path):
    """Two sampling environments in a process of their own; the checkpoint acts as it should."""
    words = ["servegym/LLMRoutingFlat-v1", "--set", "num_experts=3", "--set", "rate=8"]
    words += ["--set", "episode_requests=30", "--out", str(tmp_path), *SMALL]
    assert ray_rllib.main(words) == 0
    curve = table(tmp_path / "rllib_ppo_curve.csv")
    assert [int(row["steps"]) for row in curve] == [120, 240]
    assert all(-30.0 <= float(row["episode_return_mean"]) <= 30.0 for row in curve)
    kwargs = {"num_experts": 3, "rate": 8, "episode_requests": 30}
    rows = {row["policy"]: row for row in table(tmp_path / "rllib_ppo.csv")}
    assert list(rows) == ["rllib_ppo", "untrained", "random", "shortest_queue", "greedy_qos"]
    wanted = evaluate("servegym/LLMRouting-v1", ["greedy_qos"], 3, env_kwargs=kwargs)
    mean = np.mean([row["avg_qos"] for row in wanted])
    assert float(rows["greedy_qos"]["avg_qos_mean"]) == pytest.approx(mean)
    envs = make_envs("servegym/LLMRoutingFlat-v1", 4, kwargs)
    policy = ray_rllib_policy.RLlibPolicy(tmp_path / "rllib_ppo", envs.single_action_space)
    policy.reset(4, seed=0)
    seen, info = envs.reset(seed=[0, 1, 2, 3])
    free = policy.act(seen, info["action_mask"])
    mask = np.ones((4, 4), np.int8)
    mask[np.arange(4), free] = 0
    again = policy.act(seen, mask)
    assert (again != free).all() and mask[np.arange(4), again].all()
    record = json.loads((tmp_path / "rllib_ppo.json").read_text())
    assert set(record["notes"][0]["better_than"]) == {"random", "untrained"}
    assert record["versions"]["ray"] == ray.__version__
    from ray.rllib.algorithms.algorithm import Algorithm

    restored = Algorithm.from_checkpoint(str(tmp_path / "rllib_ppo"))
    weights = restored.get_module().get_state()
    restored.stop()
    first = ray_rllib_policy.RLlibPolicy(tmp_path / "rllib_ppo_untrained", envs.single_action_space)
    before = first.module.get_state()
    assert any(not np.array_equal(before[key], weights[key]) for key in weights)
    own = policy.module.get_state()  # the critic's as well
    assert weights and all(np.array_equal(own[key], weights[key]) for key in weights)


def test_servers_share_a_policy_and_are_evaluated_on_the_same_episodes(tmp_path):
    words = ["servegym/expert_placement-v0", "--set", "model=toy", "--set", "epochs=6"]
    words += ["--set", "epoch_s=5.0", "--out", str(tmp_path), *SMALL, "--batch", "24"]
    assert ray_rllib.main(words) == 0
    curve = table(tmp_path / "rllib_ppo_curve.csv")
    assert len(curve) == 2 and all(float(row["episode_return_mean"]) < 0 for row in curve)
    rows = {row["policy"]: row for row in table(tmp_path / "rllib_ppo.csv")}
    assert list(rows) == ["rllib_ppo", "untrained", "random", "keep", "uniform", "whole_layer"]
    assert all(math.isfinite(float(row["mean_latency_s"])) for row in rows.values())
    env = ray_rllib_policy.make_parallel(PLACEMENT)
    policy = ray_rllib_policy.RLlibPolicy(
        tmp_path / "rllib_ppo", env.action_space("server_0"), ray_rllib_policy.SHARED
    )
    first, _ = env.reset(seed=1)
    found = policy.act(np.stack(list(first.values())))
    for n, agent in enumerate(env.agents):
        action = {key: part[n] for key, part in found.items()}
        assert env.action_space(agent).contains(action)


def test_servers_that_never_move_are_paid_as_the_baseline_that_keeps():
    """What makes the rows comparable: the same requests, and rewards that add up."""

    class Still:
        name = "still"

        def act(self, seen):
            return {
                "migrate": np.zeros(len(seen), np.int64),
                "plan": np.zeros((len(seen), 4), np.float32),
            }

    rows = ray_rllib_policy.play(Still(), PLACEMENT, 3)
    shared = ray_rllib_policy.play(Still(), {**PLACEMENT, "shared_reward": True}, 3)
    assert [row["return"] for row in shared] == pytest.approx([row["return"] for row in rows])
    wanted = evaluate("servegym/ExpertPlacement-v0", ["keep"], 3, env_kwargs=PLACEMENT)
    for row, other in zip(rows, wanted, strict=True):
        assert row["seed"] == other["seed"] >= DEFAULT_SEED
        for key in ("mean_latency_s", "p99_latency_s", "requests", "network_bytes"):
            assert row[key] == pytest.approx(other[key], rel=1e-12)
        assert row["return"] == pytest.approx(other["return"])
