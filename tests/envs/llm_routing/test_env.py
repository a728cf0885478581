"""What every routing environment owes to Gymnasium and to its users, whatever the engine does."""

import copy
import math
import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import servegym
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.core import held

from ...nested import assert_same, same

GRAPH, FLAT, EXPERTS = ROUTING_IDS = servegym.ENV_IDS[:3]
COMPLETED, DROPPED, REJECTED = 1, 2, 3
SHORT = {"num_experts": 3, "episode_requests": 25, "rate": 15.0}
ENGINES = [
    {"scheduler": "orca", "memory_policy": "reserve"},
    {"scheduler": "orca", "memory_policy": "paged"},
    {"scheduler": "chunked_prefill", "memory_policy": "reserve"},
    {"scheduler": "chunked_prefill", "memory_policy": "paged", "prefix_caching": True},
]
REWARDS = ("qos_aware", "completed_qos", "paid_forward")
every_id = pytest.mark.parametrize("env_id", ROUTING_IDS)


def make(env_id=GRAPH, **kwargs):
    return gym.make(env_id, **(SHORT | kwargs))


def make_vec(env_id=GRAPH, num_envs=4, **kwargs):
    return gym.make_vec(env_id, num_envs=num_envs, **(SHORT | kwargs))


def play(env, actions, seed=None, reset=True):
    """Everything that the environment returns, resets after the ends included."""
    seen = [env.reset(seed=seed)] if reset else []
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2] or seen[-1][3]:
            seen.append(env.reset())
    return copy.deepcopy(seen)


def random_actions(count, n=3, seed=0, size=None):
    shape = count if size is None else (count, size)
    return list(np.random.default_rng(seed).integers(0, n + 1, shape))


# ----------------------------------------------------------------------------------- Gymnasium


@every_id
@pytest.mark.parametrize("kwargs", [{}, SHORT, SHORT | ENGINES[3]], ids=["default", "3", "paged"])
def test_gymnasiums_checker_has_nothing_to_say(env_id, kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(env_id, **kwargs).unwrapped, skip_render_check=False)
        env = gym.make(env_id, **kwargs)  # the passive checker looks at the first calls
        play(env, random_actions(5), seed=0)
        env.close()


def test_the_checker_would_object():
    env = make(FLAT).unwrapped
    observation = np.zeros(env.observation_space.shape, np.float32)
    env._observation = lambda: observation
    with warnings.catch_warnings(), pytest.raises((AssertionError, Warning)):
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)


@every_id
def test_the_same_seed_gives_the_same_200_steps(env_id):
    kwargs = {"rate": (5.0, 20.0), "latency_requirement_s": (0.02, 0.06)}
    actions = random_actions(200)
    first = play(make(env_id, **kwargs), actions, seed=7)
    assert len(first) > 205, "several episodes"
    assert_same(first, play(make(env_id, **kwargs), actions, seed=7))
    env = make(env_id, **kwargs)
    play(env, actions[:30], seed=99)
    assert_same(first, play(env, actions, seed=7))


@every_id
def test_different_seeds_and_later_episodes_differ(env_id):
    logs = []
    for seed in range(4):
        env = make(env_id)
        play(env, random_actions(24), seed=seed)
        logs.append(env.unwrapped.request_log()["arrival_s"].tolist())
    env.step(0)
    env.reset()
    play(env, random_actions(24), reset=False)
    logs.append(env.unwrapped.request_log()["arrival_s"].tolist())
    assert len({tuple(log) for log in logs}) == 5


@every_id
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
def test_pickled_in_mid_episode_it_goes_on_alike(env_id, engine):
    actions = random_actions(120)
    for duplicate in (lambda env: pickle.loads(pickle.dumps(env)), copy.deepcopy):
        env = make(env_id, rate=(5.0, 30.0), **engine)
        play(env, actions[:37], seed=5)
        twin = duplicate(env)
        later = play(env, actions, reset=False)
        assert_same(later, play(twin, actions, reset=False))
        assert_same(env.unwrapped.request_log(), twin.unwrapped.request_log())
        assert_same(env.unwrapped.action_masks(), twin.unwrapped.action_masks())


