"""Arguments: bad ones are refused by name before anything runs, good ones do what they say."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest

from servegym import hardware_profiles
from servegym.envs.llm_routing.env import LLMRoutingEnv
from servegym.envs.workloads import MalformedFileError

A100 = "a100-80g-llama-3.1-8b"
CHUNKED = {"scheduler": "chunked_prefill"}

# What the strategies of tests/robustness do not say: the nearest valid name, and what arguments ask
# of one another. Arguments, then everything that the message has to hold.
BAD = [
    ({"profiles": "rtx4090"}, ["profiles='rtx4090'", "did you mean 'rtx4090-llama-3.1-8b'"]),
    ({"profiles": "edge-6-heterogenous"}, ["profiles=", "Did you mean", "'edge-6-heterogeneous'"]),
    ({"profiles": "/nowhere/card.json"}, ["profiles='/nowhere/card.json'", "cannot be read"]),
    ({"models": ["gemma-7b-it"]}, ["models=", "at least 6"]),
    ({"models": ["vicuna-7b"] * 6}, ["'vicuna-7b'", "Did you mean 'vicuna-7b-v1.5'"]),
    ({"catalog_kwargs": {"pth": "x"}}, ["alpaca_eval_7b", "'pth'"]),
    ({"split": "evl"}, ["split='evl'", "Did you mean 'eval'"]),
    ({"scheduler": "chunked"}, ["scheduler='chunked'", "Did you mean 'chunked_prefill'"]),
    ({"score_predictor": "learned", "catalog": "synthetic"}, ["learned", "table="]),
    ({"predictor_kwargs": {"score": {"tabel": 1}}}, ["predictor_kwargs['score']", "'table'"]),
    ({"arrivals": "trace", "arrivals_kwargs": {"path": "/nowhere.csv"}}, ["path='/nowhere.csv'"]),
    ({"arrivals_kwargs": {"cv": 2.0}}, ["poisson", "'cv'"]),
    ({"num_expert": 3}, ["'num_expert'", "Did you mean 'num_experts'"]),
    ({"num_experts": 13}, ["num_experts=13", "12 experts"]),
    ({"num_experts": 3, "profiles": [A100, A100]}, ["num_experts=3", "2 experts"]),
    ({"num_experts": 40, "profiles": A100}, ["num_experts=40", "16 models"]),
    ({"prefill_token_budget": 4, **CHUNKED}, ["prefill_token_budget=4", "running_capacity=5"]),
    ({"prefix_caching": True}, ["prefix_caching=True", "chunked_prefill"]),
    ({"async_scheduling": True}, ["async_scheduling=True", "chunked_prefill"]),
    ({"max_output_tokens": 100_000}, ["max_output_tokens=100000", "KV tokens"]),
]


@pytest.mark.parametrize(("kwargs", "words"), BAD, ids=lambda x: str(x)[:40])
def test_bad_arguments_are_refused_by_name(kwargs, words):
    with pytest.raises(ValueError) as caught:
        LLMRoutingEnv(**kwargs)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def small_card(tmp_path, memory_bytes):
    profile = hardware_profiles.load("rtx4090-llama-3.1-8b").to_dict()
    profile["name"] = "small-card"
    profile["device"]["memory_bytes"] = memory_bytes
    path = tmp_path / "small-card.json"
    path.write_text(json.dumps(profile))
    return str(path)


def test_a_model_that_fits_no_card_is_refused(tmp_path):
    nothing = small_card(tmp_path, 12 * 10**9)  # less than the weights
    with pytest.raises(ValueError, match="profiles=.*no KV block fits"):
        LLMRoutingEnv(profiles=nothing)
    with pytest.raises(ValueError, match="profiles=.*small-card.json.*no KV block fits"):
        LLMRoutingEnv(profiles=[A100, nothing])
    # Weights fit with room for a few hundred tokens, but not for one answer of 600.
    little = small_card(tmp_path, 19_300_000_000)
    room = hardware_profiles.load(little).kv_capacity_tokens
    assert 400 < room < 600
    LLMRoutingEnv(profiles=little)
    with pytest.raises(ValueError, match=f"'small-card' has room for {room}.*output_tokens=600"):
        LLMRoutingEnv(profiles=little, max_output_tokens=600)


def test_a_prompt_that_never_fits_an_expert_is_masked_there(tmp_path):
    little = small_card(tmp_path, 19_300_000_000)
    env = LLMRoutingEnv(profiles=[A100, little], episode_requests=300)
    room = env.problem.profiles[1].kv_capacity_tokens // 16
    observation, info = env.reset(seed=0)
    seen = set()
    for _ in range(300):
        blocks = math.ceil((observation["request"][0, 0] + 300) / 16)
        assert info["action_mask"].tolist() == [1, 1, int(blocks <= room)]
        seen.add(blocks <= room)
        action = 0 if blocks <= room else 2
        observation, _, _, _, info = env.step(action)
        if action == 2:
            assert env.request_log()[-1]["outcome"] == 3
        assert info["action_mask"][0] == 1
        if len(env.request_log()) == 300:
            break
    assert seen == {True, False}


@pytest.mark.parametrize(
    "action", [-1, 4, 10**30, -(10**30), 2**63, np.int64(4), np.uint64(2**64 - 1)], ids=repr
)
def test_actions_out_of_range(action):
    env = LLMRoutingEnv(num_experts=3)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="out of range.*1 to 3"):
        env.step(action)


def test_whole_numbers_of_every_kind_are_actions():
    results = []
    for kind in (int, np.int8, np.uint64, np.array):
        env = LLMRoutingEnv(num_experts=3)
        env.reset(seed=0)
        for _ in range(9):
            result = env.step(kind(3))
        results.append((result[1], result[0]["experts"].tolist()))
    assert all(result == results[0] for result in results)


def run(env, episodes=1, seed=0):
    """Random play; the information of the last step."""
    random = np.random.default_rng(seed)
    for episode in range(episodes):
        env.reset(seed=seed if episode == 0 else None)
        ended = False
        while not ended:
            _, _, ended, _, info = env.step(random.integers(0, env.action_space.n))
    return info


def test_ranges_are_drawn_anew_for_every_episode():
    env = gym.make(
        "servegym/LLMRouting-v1",
        rate=(2.0, 50.0),
        latency_requirement_s=(0.01, 0.1),
        episode_requests=400,
    )
    rates, limits = [], []
    for _ in range(12):
        observation, _ = env.reset(seed=0 if not rates else None)
        arrivals = env.unwrapped.batch.arrivals[0]
        rates.append(len(arrivals) / arrivals[-1])
        limits.append(float(observation["latency_requirement"][0]))
    assert len(set(limits)) == 12 and 0.01 <= min(limits) < 0.04 and 0.06 < max(limits) <= 0.1
    assert 1.5 < min(rates) < 15 and 30 < max(rates) < 60
    fixed = gym.make("servegym/LLMRouting-v1", rate=(5.0, 5.0), latency_requirement_s=(0.05, 0.05))
    assert fixed.reset(seed=0)[0]["latency_requirement"][0] == np.float32(0.05)
    same = gym.make("servegym/LLMRouting-v1", rate=5.0)
    same.reset(seed=0)
    np.testing.assert_array_equal(
        fixed.unwrapped.batch.arrivals, same.unwrapped.batch.arrivals, "no draw for a number"
    )


def test_the_default_fleet_is_six_experts():
    env = LLMRoutingEnv()
    fleet = hardware_profiles.load_fleet("edge-6-heterogeneous")
    assert env.action_space.n == 7
    assert env.problem.models == fleet.models[:6]
    assert LLMRoutingEnv(profiles="edge-6-homogeneous").action_space.n == 7


def test_profiles_as_a_list_a_name_and_a_file(tmp_path):
    names = [A100, "l40s-llama-3.1-8b", A100]
    env = LLMRoutingEnv(profiles=names, episode_requests=50)
    assert [p.name for p in env.problem.profiles] == names and env.action_space.n == 4
    run(env)
    env = LLMRoutingEnv(profiles=A100, num_experts=4, episode_requests=50)
    assert [p.name for p in env.problem.profiles] == [A100] * 4
    run(env)
    path = small_card(tmp_path, 25_000_000_000)
    assert LLMRoutingEnv(profiles=[path]).problem.profiles[0].name == "small-card"
    models = ["chatglm2-6b", "gemma-7b-it", "chatglm2-6b"]
    env = LLMRoutingEnv(profiles=names, models=models)
    assert env.problem.models == tuple(models)
    np.testing.assert_array_equal(env.problem.table[:, 0], env.problem.table[:, 2])


def test_a_trace_is_replayed_at_the_rate_asked_for(tmp_path):
    path = tmp_path / "trace.csv"
    times = np.cumsum(np.tile([1.0, 3.0], 100))
    path.write_text("timestamp_s\n" + "".join(f"{t}\n" for t in times))
    env = LLMRoutingEnv(
        arrivals="trace", arrivals_kwargs={"path": str(path)}, rate=10.0, episode_requests=50
    )
    env.reset(seed=0)
    gaps = np.diff(env.batch.arrivals[0])
    short, long = np.isclose(gaps, 0.05, rtol=0.01), np.isclose(gaps, 0.15, rtol=0.01)
    assert short.sum() >= 20 and long.sum() >= 20
    assert (~short & ~long).sum() <= 1, "but for where the trace begins anew"
    path.write_text("timestamp_s\n1.0\nsoon\n")
    with pytest.raises(MalformedFileError, match=r"trace\.csv:3: field 'timestamp_s'"):
        LLMRoutingEnv(arrivals="trace", arrivals_kwargs={"path": str(path)})


def test_splits_draw_from_their_own_prompts():
    seen = {}
    for split in ("train", "val", "eval", "all"):
        env = LLMRoutingEnv(split=split, episode_requests=3000)
        env.reset(seed=0)
        seen[split] = set(env.batch.rows[0].tolist())
        assert seen[split] <= set(env.problem.catalog.rows(split).tolist())
    assert not seen["train"] & seen["eval"] and not seen["val"] & seen["eval"]
    assert seen["all"] - seen["train"] - seen["val"]


def test_predictors():
    tables = {
        kind: LLMRoutingEnv(score_predictor=kind, length_predictor=kind).problem.table
        for kind in ("exact", "zero", "confusion")
    }
    np.testing.assert_array_equal(tables["exact"][:, :, 3:], tables["exact"][:, :, 1:3])
    assert not tables["zero"][:, :, 3:].any()
    for table in tables.values():
        np.testing.assert_array_equal(table[:, :, :3], tables["exact"][:, :, :3])
    other = LLMRoutingEnv(predictor_seed=1).problem.table
    assert (other[:, :, 3] != tables["confusion"][:, :, 3]).mean() > 0.2
    assert LLMRoutingEnv(max_output_tokens=50).problem.table[:, :, [2, 4]].max() == 50


def test_the_network_delays_requests():
    for delay, size in ((0.005, 4), (0.0, 0), (0.5, 100)):
        env = LLMRoutingEnv(router_delay_s=delay, bytes_per_token=size, episode_requests=20)
        env.reset(seed=0)
        for _ in range(20):
            env.step(1)
        log = env.request_log()
        log = log[log["outcome"] == 1]
        expected = log["arrival_s"] + delay + log["prompt_tokens"] * size * 8 / 1e6
        np.testing.assert_allclose(log["available_s"], expected, rtol=0, atol=1e-9)
