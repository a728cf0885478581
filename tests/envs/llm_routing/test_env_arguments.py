"""Arguments: bad ones are refused by name before anything runs, good ones do what they say."""

import json
import math
import re

import gymnasium as gym
import numpy as np
import pytest

import servegym
from servegym import hardware_profiles
from servegym.envs.llm_routing.env import LLMRoutingEnv
from servegym.envs.llm_routing.vector_env import LLMRoutingVectorEnv
from servegym.envs.workloads import MalformedFileError

GRAPH, FLAT, EXPERTS = ROUTING_IDS = servegym.ENV_IDS[:3]
NAN, INF = math.nan, math.inf
A100 = "a100-80g-llama-3.1-8b"
CHUNKED = {"scheduler": "chunked_prefill"}

# Arguments, then everything that the message has to hold.
BAD = [
    # names, with the nearest valid one
    ({"profiles": "rtx4090"}, ["profiles='rtx4090'", "did you mean 'rtx4090-llama-3.1-8b'"]),
    ({"profiles": "edge-6-heterogenous"}, ["profiles=", "Did you mean", "'edge-6-heterogeneous'"]),
    ({"profiles": [A100, "l40s-llama"]}, ["profiles=", "did you mean 'l40s-llama-3.1-8b'"]),
    ({"profiles": []}, ["profiles=[]", "non-empty", "paper-linear"]),
    ({"profiles": 3}, ["profiles=3"]),
    ({"profiles": "/nowhere/card.json"}, ["profiles='/nowhere/card.json'", "cannot be read"]),
    ({"models": "gemma-7b-it"}, ["models='gemma-7b-it'", "list"]),
    ({"models": ["gemma-7b-it"]}, ["models=", "at least 6"]),
    ({"models": ["vicuna-7b"] * 6}, ["'vicuna-7b'", "Did you mean 'vicuna-7b-v1.5'"]),
    ({"catalog": "alpaca_eval"}, ["catalog='alpaca_eval'", "Did you mean 'alpaca_eval_7b'"]),
    ({"catalog": 3}, ["catalog=3", "synthetic"]),
    ({"catalog": "mix_instruct"}, ["mix_instruct", "path="]),
    ({"catalog_kwargs": {"pth": "x"}}, ["alpaca_eval_7b", "'pth'"]),
    ({"catalog_kwargs": 3}, ["catalog_kwargs=3", "mapping"]),
    ({"split": "test"}, ["split='test'", "'eval'"]),
    ({"split": "evl"}, ["Did you mean 'eval'"]),
    ({"reward": "qos_awre"}, ["reward='qos_awre'", "Did you mean 'qos_aware'"]),
    ({"penalty": "literally"}, ["penalty='literally'", "Did you mean 'literal'"]),
    ({"estimator": "predict"}, ["estimator='predict'", "Did you mean 'predicted'"]),
    ({"scheduler": "chunked"}, ["scheduler='chunked'", "Did you mean 'chunked_prefill'"]),
    ({"memory_policy": "page"}, ["memory_policy='page'", "Did you mean 'paged'"]),
    ({"score_predictor": "exactly"}, ["score_predictor='exactly'", "Did you mean 'exact'"]),
    ({"length_predictor": "exactly"}, ["length_predictor='exactly'", "Did you mean 'exact'"]),
    ({"score_predictor": None}, ["score_predictor=None"]),
    ({"score_predictor": "learned", "catalog": "synthetic"}, ["learned", "table="]),
    ({"buckets": "quantiles"}, ["buckets='quantiles'", "Did you mean 'quantile'"]),
    ({"predictor_kwargs": {"scores": {}}}, ["predictor_kwargs", "Did you mean 'score'"]),
    ({"predictor_kwargs": {"score": {"tabel": 1}}}, ["predictor_kwargs['score']", "'table'"]),
    ({"predictor_kwargs": 4}, ["predictor_kwargs=4"]),
    ({"arrivals": "poison"}, ["arrivals='poison'", "Did you mean 'poisson'"]),
    ({"arrivals": "trace"}, ["arrivals 'trace'", "path="]),
    ({"arrivals": "trace", "arrivals_kwargs": {"path": "/nowhere.csv"}}, ["path='/nowhere.csv'"]),
    ({"arrivals_kwargs": {"cv": 2.0}}, ["poisson", "'cv'"]),
    ({"arrivals": "gamma", "arrivals_kwargs": {"cv": -1.0}}, ["cv=-1.0"]),
    ({"arrivals_kwargs": [1]}, ["arrivals_kwargs=[1]", "mapping"]),
    ({"render_mode": "human"}, ["render_mode='human'", "ansi"]),
    ({"num_expert": 3}, ["'num_expert'", "Did you mean 'num_experts'"]),
    ({"lambda_": 3}, ["'lambda_'", "'rate'"]),
    # sizes
    *[
        ({name: value}, [f"{name}={value!r}", "whole number"])
        for name in (
            "num_experts running_capacity waiting_capacity prefill_token_budget block_size "
            "episode_requests max_output_tokens"
        ).split()
        for value in (0, -1, 2.5, 4.0, True, "3", NAN)
    ],
    ({"running_capacity": 257}, ["running_capacity=257", "256"]),
    ({"waiting_capacity": 257}, ["waiting_capacity=257", "256"]),
    ({"episode_requests": 10**12}, ["episode_requests=", "10000000"]),
    ({"predictor_seed": -1}, ["predictor_seed=-1"]),
    ({"predictor_seed": 1.0}, ["predictor_seed=1.0"]),
    ({"num_experts": 13}, ["num_experts=13", "12 experts"]),
    ({"num_experts": 3, "profiles": [A100, A100]}, ["num_experts=3", "2 experts"]),
    ({"num_experts": 40, "profiles": A100}, ["num_experts=40", "16 models"]),
    ({"prefill_token_budget": 4, **CHUNKED}, ["prefill_token_budget=4", "running_capacity=5"]),
    ({"prefix_caching": True}, ["prefix_caching=True", "chunked_prefill"]),
    ({"async_scheduling": True}, ["async_scheduling=True", "chunked_prefill"]),
    ({"async_scheduling": 1.5, **CHUNKED}, ["async_scheduling=1.5"]),
    ({"prefix_caching": "yes", **CHUNKED}, ["prefix_caching='yes'"]),
    ({"max_output_tokens": 100_000}, ["max_output_tokens=100000", "KV tokens"]),
    # rates, limits, network
    *[
        ({name: value}, [f"{name}={value!r}"])
        for name in ("rate", "latency_requirement_s", "bandwidth_bps")
        for value in (0, -1.0, NAN, INF, "5", None, True)
    ],
    *[
        ({name: value}, [f"{name}={value!r}"])
        for name in ("bytes_per_token", "router_delay_s")
        for value in (-0.5, NAN, INF, "5", None)
    ],
    ({"rate": (9.0, 4.0)}, ["rate=(9.0, 4.0)", "low end"]),
    ({"rate": (1.0, 2.0, 3.0)}, ["rate=(1.0, 2.0, 3.0)", "pair"]),
    ({"rate": (1.0, NAN)}, ["rate=nan"]),
    ({"rate": (0.0, 3.0)}, ["rate=0.0"]),
    ({"latency_requirement_s": 30.0}, ["latency_requirement_s=30.0", "at most 1"]),
    ({"latency_requirement_s": (0.05, 0.02)}, ["latency_requirement_s=(0.05, 0.02)", "low end"]),
]


