"""Arguments: bad ones are refused by name before anything runs; ranges and splits are drawn."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest

from servegym import hardware_profiles
from servegym.envs.llm_routing.env import LLMRoutingEnv

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
    ({"score_predictor": "learned", "catalog": "synthetic"}, ["learned", "table="]),
    ({"predictor_kwargs": {"score": {"tabel": 1}}}, ["predictor_kwargs['score']", "'table'"]),
    ({"arrivals": "trace", "arrivals_kwargs": {"path": "/nowhere.csv"}}, ["path='/nowhere.csv'"]),
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


def test_splits_draw_from_their_own_prompts():
    seen = {}
    for split in ("train", "val", "eval", "all"):
        env = LLMRoutingEnv(split=split, episode_requests=3000)
        env.reset(seed=0)
        seen[split] = set(env.batch.rows[0].tolist())
        assert seen[split] <= set(env.problem.catalog.rows(split).tolist())
    assert not seen["train"] & seen["eval"] and not seen["val"] & seen["eval"]
    assert seen["all"] - seen["train"] - seen["val"]