@pytest.mark.parametrize("mode", AutoresetMode)
def test_pickled_vector_environments_go_on_alike(mode):
    envs = make_vec(autoreset_mode=mode)
    envs.reset(seed=3)
    actions = random_actions(40, size=4)
    for a in actions[:20]:
        envs.step(a)
    twins = pickle.loads(pickle.dumps(envs))
    count = 5 if mode is AutoresetMode.DISABLED else 40
    for a in actions[:count]:
        assert_same(envs.step(a), twins.step(a))


@every_id
def test_the_spec_survives_json(env_id):
    kwargs = SHORT | {
        "rate": (4.0, 9.0),
        "arrivals": "gamma",
        "arrivals_kwargs": {"cv": 2.0},
        "latency_requirement_s": 0.05,
        "models": ["vicuna-7b-v1.5", "gemma-7b-it", "chatglm2-6b"],
        "scheduler": "chunked_prefill",
        "split": "eval",
        "reward": "paid_forward",
    }
    env = gym.make(env_id, max_episode_steps=8, **kwargs)
    spec = EnvSpec.from_json(env.spec.to_json())
    again = gym.make(spec)
    actions = random_actions(20)
    assert_same(play(env, actions, seed=11), play(again, actions, seed=11))
    assert again.unwrapped.problem.models == tuple(kwargs["models"])
    plain = gym.make(EnvSpec.from_json(gym.make(env_id).spec.to_json()))
    assert plain.observation_space == gym.make(env_id).observation_space
    assert_same(plain.reset(seed=0), gym.make(env_id).reset(seed=0))


@every_id
def test_steps_need_an_episode(env_id):
    env = make(env_id).unwrapped
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    for _ in range(25):
        ended = env.step(1)[2]
    assert ended
    log = env.request_log()
    for _ in range(2):
        with pytest.raises(ResetNeeded):
            env.step(0)
    assert_same(log, env.request_log())
    env.reset()
    assert not env.step(0)[2]

    envs = make_vec(env_id, autoreset_mode="Disabled")
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros(4, int))
    envs.reset(seed=0)
    for _ in range(25):
        terminated = envs.step(np.ones(4, int))[2]
    assert terminated.all()
    with pytest.raises(ResetNeeded, match="reset_mask"):
        envs.step(np.zeros(4, int))


@every_id
def test_a_time_limit_truncates_without_draining(env_id):
    plain, limited = make(env_id), make(env_id, max_episode_steps=10)
    plain.reset(seed=2)
    limited.reset(seed=2)
    for step in range(10):
        one, other = plain.step(1 + step % 3), limited.step(1 + step % 3)
        assert_same(one[:3], other[:3])
        assert_same(one[4], other[4])
        assert one[3] is False and other[3] is (step == 9)
    assert "episode_kpis" not in other[4]
    log = limited.unwrapped.request_log()
    assert len(log) == 10 and (log["outcome"] == 0).any(), "nothing was left to drain"
    # At the last request both hold.
    both = make(env_id, max_episode_steps=25)
    both.reset(seed=2)
    for _ in range(25):
        end = both.step(1)
    assert end[2] is True and end[3] is True and "episode_kpis" in end[4]


# ----------------------------------------------------------------------- arrays and information


@every_id
def test_the_action_mask_is_int8_and_never_empty(env_id):
    env = make(env_id, rate=200.0, waiting_capacity=2)
    _, info = env.reset(seed=0)
    full = False
    for action in random_actions(25, seed=4):
        mask = info["action_mask"]
        assert mask.dtype == np.int8 and mask.shape == (4,)
        assert set(np.unique(mask)) <= {0, 1} and mask[0] == 1
        np.testing.assert_array_equal(mask, env.unwrapped.action_masks())
        assert env.unwrapped.action_masks().dtype == np.bool_
        env.action_space.sample(mask)
        full |= not mask.all()
        info = env.step(max(action, 1))[4]
    assert full, "no queue was full"