@pytest.mark.parametrize(("kwargs", "words"), BAD, ids=lambda x: str(x)[:40])
def test_bad_arguments_are_refused_by_name(kwargs, words):
    for build in (LLMRoutingEnv, LLMRoutingVectorEnv):
        with pytest.raises(ValueError) as caught:
            build(**kwargs)
        for word in words:
            assert word in str(caught.value), str(caught.value)


def test_nothing_runs_before_the_arguments_are_checked(monkeypatch):
    def no(*_args, **_kwargs):
        raise RuntimeError("something ran")

    monkeypatch.setattr(LLMRoutingEnv, "BATCH", no)
    for build in (LLMRoutingEnv, LLMRoutingVectorEnv):
        for kwargs, _ in BAD:
            with pytest.raises(ValueError):
                build(**kwargs)
        with pytest.raises(RuntimeError, match="something ran"):
            build()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_envs": 0}, ["num_envs=0"]),
        ({"num_envs": 2.0}, ["num_envs=2.0"]),
        ({"autoreset_mode": "SameSteps"}, ["autoreset_mode='SameSteps'", "'SameStep'"]),
        ({"max_episode_steps": 0}, ["max_episode_steps=0"]),
        ({"max_episode_steps": 1.5}, ["max_episode_steps=1.5"]),
        ({"render_mode": "rgb"}, ["render_mode='rgb'"]),
    ],
)
def test_bad_arguments_of_vector_environments(kwargs, words):
    with pytest.raises(ValueError) as caught:
        LLMRoutingVectorEnv(**kwargs)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("env_id", ROUTING_IDS)
