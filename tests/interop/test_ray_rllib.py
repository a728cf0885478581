"""Training with RLlib on a local Ray: remote sampling, the checkpoint, and its evaluation."""

import csv
import json
import os

import numpy as np
import pytest

pytest.importorskip("torch", reason="RLlib needs torch")
pytest.importorskip("ray.exceptions", reason="Ray is not installed: pip install '.[ray]'")
pytest.importorskip("ray.rllib", reason="RLlib is not installed: pip install '.[ray]'")

import ray
import torch

from servegym.experiments.cluster import rllib as ray_rllib
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.play import make_envs

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
    assert list(rows) == ["rllib_ppo", "random", "shortest_queue", "greedy_qos"]
    wanted = evaluate("servegym/LLMRouting-v1", ["greedy_qos"], 3, env_kwargs=kwargs)
    mean = np.mean([row["avg_qos"] for row in wanted])
    assert float(rows["greedy_qos"]["avg_qos_mean"]) == pytest.approx(mean)
    envs = make_envs("servegym/LLMRoutingFlat-v1", 4, kwargs)
    policy = ray_rllib.RLlibPolicy(tmp_path / "rllib_ppo", envs.single_action_space)
    policy.reset(4, seed=0)
    seen, info = envs.reset(seed=[0, 1, 2, 3])
    free = policy.act(seen, info["action_mask"])
    mask = np.ones((4, 4), np.int8)
    mask[np.arange(4), free] = 0
    again = policy.act(seen, mask)
    assert (again != free).all() and mask[np.arange(4), again].all()
    record = json.loads((tmp_path / "rllib_ppo.json").read_text())
    assert record["versions"]["ray"] == ray.__version__
    from ray.rllib.algorithms.algorithm import Algorithm

    restored = Algorithm.from_checkpoint(str(tmp_path / "rllib_ppo"))
    weights = restored.get_module().get_state()
    restored.stop()
    own = policy.module.get_state()  # the critic's as well
    assert weights and all(np.array_equal(own[key], weights[key]) for key in weights)


def test_an_algorithm_outlives_its_sampling_process(tmp_path):
    """RLlib starts the process again that samples; training goes on."""
    args = ray_rllib.parser().parse_args(["servegym/LLMRoutingFlat-v1", *SMALL])
    algorithm = ray_rllib.ppo(
        "servegym/LLMRoutingFlat-v1", {"num_experts": 3, "episode_requests": 30}, args
    ).build_algo()
    try:
        before = algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"]
        assert algorithm.env_runner_group.num_healthy_remote_workers() == 1
        pids = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: os.getpid(), local_env_runner=False
        )
        os.kill(pids[0], 9)
        after = before
        while after <= before:  # it takes a while to come back
            after = algorithm.train()["env_runners"].get("num_env_steps_sampled_lifetime", 0)
        (pid,) = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: os.getpid(), local_env_runner=False
        )
        assert pid != pids[0]
    finally:
        algorithm.stop()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["servegym/LLMRouting-v1"], "Did you mean 'servegym/LLMRoutingFlat-v1'"),
        (["servegym/LLMRoutingFlat-v1", "--iterations", "0"], "iterations is 0"),
        (["servegym/LLMRoutingFlat-v1", "--env-runners", "-1"], "env_runners is -1"),
        (["servegym/LLMRoutingFlat-v1", "--ray", "remote"], "ray is 'remote'"),
        (["servegym/LLMRoutingFlat-v1", "--set", "rates=8"], "rates"),
    ],
)
def test_bad_arguments_stop_before_training(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_rllib, "cluster", lambda *a: pytest.fail("a cluster was asked"))
    with pytest.raises((ValueError, TypeError), match=message):
        ray_rllib.main([*words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no policy in"):
        ray_rllib.RLlibPolicy(tmp_path, None)