@every_id
def test_what_was_returned_is_ours_to_change(env_id):
    def scribble(thing):
        if isinstance(thing, dict):
            for part in thing.values():
                scribble(part)
            thing.clear()
        elif isinstance(thing, np.ndarray) and thing.dtype == object:
            for part in thing:
                scribble(part)
        elif isinstance(thing, np.ndarray) and thing.flags.writeable:
            thing[...] = 1 if thing.dtype.kind == "b" else 77

    env, twin = make(env_id), make(env_id)
    env.reset(seed=1)
    for part in twin.reset(seed=1):
        scribble(part)
    for action in random_actions(24):
        expected, result = env.step(action), twin.step(action)
        assert_same(expected, result)
        scribble(result[0])
        scribble(result[4])
        twin.unwrapped.action_masks()[:] = False
        twin.unwrapped.request_log()["score"] = -1.0

    for mode in AutoresetMode:
        envs = make_vec(env_id, autoreset_mode=mode, max_episode_steps=20)
        twins = make_vec(env_id, autoreset_mode=mode, max_episode_steps=20)
        envs.reset(seed=1)
        for part in twins.reset(seed=1):
            scribble(part)
        for a in random_actions(20 if mode is AutoresetMode.DISABLED else 60, size=4):
            expected, result = envs.step(a), twins.step(a)
            assert_same(expected, result)
            for part in result:
                scribble(part)


@every_id
def test_without_copy_the_buffers_themselves_come_back(env_id):
    envs = make_vec(env_id, copy=False)
    first = envs.reset(seed=0)[0]
    before = copy.deepcopy(first)
    second = envs.step(np.array([1, 2, 3, 0]))[0]
    for name in first if isinstance(first, dict) else [()]:
        assert np.shares_memory(first[name], second[name])
    assert not same(first, before), "the first observation was not overwritten"
    copied = make_vec(env_id)
    one = copied.reset(seed=0)[0]
    two = copied.step(np.array([1, 2, 3, 0]))[0]
    assert_same(second, two)
    for name in one if isinstance(one, dict) else [()]:
        assert not np.shares_memory(one[name], two[name])


@every_id
@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("penalty", ["new_violations", "literal"])
def test_reward_terms_add_up_to_the_reward(env_id, reward, penalty):
    kwargs = {"reward": reward, "penalty": penalty, "profiles": "paper-linear"}
    env = make(env_id, rate=10.0, episode_requests=300, **kwargs)
    env.reset(seed=0)
    seen = set()
    for action in random_actions(300):
        _, value, _, _, info = env.step(action)
        assert type(value) is float
        assert all(type(x) is float for x in info["reward_terms"].values())
        assert sum(info["reward_terms"].values()) == value
        seen |= {name for name, x in info["reward_terms"].items() if x != 0.0}
    assert seen == set(info["reward_terms"]), "a term was never at work"
    envs = make_vec(env_id, **kwargs)
    envs.reset(seed=0)
    for a in random_actions(60, size=4):
        _, values, _, _, info = envs.step(a)
        assert values.dtype == np.float64
        terms = info.get("reward_terms", {})
        total = sum((x for name, x in terms.items() if name[0] != "_"), np.zeros(4))
        np.testing.assert_array_equal(total, values)