def test_make_refuses_them_too(env_id):
    with pytest.raises(ValueError, match="rate=-1"):
        gym.make(env_id, rate=-1)
    with pytest.raises(ValueError, match="Did you mean 'num_experts'"):
        gym.make(env_id, num_expert=1)
    with pytest.raises(ValueError, match="Did you mean 'paged'"):
        gym.make_vec(env_id, num_envs=2, memory_policy="pagd")


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


# -------------------------------------------------------------------------------------- actions


def contents(state):
    """Every value of a state: field by field, since the gaps between them hold no value."""
    found = [state.arrivals.tobytes(), state.rows.tobytes()]
    for records in (state.env, state.expert, state.slot, state.log):
        found += [records[name].tobytes() for name in records.dtype.names]
    return [*found, state.queue.tobytes(), state.random, state.finished]


@pytest.mark.parametrize(
    "action",
    [1.0, NAN, "1", None, [1], (1,), np.array([1]), np.float64(1), np.float32(1), np.True_, {}, 1j],
    ids=repr,
)
def test_actions_of_the_wrong_type(action):
    env = LLMRoutingEnv(num_experts=3)
    env.reset(seed=0)
    before = contents(env.clone_state())
    with pytest.raises(ValueError, match=re.escape(f"action={action!r}")):
        env.step(action)
    assert contents(env.clone_state()) == before


@pytest.mark.parametrize(
    "action", [-1, 4, 10**30, -(10**30), 2**63, np.int64(4), np.uint64(2**64 - 1)], ids=repr
)
def test_actions_out_of_range(action):
    env = LLMRoutingEnv(num_experts=3)
    env.reset(seed=0)
    for _ in range(5):
        env.step(2)
    before = contents(env.clone_state())
    with pytest.raises(ValueError, match="out of range.*1 to 3"):
        env.step(action)
    assert contents(env.clone_state()) == before
    env.step(1)


def test_whole_numbers_of_every_kind_are_actions():
    results = []
    for kind in (int, np.int8, np.int32, np.int64, np.uint8, np.uint64, np.array):
        env = LLMRoutingEnv(num_experts=3)
        env.reset(seed=0)
        for _ in range(40):
            result = env.step(kind(3))
        results.append((result[1], result[0]["experts"].tolist()))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    "actions",
    [
        [1.0, 2.0],
        np.array([1]),
        np.array([1, 2, 3]),
        3,
        [[1, 2]],
        None,
        ["1", "2"],
        np.array([True, False]),
        [2**70, 1],
    ],
    ids=repr,
)
def test_vector_actions_of_the_wrong_type(actions):
    envs = LLMRoutingVectorEnv(num_envs=2, num_experts=3)
    envs.reset(seed=0)
    before = [contents(envs.clone_state(i)) for i in range(2)]
    with pytest.raises(ValueError, match=r"actions must be whole numbers of shape \(2,\)"):
        envs.step(actions)
    assert [contents(envs.clone_state(i)) for i in range(2)] == before


@pytest.mark.parametrize("actions", [[1, 4], [-1, 0], np.array([2, 2**64 - 1], np.uint64)], ids=str)
def test_vector_actions_out_of_range(actions):
    envs = LLMRoutingVectorEnv(num_envs=2, num_experts=3)
    envs.reset(seed=0)
    envs.step([1, 1])
    before = [contents(envs.clone_state(i)) for i in range(2)]
    wrong = int(np.argmax(np.asarray(actions, dtype=np.int64) != np.clip(actions, 0, 3)))
    with pytest.raises(ValueError, match=f"of system {wrong} is out of range"):
        envs.step(actions)
    # The system whose action was good has not moved either.
    assert [contents(envs.clone_state(i)) for i in range(2)] == before


@pytest.mark.parametrize(
    "mask",
    [np.array([1, 0]), np.array([True]), np.zeros(2, bool), "both", None, np.ones((1, 2), bool)],
    ids=repr,
)
def test_bad_reset_masks(mask):
    envs = LLMRoutingVectorEnv(num_envs=2, num_experts=3)
    envs.reset(seed=0)
    before = [contents(envs.clone_state(i)) for i in range(2)]
    with pytest.raises(ValueError, match="reset_mask"):
        envs.reset(seed=7, options={"reset_mask": mask})
    assert [contents(envs.clone_state(i)) for i in range(2)] == before


