"""What the expert placement environment owes to Gymnasium and to its users, and shows them."""

import copy

import numpy as np
import pytest

import servegym  # noqa: F401 - registers the ids
from servegym.envs.expert_placement.cluster import build_cluster
from servegym.envs.expert_placement.config import LEARNING
from servegym.envs.expert_placement.decode import (
    decode_budget,
    decode_heights,
    decode_scores,
    repair_placement,
)
from servegym.envs.expert_placement.env import ExpertPlacementEnv
from servegym.envs.expert_placement.vector_env import ExpertPlacementVectorEnv

from ...nested import assert_same
from .test_kernel_reference import random_placement

SHORT = {"model": "toy", "epochs": 3, "epoch_s": 20.0, "mean_interarrival_s": 2.0}


def make(mode="layer_budget", **kwargs):
    return ExpertPlacementEnv(**(SHORT | {"action_mode": mode} | kwargs))


def actions(env, count, seed=0):
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def test_bad_actions_of_a_batch_are_refused_before_any_system_moves():
    envs = ExpertPlacementVectorEnv(2, **SHORT)
    envs.reset(seed=0)
    good = {"migrate": np.ones(2, int), "plan": np.ones((2, 3, 4), np.float32)}
    bad_row = good["plan"].copy()
    bad_row[1, 0, 0] = np.nan
    for action, word in (
        (good["plan"], "actions is a ndarray"),
        ({"migrate": good["migrate"]}, r"keys \['migrate'\]"),
        (good | {"plan": np.ones((2, 3, 5))}, r"system 0: action\['plan'\] must be numbers"),
        (good | {"plan": bad_row}, "system 1: .* must be finite"),
    ):
        with pytest.raises(ValueError, match=word):
            envs.step(action)
        assert [episode.epoch for episode in envs.batch.episodes] == [0, 0]
    envs.step(good)
    assert [episode.epoch for episode in envs.batch.episodes] == [1, 1]


def test_rewards_sum_to_minus_the_total_latency():
    env = make(epochs=5)
    for seed in range(3):
        env.reset(seed=seed)
        total = 0.0
        for move in actions(env, 5, seed):
            _, reward, ended, _, info = env.step(move)
            total += reward
        assert ended
        log = env.request_log()
        latency = log["finish_s"] - log["arrival_s"]
        assert not np.isnan(latency).any()
        assert total == pytest.approx(-latency.sum() / env.problem.expected_arrivals.sum())
        kpis = info["episode_kpis"]
        assert kpis["mean_latency_s"] == pytest.approx(latency.mean())
        assert kpis["requests"] == len(log) > 50


def test_keeping_costs_and_moves_nothing():
    env = make("placement")
    observation, _ = env.reset(seed=0)
    start = observation["placement"]
    assert observation["counts"].sum() > 0, "the first counts come from the history"
    for _ in range(3):
        observation, _, _, _, info = env.step({"migrate": 0, "plan": 1 - start})
        assert not info["adopted"]
        assert_same(observation["placement"], start)
    assert info["episode_kpis"]["expert_loads"] == 0
    env.reset(seed=0)
    assert not env.step({"migrate": 1, "plan": start})[4]["adopted"], "the plan is what is there"


def test_the_history_has_other_prompts():
    for split in ("train", "val", "eval"):
        problem = make(split=split).problem
        rows, history = (set(np.concatenate(x)) for x in (problem.rows, problem.history_rows))
        assert rows and history and not rows & history


@pytest.mark.parametrize(
    "kwargs, word",
    [
        ({"mean_interarrival_s": (1.0, 2.0)}, "each of the 3"),
        ({"replica_choice": "consolidate", "scenario": "paper_testbed"}, "got .per_expert."),
        ({"execution": "forward", "serving": "offload"}, "collaborative"),
        ({"cluster_kwargs": {"nic": 3}}, "cluster_kwargs"),
        ({"cluster_kwargs": {"slots": [1, 1, 1, 1]}}, "bytes are missing"),
        ({"rotate_s": 1e-300}, "rotate_s=1e-300"),
    ],
)
def test_bad_arguments_are_named(kwargs, word):
    with pytest.raises(ValueError, match=word):
        make(**kwargs)


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b"])
def test_the_models_serve_recorded_prompts(model):
    env = ExpertPlacementEnv(model=model, epochs=1, epoch_s=30.0, validate=True)
    env.reset(seed=0)
    move = actions(env, 1)[0] | {"migrate": 1}
    _, reward, ended, _, info = env.step(move)
    assert ended and reward < 0 and info["episode_kpis"]["requests"] > 0
    assert 0.0 < info["episode_kpis"]["local_token_ratio"] < 1.0