@every_id
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
def test_10000_random_steps_stay_inside_the_space(env_id, engine):
    """2,500 for each engine; ``validate`` asserts that the space contains every observation."""
    env = make(
        env_id,
        rate=(0.5, 60.0),
        latency_requirement_s=(0.005, 1.0),
        episode_requests=250,
        num_experts=4,
        validate=True,
        **engine,
    )
    for episode in range(10):
        observation, _ = env.reset(seed=episode)
        for action in random_actions(250, 4, seed=episode):
            observation, reward, _, _, info = env.step(action)
            parts = observation.values() if isinstance(observation, dict) else [observation]
            assert all(np.isfinite(part).all() for part in parts)
            assert math.isfinite(reward)
    envs = make_vec(env_id, rate=(0.5, 60.0), validate=True, **engine)
    envs.reset(seed=0)
    for a in random_actions(60, size=4):
        envs.step(a)


def test_validate_finds_a_value_outside():
    env = make(GRAPH, validate=True).unwrapped
    env.reset(seed=0)
    env.batch.observation["experts"][0, 0, 0] = 1.5
    with pytest.raises(AssertionError, match="outside"):
        env._observation()
    envs = make_vec(GRAPH, validate=True).unwrapped
    envs.reset(seed=0)
    envs.batch.observation["experts"][0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match="outside"):
        envs._observation()


@every_id
def test_the_final_observation_is_empty(env_id):
    env = make(env_id, rate=50.0)
    env.reset(seed=0)
    for action in random_actions(25):
        observation, _, terminated, _, info = env.step(action)
    assert terminated
    assert info["action_mask"].tolist() == [1, 1, 1, 1]
    if env_id == GRAPH:
        limit = observation.pop("latency_requirement")
        assert limit[0] == np.float32(0.03)
        assert not any(part.any() for part in observation.values())
    elif env_id == FLAT:
        assert observation[0] == np.float32(0.03) and not observation[1:].any()
    else:
        assert not observation.any()
    kpis = info["episode_kpis"]
    assert kpis["requests"] == 25 and 0.0 <= kpis["avg_qos"] <= 1.0


# ------------------------------------------------------------------------- vector environments


def vector_pair(env_id, mode, **kwargs):
    native = make_vec(env_id, autoreset_mode=mode, **kwargs)
    # The wrappers of make() but for the time limit only check, in a second of Python.
    sync = make_vec(
        env_id,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        disable_env_checker=True,
        **kwargs,
    )
    assert type(native.unwrapped).__name__.startswith("LLMRouting")
    assert isinstance(sync, gym.vector.SyncVectorEnv)
    assert native.metadata["autoreset_mode"] is sync.metadata["autoreset_mode"] is mode
    assert native.observation_space == sync.observation_space
    assert native.action_space == sync.action_space
    return native, sync


