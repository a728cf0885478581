"""What the routing environment tells: rewards and fates as in its log, nothing of what comes."""

import copy
import json
import math

import gymnasium as gym
import numpy as np
import pytest

import servegym
from servegym import hardware_profiles
from servegym.envs.llm_routing.core import held
from servegym.envs.llm_routing.env import LLMRoutingEnv

from ...nested import assert_same

GRAPH, FLAT, EXPERTS, SUMMARY = ROUTING_IDS = servegym.ENV_IDS[:4]
COMPLETED, DROPPED, REJECTED, FAILED = 1, 2, 3, 4
SHORT = {"num_experts": 3, "episode_requests": 25, "rate": 15.0}
ENGINES = [
    {"scheduler": "orca", "memory_policy": "reserve"},
    {"scheduler": "orca", "memory_policy": "paged"},
    {"scheduler": "chunked_prefill", "memory_policy": "reserve"},
    {"scheduler": "chunked_prefill", "memory_policy": "paged"},
]
OUTAGES = {"mean_time_to_failure_s": 2.0, "mean_time_to_repair_s": 1.0}
FAILING = {"failures": OUTAGES}
every_engine = pytest.mark.parametrize(
    "engine", ENGINES, ids=lambda e: "-".join(map(str, e.values()))
)
every_view = pytest.mark.parametrize(
    ("env_id", "engine"),
    [(GRAPH, engine) for engine in ENGINES] + [(env_id, ENGINES[3]) for env_id in ROUTING_IDS[1:]],
)


def make(env_id=GRAPH, **kwargs):
    return gym.make(env_id, **(SHORT | kwargs))


def random_actions(count, n=3, seed=0):
    return np.random.default_rng(seed).integers(0, n + 1, count).tolist()


@pytest.mark.parametrize("engine", [*ENGINES, FAILING], ids=lambda e: "-".join(map(str, e)))
def test_rewards_of_an_episode_sum_to_its_quality_of_service(engine):
    rewards = {"completed_qos": 0.0, "paid_forward": 0.0, "dense": 0.6}
    for seed, (reward, usual) in zip((0, 1, 0), rewards.items(), strict=True):
        env = make(reward=reward, rate=20.0, episode_requests=150, **engine)
        env.reset(seed=seed)
        steps = [env.step(a) for a in random_actions(150, seed=seed)]
        log = env.unwrapped.request_log()
        done = log["outcome"] == COMPLETED
        late = log["finish_s"] - log["arrival_s"] > 0.03 * np.maximum(log["output_tokens"], 1)
        total = float(np.sum(log["score"][done & ~late], dtype=np.float64))
        assert 0.0 < total < float(log["score"][done].sum())
        assert sum(step[1] for step in steps) == pytest.approx(total - usual * 150, abs=1e-9)
        kpis = steps[-1][4]["episode_kpis"]
        assert kpis["avg_qos"] == pytest.approx(total / 150, rel=1e-9)
        rates = {"drop_rate": DROPPED, "reject_rate": REJECTED, "failure_rate": FAILED}
        for name, outcome in rates.items():
            assert kpis.get(name, 0.0) == pytest.approx((log["outcome"] == outcome).mean()), name
        assert ("failures" in engine) == ("failure_rate" in kpis)


def in_system(state):
    """(expert, slot) of every request that runs or waits."""
    for n, records in enumerate(zip(state.expert, state.queue, strict=True)):
        running, waiting = held(*records)
        for i in running + waiting:
            yield n, i


def tokens(state, n, i):
    """Tokens that the request in slot i of expert n has by now."""
    r = state.slot[n, i]
    return int(state.expert[n]["emitted"] - r["origin"]) if r["decoding"] else int(r["generated"])