def test_the_arguments_to_learn_with_pay_the_logarithm_of_each_servers_latency():
    env = ExpertPlacementEnv(**(SHORT | LEARNING))
    moves = actions(env, 1)
    env.reset(seed=2)
    _, reward, ended, _, info = env.step(moves[0])
    assert ended and reward == pytest.approx(sum(info["reward_terms"].values()), rel=1e-14)
    log, own = env.request_log(), env.problem.arguments.epoch_s / 2.0  # arrivals expected
    for n in range(3):
        mine = log[log["server"] == n]
        latency_s = (mine["finish_s"] - mine["arrival_s"]).sum() / own
        term = info["reward_terms"][f"log_latency_server_{n}"]
        assert term == pytest.approx(-np.log(latency_s) / 3)
    # A server without requests is paid for the least latency.
    alone = ExpertPlacementEnv(**(SHORT | LEARNING | {"mean_interarrival_s": [1e9, 1.0, 1.0]}))
    alone.reset(seed=0)
    terms = alone.step(moves[0])[4]["reward_terms"]
    assert terms["log_latency_server_0"] == pytest.approx(-np.log(1e-3) * 1e-9 / 2, rel=1e-3)


@pytest.mark.parametrize("spare", [0, 1, 7])
def test_every_action_decodes_to_a_feasible_placement(spare):
    rng = np.random.default_rng(spare)
    for gpus in ((1, 1, 2), (3, 1), (2, 2, 2, 1)):
        total = sum(gpus)
        slots = np.full(total, 256 // total)
        slots[: 256 - slots.sum()] += 1
        slots[0] += spare
        cluster = build_cluster("mixtral-8x7b", gpus=gpus, slots=slots.tolist())
        for scale in (0.1, 1.0, 30.0):
            n = cluster.num_servers
            counts = rng.poisson(scale, (n, 32, 8))
            now = random_placement(rng, cluster)
            share = rng.random((n, 32)) ** scale
            for z in (
                decode_budget(cluster, share, counts, now),
                decode_budget(cluster, 0 * share, 0 * counts, now),
                decode_budget(cluster, share > 0.9, counts, now),
                decode_heights(cluster, share, counts, now),
                decode_heights(cluster, 0 * share, 0 * counts, now),
                decode_scores(cluster, rng.random((n, 32, 8)), counts, now),
                decode_scores(cluster, np.zeros((n, 32, 8)), counts, now),
                repair_placement(cluster, rng.random((total, 32, 8)) < 0.1 * scale, counts),
                repair_placement(cluster, np.zeros((total, 32, 8)), counts),
                repair_placement(cluster, np.ones((total, 32, 8)), counts),
            ):
                cluster.check_placement(z)
            np.testing.assert_array_equal(repair_placement(cluster, now, counts), now)


def test_the_text_says_who_holds_what():
    env = make("placement", epochs=4, render_mode="ansi")
    env.reset(seed=0)
    for move in actions(env, 2):
        env.step(move | {"migrate": int(env.batch.episodes[0].epoch == 0)})
    cluster, sim = env.problem.cluster, env.batch.episodes[0].simulator
    lines = env.render().splitlines()
    assert "edge_hetero, toy" in lines[0] and "decision 2 of 4" in lines[0]
    assert "1 changes" in lines[0] and f"{env.episode_kpis()['mean_latency_s']:.2f} s" in lines[0]
    assert len(lines) == 2 + cluster.num_servers
    view = cluster.server_view(sim.placement())
    for n, line in enumerate(lines[2:]):
        assert f"{view[n].sum()}/{cluster.cap[n]}" in line or cluster.gpus[n] > 1
        column = lines[1].index("experts of each layer")
        drawn = line[column : column + cluster.layers]
        for layer, mark in enumerate(drawn):
            share = view[n, layer].mean()
            assert (mark == "█") == (share == 1.0) and (mark == " ") == (share == 0.0)