@every_id
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("limit", [None, 17, 25])
def test_native_vector_environments_equal_sync_ones(env_id, mode, limit):
    kwargs = {"rate": (5.0, 40.0), "latency_requirement_s": (0.01, 0.06), "penalty": "literal"}
    if limit:
        kwargs["max_episode_steps"] = limit
    native, sync = vector_pair(env_id, mode, **kwargs)
    assert_same(native.reset(seed=21), sync.reset(seed=21))
    assert native.np_random_seed == sync.np_random_seed
    random = np.random.default_rng(1)
    ends = np.zeros(4, int)
    done = np.zeros(4, bool)
    for step, actions in enumerate(random_actions(140, size=4, seed=8)):
        mask = done.copy() if mode is AutoresetMode.DISABLED else np.zeros(4, bool)
        if step in (9, 40, 41, 90):  # in mid-episode, so that the systems get out of step
            mask = mask | (random.random(4) < 0.5)
        if mask.any():
            seeds = [None, 5, None, 1000 + step] if step == 40 else None
            results = [
                envs.reset(seed=seeds, options={"reset_mask": mask.copy()})
                for envs in (native, sync)
            ]
            assert_same(*results, where=f"reset before step {step}")
        one, other = native.step(actions), sync.step(actions)
        assert_same(one, other, where=f"step {step}")
        done = one[2] | one[3]
        ends += done
    assert ends.min() >= 3 and len(set(ends.tolist())) > 1, f"ends {ends}"


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("engine", ENGINES[1:], ids=lambda e: "-".join(map(str, e.values())))
def test_native_equals_sync_with_other_engines_and_rewards(mode, engine):
    for reward in REWARDS:
        native, sync = vector_pair(FLAT, mode, num_envs=3, reward=reward, rate=60.0, **engine)
        assert_same(native.reset(seed=4), sync.reset(seed=4))
        count = 25 if mode is AutoresetMode.DISABLED else 55
        for actions in random_actions(count, size=3):
            assert_same(native.step(actions), sync.step(actions))
        logs = sync.call("request_log")
        for index in range(3):
            assert_same(native.unwrapped.request_log(index), logs[index])
        assert_same(native.unwrapped.action_masks(), np.array(sync.call("action_masks")))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_key_figures_reach_the_information_of_vector_environments(mode):
    envs = make_vec(autoreset_mode=mode, num_envs=2)
    envs.reset(seed=0)
    for actions in random_actions(25, size=2):
        _, _, terminated, _, info = envs.step(actions)
    assert terminated.all()
    if mode is AutoresetMode.SAME_STEP:
        assert info["_final_info"].all() and info["final_obs"][0]["request"].sum() == 0.0
        info = info["final_info"]
    assert info["_episode_kpis"].all()
    kpis = info["episode_kpis"]
    assert kpis["_avg_qos"].all() and (kpis["avg_qos"] > 0).all()
    shares = kpis["drop_rate"] + kpis["reject_rate"] + kpis["violation_rate"]
    assert (shares <= 1.0).all() and (kpis["drop_rate"] > 0).all()


# ------------------------------------------------------------------------------- exact copies


def compare_from(env, other, actions):
    for action in actions:
        assert_same(env.step(action), other.step(action))


@every_id
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
@pytest.mark.parametrize("at", [0, 13, 24])
def test_a_restored_state_goes_on_exactly(env_id, engine, at):
    kwargs = {"rate": (20.0, 60.0), "latency_requirement_s": (0.01, 0.05)} | engine
    env = make(env_id, **kwargs)
    play(env, random_actions(at, seed=1), seed=6)
    state = env.unwrapped.clone_state()
    observation, mask = env.unwrapped._observation(), env.unwrapped.action_masks()
    start = env.unwrapped.request_log()
    actions = random_actions(70)
    later = play(env, actions, reset=False)
    log = env.unwrapped.request_log()
    for _ in range(2):  # the state itself is not used up
        back, info = env.unwrapped.restore_state(state)
        assert_same(back, observation)
        assert_same(info["action_mask"].astype(bool), mask)
        assert_same(play(env, actions, reset=False), later)
        assert_same(env.unwrapped.request_log(), log)
    fresh = make(env_id, **kwargs)
    fresh.reset(seed=100)
    fresh.unwrapped.restore_state(pickle.loads(pickle.dumps(state)))
    assert_same(fresh.unwrapped.request_log(), start)
    assert_same(play(fresh, actions, reset=False), later)


def test_a_restored_end_is_an_end():
    env = make().unwrapped
    env.reset(seed=0)
    for _ in range(25):
        env.step(1)
    state = env.clone_state()
    env.reset(seed=1)
    env.step(1)
    env.restore_state(state)
    with pytest.raises(ResetNeeded):
        env.step(0)


