"""What the serverless environment tells, costs and refuses."""

import gymnasium as gym
import numpy as np
import pytest

from servegym.envs.serverless_moe import config
from servegym.envs.serverless_moe import env as single
from servegym.envs.workloads.activations import make_toy_activations

from ...nested import assert_same

IDS = ("servegym/ServerlessMoE-v0", "servegym/ServerlessMoEFlat-v1")
SHORT = {"model": "toy", "episode_requests": 15, "max_prompt_tokens": 90, "max_output_tokens": 25}
every_id = pytest.mark.parametrize("env_id", IDS)


def make(env_id=IDS[0], **kwargs):
    return gym.make(env_id, **(SHORT | kwargs))


def random_actions(env, count, seed=0, size=None):
    nvec = getattr(env, "single_action_space", env.action_space).nvec
    shape = (count, len(nvec)) if size is None else (count, size, len(nvec))
    return list((np.random.default_rng(seed).random(shape) * nvec).astype(np.int64))


def test_the_end_has_key_figures():
    env = make(slo=[[1.1, 0.017]], keep_alive_s=300.0)
    env.reset(seed=1)
    rewards, infos = [], []
    for action in random_actions(env, 15):
        _, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        infos.append(info)
    assert terminated and not truncated
    kpis, log = info["episode_kpis"], env.unwrapped.request_log()
    assert kpis["requests"] == 15
    assert kpis["mean_reward"] == pytest.approx(np.mean(rewards))
    assert kpis["cost_usd"] == pytest.approx(sum(x["cost_usd"] for x in infos))
    assert kpis["cost_over_mix"] == pytest.approx(log["cost_usd"].sum() / log["mix_cost_usd"].sum())
    assert kpis["mean_ttft_s"] == pytest.approx(log["ttft_s"].mean())
    assert kpis["ttft_violation_rate"] == np.mean([x["violations"]["ttft"] for x in infos])
    assert kpis["tpot_violation_rate"] == np.mean([x["violations"]["tpot"] for x in infos])
    for name in ("ttft", "tpot"):
        assert any(x["violations"][name] for x in infos)
        assert not all(x["violations"][name] for x in infos)


def test_the_true_routing_does_not_show():
    """Other recorded tokens, same prediction: the same observations, masks, but other costs."""
    book = make_toy_activations()
    rng = np.random.default_rng(0)
    renamed = rng.permutation(8).astype(np.uint64)
    bits = (book.bank[..., None] >> np.arange(8, dtype=np.uint64)) & np.uint64(1)
    fields = {name: getattr(book, name) for name in book.__dataclass_fields__}
    inverse = np.argsort(renamed)
    fields["bank"] = (bits << renamed).sum(axis=-1, dtype=np.uint64)
    fields["counts"] = book.counts[:, :, inverse]
    other = type(book)(**fields)
    assert (other.bank != book.bank).any()
    table = np.random.default_rng(1).dirichlet(np.ones(8), book.counts.shape[:2])
    envs = [
        make(IDS[0], activations=x, predictor=table, payload_mb=100.0).unwrapped
        for x in (book, other)
    ]
    for env in envs:  # the shared order is fitted on the training prompts: give both the same
        env.problem.tables.masks[-1] = envs[0].problem.tables.masks[-1]
    actions = random_actions(envs[0], 14)
    results = [[env.reset(seed=3)] + [env.step(a) for a in actions] for env in envs]
    differ = False
    for a, b in zip(*results, strict=True):
        a_obs, b_obs = dict(a[0]), dict(b[0])
        # Whether the functions of before are warm depends on how long they took to fail.
        assert_same(a_obs["activations"], b_obs["activations"])
        for name in ("lengths", "slo", "t_rem", "prices", "idle_s", "warm_main", "warm_remote"):
            assert_same(a_obs[name], b_obs[name], name)
        assert_same(a[-1]["action_mask"], b[-1]["action_mask"])
        differ |= len(a) == 5 and a[1] != b[1]
    assert differ, "the routing was meant to matter for the cost"


def test_warm_functions_save_the_start():
    env = make(keep_alive_s=1e6, idle_s=[[1.0, 1.0]], payload_mb=100.0)
    observation, _ = env.reset(seed=0)
    assert not observation["warm_main"].any() and observation["idle_s"][0] == 0.0
    cold = []
    for _ in range(10):
        observation, _, _, _, info = env.step([4, 1, 0, 3, 0])
        cold.append(info["cold_start_s"])
        assert observation["warm_main"][[0, 4]].tolist() == [1.0, 1.0]
        assert observation["warm_main"][2] == 0.5 and observation["idle_s"][0] > 0.0
    assert cold[0] > 1.0 and not any(cold[1:])
    for memory in (1, 0):
        changed = env.step([4, 1, memory, 3, 0])[4]["cold_start_s"]
        assert changed > 1.0, "another memory, more or less, is another function"