def test_bad_seeds():
    envs = LLMRoutingVectorEnv(num_envs=2, num_experts=3)
    for seed in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="num_envs=2"):
            envs.reset(seed=seed)
    for seed in (-1, [3, -1]):
        with pytest.raises(gym.error.Error, match="-1"):
            envs.reset(seed=seed)
    with pytest.raises(gym.error.Error, match="-1"):
        LLMRoutingEnv(num_experts=3).reset(seed=-1)


# -------------------------------------------------------------------- arguments that do something


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
    env = gym.make(GRAPH, rate=(2.0, 50.0), latency_requirement_s=(0.01, 0.1), episode_requests=400)
    rates, limits = [], []
    for _ in range(12):
        observation, _ = env.reset(seed=0 if not rates else None)
        arrivals = env.unwrapped.batch.arrivals[0]
        rates.append(len(arrivals) / arrivals[-1])
        limits.append(float(observation["latency_requirement"][0]))
    assert len(set(limits)) == 12 and 0.01 <= min(limits) < 0.04 and 0.06 < max(limits) <= 0.1
    assert 1.5 < min(rates) < 15 and 30 < max(rates) < 60
    envs = gym.make_vec(
        GRAPH, num_envs=8, rate=(2.0, 50.0), latency_requirement_s=(0.01, 0.1), episode_requests=9
    )
    first = envs.reset(seed=0)[0]["latency_requirement"].ravel()
    for _ in range(10):  # nine decisions, then the autoreset
        second = envs.step(np.zeros(8, int))[0]["latency_requirement"].ravel()
    assert len(set(first)) == 8 and not set(first) & set(second)
    fixed = gym.make(GRAPH, rate=(5.0, 5.0), latency_requirement_s=(0.05, 0.05))
    assert fixed.reset(seed=0)[0]["latency_requirement"][0] == np.float32(0.05)
    same = gym.make(GRAPH, rate=5.0)
    same.reset(seed=0)
    np.testing.assert_array_equal(
        fixed.unwrapped.batch.arrivals, same.unwrapped.batch.arrivals, "no draw for a number"
    )


@pytest.mark.parametrize("env_id", ROUTING_IDS)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_fleets_of_every_size(env_id, count):
    for fleet in hardware_profiles.list_fleets():
        env = gym.make(
            env_id,
            num_experts=count,
            profiles=fleet,
            rate=2.0 * count,
            episode_requests=60,
            validate=True,
        )
        problem = env.unwrapped.problem
        assert env.action_space.n == count + 1
        assert len(problem.models) == len(problem.profiles) == count
        assert problem.models == hardware_profiles.load_fleet(fleet).models[:count]
        assert run(env)["episode_kpis"]["avg_qos"] > 0.0


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


@pytest.mark.parametrize("count", [1, 3, 12])
def test_the_synthetic_catalog(count):
    env = LLMRoutingEnv(catalog="synthetic", num_experts=count, episode_requests=60, validate=True)
    assert run(env)["episode_kpis"]["requests"] == 60


@pytest.mark.parametrize("scheduler", ["orca", "chunked_prefill"])
@pytest.mark.parametrize("memory_policy", ["reserve", "paged"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_every_engine_runs(tmp_path, scheduler, memory_policy, prefix_caching):
    kwargs = {"scheduler": scheduler, "memory_policy": memory_policy}
    kwargs["prefix_caching"] = prefix_caching
    if prefix_caching and scheduler == "orca":
        with pytest.raises(ValueError, match="prefix_caching"):
            LLMRoutingEnv(**kwargs)
        return
    card = small_card(tmp_path, 19_300_000_000)  # so little memory that requests preempt others
    kpis, preempted = [], 0
    for seed in range(2):
        env = LLMRoutingEnv(
            profiles=card, num_experts=2, rate=8.0, episode_requests=150, validate=True, **kwargs
        )
        kpis.append(run(env, seed=seed)["episode_kpis"])
        preempted += env.request_log()["preemptions"].sum()
    assert all(k["avg_qos"] > 0.0 and 0.1 < k["memory_use"] <= 1.0 for k in kpis)
    assert (preempted > 0) == (memory_policy == "paged")


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "mmpp", "burstgpt", "azure"])
def test_every_arrival_process_runs_at_its_rate(arrivals):
    env = LLMRoutingEnv(arrivals=arrivals, rate=8.0, num_experts=3, episode_requests=3000)
    env.reset(seed=0)
    times = env.batch.arrivals[0]
    assert (np.diff(times) >= 0.0).all()
    # Bursty processes are far from their mean rate over one episode.
    assert 1.0 < len(times) / times[-1] < 60.0
    assert run(LLMRoutingEnv(arrivals=arrivals, num_experts=3, episode_requests=60))


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