@every_id
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_state_moves_between_the_rows_of_vector_environments(env_id, mode):
    kwargs = {"rate": (20.0, 60.0), "autoreset_mode": mode, "max_episode_steps": 22}
    first, second = make_vec(env_id, **kwargs), make_vec(env_id, num_envs=3, **kwargs)
    first.reset(seed=0)
    second.reset(seed=50)
    for actions in random_actions(12, size=4):
        first.step(actions)
    for actions in random_actions(5, size=3):
        second.step(actions)
    state = first.unwrapped.clone_state(2)
    untouched = second.unwrapped.observe()
    second.unwrapped.restore_state(1, state)
    now = second.unwrapped.observe()
    assert_same(now[1][[0, 2]], untouched[1][[0, 2]])
    assert_same(now[1][1], first.unwrapped.observe()[1][2])
    parts = now[0] if isinstance(now[0], dict) else {"all": now[0]}
    old = untouched[0] if isinstance(untouched[0], dict) else {"all": untouched[0]}
    for name in parts:
        assert_same(parts[name][[0, 2]], old[name][[0, 2]])
    for step, actions in enumerate(random_actions(70, size=4, seed=3)):
        one = first.step(actions)
        other = second.step(actions[[0, 2, 1]])
        for x, y in zip(one[1:4], other[1:4], strict=True):
            assert x[2] == y[1], f"step {step}"
        one, other = one[0], other[0]
        for name in one if isinstance(one, dict) else [()]:
            assert_same(one[name][2], other[name][1], f"step {step} {name}")


def test_a_state_moves_between_single_and_vector_environments():
    env, envs = make(), make_vec(num_envs=2)
    env.reset(seed=3)
    envs.reset(seed=9)
    for action in random_actions(10):
        env.step(action)
    envs.unwrapped.restore_state(1, env.unwrapped.clone_state())
    for action in random_actions(15):
        one, many = env.step(action), envs.step(np.array([0, action]))
        assert one[1] == many[1][1] and one[2] == many[2][1]
        for name, part in one[0].items():
            assert_same(part, many[0][name][1])
    assert one[2]
    assert_same(env.unwrapped.request_log(), envs.unwrapped.request_log(1))
    env.reset()
    envs.step(np.zeros(2, int))  # next-step autoreset
    assert_same(env.unwrapped.batch.arrivals[0], envs.unwrapped.batch.arrivals[1])

    state = make(num_experts=4).unwrapped.clone_state()
    with pytest.raises(ValueError, match="same arguments"):
        env.unwrapped.restore_state(state)


# ----------------------------------------------------------------------------------- bookkeeping


def on_time_score(log, limit):
    done = log["outcome"] == COMPLETED
    late = (log["finish_s"] - log["arrival_s"]) / np.maximum(log["output_tokens"], 1) > limit
    return float(np.sum(log["score"][done & ~late], dtype=np.float64))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
@pytest.mark.parametrize("reward", ["completed_qos", "paid_forward"])
def test_rewards_of_an_episode_sum_to_its_quality_of_service(engine, reward):
    for seed in range(4):
        env = make(reward=reward, rate=20.0, episode_requests=150, **engine)
        env.reset(seed=seed)
        rewards = [env.step(a) for a in random_actions(150, seed=seed)]
        log = env.unwrapped.request_log()
        total = on_time_score(log, 0.03)
        assert 0.0 < total < float(log["score"][log["outcome"] == COMPLETED].sum())
        assert sum(r[1] for r in rewards) == pytest.approx(total, rel=1e-9)
        assert rewards[-1][4]["episode_kpis"]["avg_qos"] == pytest.approx(total / 150, rel=1e-9)