def test_a_function_idle_for_exactly_the_keep_alive_time_is_warm():
    def second(keep_alive_s):
        env = make(keep_alive_s=keep_alive_s, idle_s=[[1.0, 1.0]], payload_mb=100.0)
        env.reset(seed=0)
        return [env.step([4, 1, 0, 3, 0])[4]["cold_start_s"] for _ in range(2)][1], env

    gap = float(second(1e6)[1].unwrapped.batch.arrays.requests["gap"][0, 1])
    assert second(gap)[0] == 0.0
    assert second(float(np.nextafter(gap, 0.0)))[0] > 0.0


@pytest.mark.parametrize("part", ["ttft", "tpot"])
def test_a_request_exactly_at_its_limit_keeps_it(part):
    def log_of(ttft_s, tpot_s):
        env = make(keep_alive_s=0.0, payload_mb=100.0).unwrapped
        env.reset(seed=0)
        limits = env.batch.arrays.requests
        limits["ttft_limit"], limits["tpot_limit"] = ttft_s, tpot_s
        env.step([4, 1, 0, 3, 0])
        return env.request_log()[0]

    found = log_of(1e6, 1e6)
    exact = {"ttft": 1e6, "tpot": 1e6, part: float(found[f"{part}_s"])}
    assert exact[part] > 0.0
    for limit, late in ((exact[part], False), (np.nextafter(exact[part], 0.0), True)):
        exact[part] = limit
        assert log_of(exact["ttft"], exact["tpot"])[f"{part}_violated"] == late


@every_id
@pytest.mark.parametrize("granularity", ["global", "per_layer"])
def test_keeping_the_plan_is_repeating_its_parts(env_id, granularity):
    """Beside an environment without the part, to which the kept plan is given by hand."""
    kwargs = {"granularity": granularity, "payload_mb": 0.1, "keep_alive_s": 60.0}
    env, plain = (make(env_id, keep_action=keep, **kwargs) for keep in (True, False))
    rng, parts = np.random.default_rng(0), len(plain.action_space.nvec)
    assert env.action_space.nvec.tolist() == [*plain.action_space.nvec, 2]
    seen = set()
    for episode in range(10):
        (observation, info), _ = env.reset(seed=episode), plain.reset(seed=episode)
        deployed, warm, ended = None, False, False
        while not ended:
            mask = info["action_mask"]
            allowed = warm and mask[deployed[0]] == 1
            assert mask[-2] == 1 and mask[-1] == allowed
            action = (rng.random(parts + 1) * env.action_space.nvec).astype(int)
            plan = deployed if action[-1] and warm else action[:parts]
            seen.add((bool(action[-1]), warm, bool(allowed)))
            observation, reward, ended, _, info = env.step(action)
            same = plain.step(plan)
            assert reward == same[1] and info["cost_usd"] == same[4]["cost_usd"]
            assert_same(observation, same[0])
            np.testing.assert_array_equal(info["action_mask"][:-2], same[4]["action_mask"])
            if not any(info["violations"][k] for k in ("main_memory", "remote_memory", "payload")):
                deployed = plan
            view = observation["warm_main"][0] if env_id == IDS[0] else observation[6]
            warm = view == 1.0
    assert {(True, True, True), (True, False, False), (False, True, True)} <= seen


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"model": "deepseek-v2"}, "deepseek-v2-lite"),
        ({"slo": [[0.01, 0.1]], "keep_alive_s": 0.0}, "TTFT of 0.01 s; the best achievable"),
        ({"slo": [[9.0, 0.1], [9.0, 1e-4]]}, r"slo\[1\].*TPOT of 0.0001 s; the best achievable"),
        ({"idle_s": [[0.5, 1.0]]}, "sum to 1"),
        ({"predictor": np.ones((3, 4, 8))}, "shape"),
        ({"predictor": np.ones((40, 4, 8))}, "no frequencies"),
        ({"model": "mixtral-8x7b", "preset": "seed"}, r"mixtral.*TPOT of 0.12 s; .*Give slo="),
        ({"model": "gpt-oss-20b", "activations": make_toy_activations()}, "does not go with"),
    ],
)
def test_bad_arguments_are_named(kwargs, message, monkeypatch):
    """Before any recording is read: nothing here may load one."""
    monkeypatch.setattr(config, "load_activations", None)
    with pytest.raises(ValueError, match=message):
        single.ServerlessMoEEnv(**(SHORT | kwargs))