@every_view
def test_the_truth_about_unfinished_requests_does_not_show(env_id, engine):
    """Other scores and lengths of unfinished requests: same observation, mask and completions.

    Rewritten lengths end after the next arrival, so that what is seen there must be the same as
    well; only the rewards of those completed by then may tell.
    """
    random = np.random.default_rng(0)
    env = make(env_id, reward="completed_qos", rate=25.0, episode_requests=120, **engine).unwrapped
    twin = copy.deepcopy(env)
    table = twin.problem.table
    truth = table[:, :, 1:3].copy()
    env.reset(seed=1)
    rewritten = survivors = 0
    for action in random_actions(119, seed=2):
        before = env.clone_state()
        seen, mask = env._observation(), env.action_masks()
        now = env.step(action)
        after = env.clone_state()
        reached = {
            int(after.slot[n, i]["request"]): tokens(after, n, i) for n, i in in_system(after)
        }
        changed = copy.deepcopy(before)
        for n, i in in_system(changed):
            r = changed.slot[n, i]
            if int(r["request"]) in reached:
                r["score"] = random.random()
                r["output"] = reached[int(r["request"])] + 1 + random.integers(0, 300)
                survivors += 1
            rewritten += 1
        # The request at the router, if it is not done by the next arrival, and all later ones.
        row = before.rows[before.env["index"][0]]
        request = int(before.env["index"][0])
        if request in reached:
            table[row, :, 1] = random.random(3)
            table[row, :, 2] = reached[request] + 1 + random.integers(0, 300, 3)
        back, info = twin.restore_state(changed)
        assert_same(back, seen)
        assert_same(info["action_mask"].astype(bool), mask)
        then = twin.step(action)
        table[:, :, 1:3] = truth
        assert_same(then[:4], now[:4])
        assert_same(then[4], now[4])
    assert survivors > 100 and rewritten > survivors


@every_view
def test_other_arrivals_to_come_do_not_show(env_id, engine):
    random = np.random.default_rng(0)
    env = make(env_id, rate=25.0, episode_requests=60, **engine).unwrapped
    twin = copy.deepcopy(env)
    env.reset(seed=1)
    for action in random_actions(59, seed=2):
        index = env.unwrapped.clone_state().env["index"][0]
        before = env.clone_state()
        seen, mask = env._observation(), env.action_masks()
        changed = copy.deepcopy(before)
        changed.rows[index + 1 :] = random.permutation(changed.rows[index + 1 :])
        gaps = random.exponential(0.2, len(changed.arrivals) - index - 1)
        changed.arrivals[index + 1 :] = changed.arrivals[index] + np.cumsum(gaps)
        back, info = twin.restore_state(changed)
        assert_same(back, seen)
        assert_same(info["action_mask"].astype(bool), mask)
        # With the next arrival as it was, the step does not see those after it.
        changed.rows[index + 1] = before.rows[index + 1]
        changed.arrivals[index + 1] = before.arrivals[index + 1]
        changed.arrivals[index + 2 :] += 5.0
        twin.restore_state(changed)
        assert_same(twin.step(action), env.step(action))


A100 = "a100-80g-llama-3.1-8b"
CHUNKED = {"scheduler": "chunked_prefill"}

# What the strategies of tests/robustness do not say: the nearest valid name, and what arguments ask
# of one another. Arguments, then everything that the message has to hold.
BAD = [
    ({"profiles": "rtx4090"}, ["profiles='rtx4090'", "did you mean 'rtx4090-llama-3.1-8b'"]),
    ({"profiles": "edge-6-heterogenous"}, ["profiles=", "Did you mean", "'edge-6-heterogeneous'"]),
    ({"score_predictor": "learned", "catalog": "synthetic"}, ["learned", "table="]),
    ({"predictor_kwargs": {"score": {"tabel": 1}}}, ["predictor_kwargs['score']", "'table'"]),
    ({"num_experts": 13}, ["num_experts=13", "12 experts"]),
    ({"num_experts": 3, "profiles": [A100, A100]}, ["num_experts=3", "2 experts"]),
    ({"prefill_token_budget": 4, **CHUNKED}, ["prefill_token_budget=4", "running_capacity=5"]),
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