@every_id
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
def test_every_request_has_one_fate_whatever_is_chosen(env_id, engine):
    """Random actions, full experts included: sending there is legal and the request is rejected."""
    for seed, rate in enumerate((3.0, 30.0, 300.0)):
        env = make(env_id, rate=rate, episode_requests=120, **engine)
        _, info = env.reset(seed=seed)
        problem = env.unwrapped.problem
        actions = np.array(random_actions(120, seed=seed))
        expected = []
        for action in actions:
            open_ = info["action_mask"][action]
            expected.append(DROPPED if action == 0 else COMPLETED if open_ else REJECTED)
            terminated, info = env.step(action)[2::2]
        assert terminated
        log = env.unwrapped.request_log()
        assert log["outcome"].tolist() == expected
        assert (REJECTED in expected) == (rate > 3.0), "the rates were meant to cover both"
        sent = actions > 0
        np.testing.assert_array_equal(log["expert"][sent], actions[sent] - 1)
        done = log["outcome"] == COMPLETED
        times = np.stack([log[x] for x in REQUEST_TIMES])
        assert (np.diff(times[:, done], axis=0) >= 0.0).all()
        assert np.isnan(times[1:, ~done]).all()
        drawn = problem.table[log["catalog_row"][sent], log["expert"][sent]]
        np.testing.assert_array_equal(log["prompt_tokens"][sent], drawn[:, 0])
        np.testing.assert_array_equal(log["score"][sent], drawn[:, 1])
        np.testing.assert_array_equal(log["output_tokens"][sent], drawn[:, 2])
        kpis = info["episode_kpis"]
        assert kpis["drop_rate"] == np.mean(actions == 0)
        assert kpis["reject_rate"] == np.mean(log["outcome"] == REJECTED)
        e2e = log["finish_s"] - log["arrival_s"]
        assert kpis["mean_e2e_s"] == pytest.approx(np.mean(e2e[done]), rel=1e-9)
        latency = e2e[done] / log["output_tokens"][done]
        assert kpis["violation_rate"] == np.mean(np.append(latency > 0.03, [False] * (~done).sum()))
        parts = ("communication", "routing", "waiting", "inference")
        assert sum(kpis[f"mean_{x}_s"] for x in parts) == pytest.approx(kpis["mean_e2e_s"])


REQUEST_TIMES = ("arrival_s", "available_s", "admitted_s", "first_token_s", "finish_s")


def test_dropping_everything_has_no_latency():
    env = make()
    env.reset(seed=0)
    for _ in range(25):
        _, reward, _, _, info = env.step(0)
        assert reward == 0.0
    kpis = info["episode_kpis"]
    assert kpis["drop_rate"] == 1.0 and kpis["avg_qos"] == 0.0
    assert math.isnan(kpis["mean_latency_s_per_token"]) and math.isnan(kpis["mean_tpot_s"])


# ------------------------------------------------------------------------------------ no peeking


def in_system(state):
    """(expert, slot) of every request that runs or waits."""
    for n, records in enumerate(zip(state.expert, state.slot, state.queue, strict=True)):
        running, waiting = held(*records)
        for i in running + waiting:
            yield n, i


def tokens(state, n, i):
    """Tokens that the request in slot i of expert n has by now."""
    r = state.slot[n, i]
    return int(state.expert[n]["emitted"] - r["origin"]) if r["decoding"] else int(r["generated"])


@every_id
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
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


@every_id
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
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


# -------------------------------------------------------------------------------------- the kernel


def test_one_compiled_version_of_each_entry_point():
    if not hasattr(kernel.step, "signatures"):
        pytest.skip("the JIT is switched off")
    for env_id in servegym.ENV_IDS[:3]:
        for size in (1, 3, 12):
            kwargs = {"num_experts": size, "running_capacity": size, "rate": 10.0}
            env = make(env_id, **kwargs, **ENGINES[size % 4])
            play(env, random_actions(30, size), seed=0)
            env.unwrapped.restore_state(env.unwrapped.clone_state())
            pickle.loads(pickle.dumps(env)).step(np.int32(1))
        for mode in AutoresetMode:
            envs = make_vec(env_id, num_envs=3, autoreset_mode=mode, copy=False)
            envs.reset(seed=0)
            envs.step([1, 2, 3])
            envs.reset(options={"reset_mask": np.array([True, False, True])})
            envs.unwrapped.restore_state(0, envs.unwrapped.clone_state(1))
            for actions in random_actions(24, size=3):
                envs.step(actions.astype(np.int32))
                if mode is AutoresetMode.DISABLED:
                    envs.reset(options={"reset_mask": np.array([True, True, True])})
    for entry in (kernel.begin, kernel.observe, kernel.step):
        assert len(entry.signatures) == 1, entry
