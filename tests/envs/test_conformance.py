"""What every registered id owes to Gymnasium and to its users, whatever its engine does."""

import copy
import importlib
import pickle
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import servegym
from servegym.envs._batch import Batch, BatchEnv
from servegym.envs._parallel import BatchParallelEnv
from servegym.envs.families import FAMILIES, family_of

from ..nested import assert_same, same

ROUTING = {
    "num_experts": 3,
    "episode_requests": 25,
    "rate": (5.0, 60.0),
    "latency_requirement_s": (0.01, 0.06),
}
PAGED = {"memory_policy": "paged"}
CHUNKED = {"scheduler": "chunked_prefill"}
OUTAGES = {"mean_time_to_failure_s": 1.0, "mean_time_to_repair_s": 0.5}
SERVERLESS = {
    "model": "toy",
    "episode_requests": 15,
    "max_prompt_tokens": 90,
    "max_output_tokens": 25,
    "payload_mb": 0.1,
    "output_error": 1.0,
}
PREFIX = {
    "workload_kwargs": {
        "groups": 6,
        "users": 4,
        "prefix_tokens": 500,
        "question_tokens": [20, 300],
        "output_tokens": [1, 60],
        "questions": "fresh",
        "order": "random",
    },
    "num_replicas": 3,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_tokens": 6000,
    "rate": 60.0,
    "episode_requests": 20,
    "warmup_requests": 10,
}
CHATS = {"workload": "sessions", "workload_kwargs": {"max_context": 3000}, "rate": 30.0}
PLACEMENT = {"model": "toy", "epochs": 3, "epoch_s": 5.0, "mean_interarrival_s": 2.0}
KINDS = {
    "llm_routing": {
        "orca": ROUTING | {"penalty": "literal"},
        "orca-paged": ROUTING | PAGED | {"reward": "completed_qos"},
        "chunked": ROUTING | CHUNKED | {"reward": "paid_forward", "async_scheduling": True},
        "chunked-paged": ROUTING | CHUNKED | PAGED,
        "failing": ROUTING | {"failures": OUTAGES, "waiting_capacity": 2},
        "drawn": {"fleet": "random", "episode_requests": 25},
    },
    "serverless_moe": {
        "dynamic": SERVERLESS,
        "seed": SERVERLESS | {"preset": "seed"},
        "layers": SERVERLESS | {"granularity": "per_layer", "keep_action": True},
    },
    "expert_placement": {
        "budget": PLACEMENT,
        "heights": PLACEMENT | {"action_mode": "layer_height", "reward": "log_latency"},
        "scores": PLACEMENT | {"action_mode": "expert_score", "migration_source": "network"},
        "placement": PLACEMENT | {"action_mode": "placement"},
    },
    "prefix_routing": {
        "approximate": PREFIX,
        "pooled": PREFIX | {"prefix_cache": "pooled"},
        "chats": PREFIX | CHATS | {"index": "precise", "index_kwargs": {"index_delay_s": 0.1}},
        "live": PREFIX | {"scrape_s": 0.0, "reward": "ttft", "length_noise": 0.5},
        "admission": PREFIX | {"admission": True, "index": "none", "async_scheduling": True},
        "failing": PREFIX | {"index": "precise", "failures": OUTAGES},
    },
}
"""Arguments of small systems of each family, the plain one first."""
DECISIONS = {"llm_routing": 25, "serverless_moe": 15, "expert_placement": 3, "prefix_routing": 20}
OTHER = {
    "llm_routing": {"num_experts": 4},
    "serverless_moe": {"episode_requests": 9},
    "expert_placement": {"scenario": "scale_8"},
    "prefix_routing": {"prefix_cache": "infinite"},
}
"""Arguments to which a state of the plain system does not fit."""
CASES = [
    (env_id, kind)
    for family in FAMILIES
    for env_id in family.env_ids
    for k, kind in enumerate(KINDS[family.name])
    if env_id == family.env_id or k in (0, len(KINDS[family.name]) - 1)
]
"""Every kind in the first view of its family, the first and the last in the others."""
every_case = pytest.mark.parametrize(("env_id", "kind"), CASES)
every_id = pytest.mark.parametrize("env_id", servegym.ENV_IDS)


@pytest.fixture(autouse=True, scope="module")
def one_problem():
    """Environments of equal arguments share one problem, as those of a native vector do."""
    build, problem = BatchEnv.make_problem.__func__, {}

    def make_problem(cls, kwargs):
        key = cls, repr(sorted(kwargs.items()))
        return problem[key] if key in problem else problem.setdefault(key, build(cls, kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchEnv, "make_problem", classmethod(make_problem))
        yield


def arguments(env_id, kind=None):
    kinds = KINDS[family_of(env_id).name]
    return kinds[kind or next(iter(kinds))]


def make(env_id, kind=None, **kwargs):
    return gym.make(env_id, disable_env_checker=True, **(arguments(env_id, kind) | kwargs))


def make_vec(env_id, kind=None, num_envs=3, **kwargs):
    return gym.make_vec(env_id, num_envs=num_envs, **(arguments(env_id, kind) | kwargs))


def make_sync(env_id, kind=None, num_envs=3, mode=AutoresetMode.NEXT_STEP, **kwargs):
    how = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": mode}}
    return make_vec(env_id, kind, num_envs, disable_env_checker=True, **how, **kwargs)


def draw_from(space, count, seed=0):
    space = copy.deepcopy(space)
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def draw(env, count, seed=0):
    return draw_from(env.action_space, count, seed)


def play(env, actions, seed=None, reset=True):
    """Everything that the environment returns, resets after the ends included."""
    seen = [env.reset(seed=seed)] if reset else []
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2] or seen[-1][3]:
            seen.append(env.reset())
    return seen


def rows(batch, which):
    """Some rows of a batch of observations, actions or numbers."""
    if isinstance(batch, dict):
        return {name: rows(part, which) for name, part in batch.items()}
    return np.asarray(batch)[which]


@every_case
def test_gymnasiums_checker_has_nothing_to_say(env_id, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(env_id, **arguments(env_id, kind))
        check_env(env.unwrapped, skip_render_check=True)
        play(env, draw(env, 5), seed=0)  # the passive checker looks at the first calls


@every_id
def test_dict_observations_have_the_order_of_their_space(env_id):
    for envs in (make(env_id), make_vec(env_id), make_sync(env_id)):
        space = envs.observation_space
        if isinstance(space, gym.spaces.Dict):
            assert list(space) == list(envs.reset(seed=0)[0])
            assert list(space) == list(envs.step(envs.action_space.sample())[0])


@every_id
def test_the_same_seed_gives_the_same_200_steps(env_id):
    env = make(env_id)
    actions = draw(env, 200)
    first = play(env, actions, seed=7)
    assert len(first) > 207, "several episodes"
    assert_same(first, play(make(env_id), actions, seed=7))
    play(env, actions[:10], seed=8)
    assert_same(first, play(env, actions, seed=7))
    episode = DECISIONS[family_of(env_id).name] + 1
    assert not same(first[:episode], play(env, actions[: episode - 1], seed=8)[:episode])
    second = first[episode : 2 * episode]
    assert not same(first[:episode], second), "the next episode is another one"


@every_id
def test_the_spec_survives_json(env_id):
    for kwargs in ({}, arguments(env_id)):
        env = gym.make(env_id, max_episode_steps=2, **kwargs)
        again = gym.make(EnvSpec.from_json(env.spec.to_json()))
        assert_same(play(env, draw(env, 3), seed=11), play(again, draw(env, 3), seed=11))


@every_case
def test_copies_and_states_go_on_exactly(env_id, kind):
    decisions = DECISIONS[family_of(env_id).name]
    env, other = make(env_id, kind), make(env_id, kind)
    actions = draw(env, decisions + 5)
    for at in (0, decisions // 2, decisions - 1):
        seen = play(env, actions[:at], seed=5)[-1][0]
        state = env.unwrapped.clone_state()
        other.reset(seed=9)
        back, info = other.unwrapped.restore_state(pickle.loads(pickle.dumps(state)))
        assert_same(back, seen)
        if "action_mask" in info:
            assert_same(info["action_mask"].astype(bool), env.unwrapped.action_masks())
        twins = [other, pickle.loads(pickle.dumps(env)), copy.deepcopy(env)]
        later = play(env, actions, reset=False)
        log = env.unwrapped.request_log()
        for twin in twins:
            assert_same(play(twin, actions, reset=False), later)
            assert_same(twin.unwrapped.request_log(), log)
        env.unwrapped.restore_state(state)  # which is not used up
        assert_same(play(env, actions, reset=False), later)


@every_id
def test_states_of_ends_are_ends_and_those_of_other_systems_are_refused(env_id):
    env = make(env_id).unwrapped
    actions = draw(env, DECISIONS[family_of(env_id).name])
    env.reset(seed=0)
    for action in actions:
        env.step(action)
    state = env.clone_state()
    env.reset(seed=1)
    env.restore_state(state)
    with pytest.raises(ResetNeeded):
        env.step(actions[0])
    other = make(env_id, **OTHER[family_of(env_id).name]).unwrapped
    other.reset(seed=0)
    with pytest.raises(ValueError, match="same arguments|known"):
        other.restore_state(state)


@every_case
def test_a_state_moves_from_a_single_environment_into_a_row(env_id, kind):
    decisions = DECISIONS[family_of(env_id).name]
    env, envs = make(env_id, kind), make_vec(env_id, kind)
    play(env, draw(env, decisions // 2), seed=3)
    envs.reset(seed=20)
    batches = draw(envs, decisions + 5, seed=1)
    envs.step(batches[0])
    untouched = pickle.loads(pickle.dumps(envs))
    envs.unwrapped.restore_state(2, env.unwrapped.clone_state())
    again = pickle.loads(pickle.dumps(envs))
    ended = False
    for batch in batches:
        seen, rewards, terminated, *_ = found = envs.step(batch)
        assert_same(found, again.step(batch))
        as_before = untouched.step(batch)
        assert_same(rows(seen, [0, 1]), rows(as_before[0], [0, 1]))
        assert_same(rewards[:2], as_before[1][:2])
        if ended:  # the step after the end only resets
            mine, ended = env.reset()[0], False
        else:
            mine, reward, ended, *_ = env.step(rows(batch, 2))
            assert reward == rewards[2] and ended == terminated[2]
        assert_same(rows(seen, 2), rows(mine, ...))


PLAIN = ("orca", "drawn", "dynamic", "approximate", "budget")
VECTORS = [
    (env_id, kind, mode)
    for env_id, kind in CASES
    for mode in AutoresetMode
    if mode is AutoresetMode.NEXT_STEP or (kind in PLAIN and env_id == family_of(env_id).env_id)
]
"""Every kind in the default mode; plain systems, and those that tell more at a reset, in all."""


@pytest.mark.parametrize(("env_id", "kind", "mode"), VECTORS)
def test_the_vector_environment_equals_single_ones(env_id, kind, mode):
    decisions = DECISIONS[family_of(env_id).name]
    limits = [{}] + [{"max_episode_steps": n} for n in (decisions - 1, decisions)]
    for kwargs in limits[: 3 if arguments(env_id, kind) is arguments(env_id) else 1]:
        native = make_vec(env_id, kind, autoreset_mode=mode, **kwargs)
        sync = make_sync(env_id, kind, mode=mode, **kwargs)
        assert native.metadata["autoreset_mode"] is sync.metadata["autoreset_mode"] is mode
        assert native.single_observation_space == sync.single_observation_space
        assert native.action_space == sync.action_space
        assert_same(native.reset(seed=21), sync.reset(seed=21))
        assert native.np_random_seed == sync.np_random_seed
        done, ends = np.zeros(3, bool), 0
        for step, actions in enumerate(draw(native, 3 * decisions // 2 + 8, seed=8)):
            mask = done if mode is AutoresetMode.DISABLED else np.zeros(3, bool)
            if step in (1, decisions + 2):  # in mid-episode, so that the systems get out of step
                mask = mask | [True, False, step == 1]
            if mask.any():
                seeds = [5, None, None] if step == 1 else None
                how = {"seed": seeds, "options": {"reset_mask": mask}}
                assert_same(native.reset(**how), sync.reset(**how), f"reset before step {step}")
            found = native.step(actions)
            assert_same(found, sync.step(actions), f"step {step}")
            done = found[2] | found[3]
            ends += done.sum()
        assert ends >= 3
        logs = sync.call("request_log")
        for row in range(3):
            assert_same(native.unwrapped.request_log(row), logs[row])


@every_case
def test_10000_random_steps_stay_inside_the_space(env_id, kind):
    """Shared among the kinds of an id; ``validate`` asserts that the space has what is seen."""
    kinds = sum(case[0] == env_id for case in CASES)
    count = 250 if "Placement" in env_id else 10_000
    envs = make_vec(env_id, kind, 16, validate=True)
    envs.reset(seed=0)
    for actions in draw(envs, 1 + count // 16 // kinds):
        observation, reward, *_ = envs.step(actions)
        parts = observation.values() if isinstance(observation, dict) else [observation]
        assert all(np.isfinite(part).all() for part in parts)
        assert reward.dtype == np.float64 and np.isfinite(reward).all()


def test_validate_finds_a_value_outside():
    for env in (make(servegym.ENV_IDS[0], validate=True), make_vec(servegym.ENV_IDS[0])):
        env.unwrapped.validate = True
        env.reset(seed=0)
        env.unwrapped.batch.observation["experts"][0, 0, 0] = np.nan
        with pytest.raises(AssertionError, match="outside"):
            env.unwrapped._observation()


@every_case
def test_masks_and_rewards(env_id, kind):
    env = make(env_id, kind)
    _, info = env.reset(seed=0)
    ended = False
    while not ended:
        if "action_mask" in info:
            mask = info["action_mask"]
            sizes = getattr(env.action_space, "nvec", [len(mask)])
            assert mask.dtype == np.int8 and len(mask) == sum(sizes) and mask.max() == 1
            assert all(part.any() for part in np.split(mask, np.cumsum(sizes)[:-1]))
            np.testing.assert_array_equal(mask, env.unwrapped.action_masks())
            assert env.unwrapped.action_masks().dtype == np.bool_
        _, reward, ended, truncated, info = env.step(env.action_space.sample())
        assert type(reward) is float and truncated is False
        assert all(type(x) is float for x in info["reward_terms"].values())
        assert sum(info["reward_terms"].values()) == pytest.approx(reward, rel=1e-14)
    assert info["episode_kpis"] and env.unwrapped.episode_kpis() == pytest.approx(
        info["episode_kpis"], nan_ok=True
    )


@every_id
def test_time_limits_truncate(env_id):
    env, limited = make(env_id), make(env_id, max_episode_steps=2)
    action = draw(env, 1)[0]
    assert_same(env.reset(seed=2), limited.reset(seed=2))
    for ended in (False, True):
        one, other = env.step(action), limited.step(action)
        assert_same(one[:3], other[:3])
        assert one[3] is False and other[3] is ended
        assert_same(one[4], other[4])
    assert "episode_kpis" not in other[4]


FORMS = [(env_id, form) for env_id in servegym.ENV_IDS for form in ("single", "vector")]
FORMS += [(family.env_id, "parallel") for family in FAMILIES if family.parallel]
OF_ALL = ("render", "action_masks", "observe", "state")
OF_ONE = ("request_log", "episode_kpis", "clone_state")


def in_form(env_id, form):
    """An environment in a form, an action of it, and what it tells without a step, by name."""
    if form == "parallel":
        family = importlib.import_module(f"servegym.envs.{family_of(env_id).name}")
        env = family.parallel_env(render_mode="ansi", **arguments(env_id))
        action = {agent: draw_from(env.action_space(agent), 1)[0] for agent in env.possible_agents}
    else:
        kwargs = {"autoreset_mode": "Disabled"} if form == "vector" else {}
        maker = make_vec if form == "vector" else make
        env = maker(env_id, render_mode="ansi", **kwargs).unwrapped
        action = draw(env, 1)[0]
    row = [2] if form == "vector" else []
    looks = [(name, ()) for name in OF_ALL] + [(name, row) for name in OF_ONE]
    return env, action, {n: partial(getattr(env, n), *at) for n, at in looks if hasattr(env, n)}


@pytest.mark.parametrize("env_id", servegym.ENV_IDS)
def test_options_of_a_reset_that_nobody_knows_are_refused(env_id):
    env, envs = make(env_id), make_vec(env_id)
    with pytest.raises(ValueError, match="'rate', but a reset takes no options.*gymnasium.make"):
        env.reset(seed=0, options={"rate": 5})
    for options in ({"rate": 5}, {"reset_mask": np.ones(3, bool), "rate": 5}):
        with pytest.raises(ValueError, match="'rate', but known are reset_mask"):
            envs.reset(seed=0, options=options)
    for given in ([1], "rate"):
        with pytest.raises(ValueError, match="options=.*must be a mapping"):
            env.reset(options=given)
    assert_same(env.reset(seed=3, options={}), env.reset(seed=3))
    assert_same(envs.reset(seed=3, options={}), envs.reset(seed=3))
    with pytest.raises(ValueError, match="'human' is unknown.*pygame.*pip install '.\\[video\\]'"):
        make_vec(env_id, render_mode="human")


@pytest.mark.parametrize(("env_id", "form"), FORMS)
def test_calls_out_of_order_are_refused_or_right(env_id, form):
    env, action, looks = in_form(env_id, form)
    assert len(looks) >= 3
    for look in (*looks.values(), partial(env.step, action)):
        with pytest.raises(ResetNeeded, match="reset"):
            look()
    if form == "vector":  # one system is begun: it can be copied, but all must be to step
        env.reset(seed=0, options={"reset_mask": np.array([False, False, True])})
        state = env.clone_state(2)
        for look in (partial(env.clone_state, 1), env.render, partial(env.step, action)):
            with pytest.raises(ResetNeeded, match="reset"):
                look()
        for row in range(3):
            env.restore_state(row, state)
        env.step(action)
    twin = in_form(env_id, form)[0]
    assert_same(env.reset(seed=0), twin.reset(seed=0))
    for _ in range(2):  # `close` holds nothing: what goes on does so as if it had not been called
        assert_same(env.step(action), twin.step(action))
        env.close()
    done = False
    while not done:
        _, _, ends, *_ = env.step(action)
        done = all(ends.values()) if form == "parallel" else np.all(ends)
        if form == "vector" and np.any(ends):
            break
    with pytest.raises(ResetNeeded, match="reset"):
        env.step(action)
    assert all(look() is not None for look in looks.values())
    if "clone_state" in looks:  # a state begins an environment as a reset does
        fresh, _, theirs = in_form(env_id, form)
        for row in range(3) if form == "vector" else [None]:
            at = [] if row is None else [row]
            fresh.restore_state(*at, env.clone_state(*at))
        assert_same(theirs["request_log"](), looks["request_log"]())
        assert theirs["render"]() == looks["render"]()


def scribble(thing):
    """Overwrite all that is there."""
    if isinstance(thing, dict):
        for part in thing.values():
            scribble(part)
        thing.clear()
    elif isinstance(thing, np.ndarray) and thing.dtype == object:
        for part in thing:
            scribble(part)
    elif isinstance(thing, np.ndarray) and thing.flags.writeable:
        thing[...] = 1 if thing.dtype.kind == "b" else 77


@every_id
def test_what_was_returned_is_ours_to_change(env_id):
    count = DECISIONS[family_of(env_id).name]
    pairs = [(make(env_id), make(env_id))]
    for mode in ("NextStep", "SameStep"):
        pairs.append(tuple(make_vec(env_id, autoreset_mode=mode) for _ in range(2)))
    for env, twin in pairs:
        env.reset(seed=1)
        for part in twin.reset(seed=1):
            scribble(part)
        for action in draw(env, count if env is pairs[0][0] else 2 * count):
            expected, found = env.step(action), twin.step(action)
            assert_same(expected, found)
            for part in found:
                scribble(part)


@every_id
def test_without_copy_the_buffers_themselves_come_back(env_id):
    envs, copied = make_vec(env_id, copy=False), make_vec(env_id)
    action = draw(envs, 1)[0]
    first, one = envs.reset(seed=0)[0], copied.reset(seed=0)[0]
    assert_same(first, one)
    second, two = envs.step(action)[0], copied.step(action)[0]
    assert_same(second, two)
    for name in first if isinstance(first, dict) else [()]:
        assert np.shares_memory(first[name], second[name])
        assert not np.shares_memory(one[name], two[name])


@every_id
def test_bad_actions_move_no_system(env_id):
    env, envs = make(env_id), make_vec(env_id)
    good, batch = draw(env, 1)[0], draw(envs, 1)[0]
    for some, action in ((env, good), (envs, batch)):
        some.reset(seed=0)
        some.step(action)
        twin = copy.deepcopy(some)
        bad = [None, "1", 1j, [[]], 0.5, {}, np.full(99, 0), np.full(np.shape(action), 0.5)]
        if not isinstance(action, dict):
            bad += [np.full(np.shape(action), x, t) for x in (-1, 99) for t in (int, np.int8)]
            bad += [np.full(np.shape(action), x) for x in (10**30, 2**63, np.uint64(2**64 - 1))]
        for wrong in bad:
            with pytest.raises(ValueError, match="action"):
                some.step(wrong)
        assert_same(some.step(action), twin.step(action))


@every_id
def test_bad_seeds_and_reset_masks_are_refused(env_id):
    envs = make_vec(env_id, num_envs=2)
    twin = copy.deepcopy(envs)
    for seed in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="num_envs=2"):
            envs.reset(seed=seed)
    for seed in (-1, [3, -1]):
        with pytest.raises(gym.error.Error, match="-1"):
            twin.reset(seed=seed)
    envs.reset(seed=0)
    for mask in (np.array([1, 0]), np.array([True]), np.zeros(2, bool), "both", None):
        with pytest.raises(ValueError, match="reset_mask"):
            envs.reset(seed=7, options={"reset_mask": mask})


@pytest.mark.parametrize("env_id", [family.env_id for family in FAMILIES])
def test_pictures_follow_the_state_and_change_nothing(env_id):
    plain = make(env_id)
    actions = draw(plain, 2)
    expected = play(plain, actions, seed=3)
    for mode, kind in (("rgb_array", np.ndarray), ("ansi", str)):
        env = make(env_id, render_mode=mode)
        assert_same(env.reset(seed=3), expected[0])
        frames = [env.render()]
        for action, step in zip(actions, expected[1:], strict=False):
            assert_same(env.step(action), step)
        frames.append(env.render())
        assert all(type(frame) is kind for frame in frames) and not same(*frames)
        if mode == "rgb_array":
            assert frames[0].ndim == 3 and frames[0].dtype == np.uint8
            assert len(np.unique(frames[1].reshape(-1, 3), axis=0)) > 5
    envs = make_vec(env_id, num_envs=2, render_mode="ansi")
    envs.reset(seed=3)
    assert envs.render()[0] == frames[0] and len(envs.render()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not any(make_vec(env_id, num_envs=2).render() or ())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_one_compiled_version_of_each_entry_point(family):
    steps = ".steps" if family.name == "prefix_routing" else ""
    module = importlib.import_module(f"servegym.envs.{family.name}.kernel{steps}")
    entries = [getattr(module, name, None) for name in ("begin", "observe", "step")]
    entries = [entry for entry in entries if hasattr(entry, "signatures")]
    if not entries:
        pytest.skip("nothing is compiled")
    for env_id in family.env_ids:
        for kind in KINDS[family.name]:
            for env in (make(env_id, kind), make_vec(env_id, kind, copy=False)):
                env.reset(seed=0)
                env.step(draw(env, 1)[0])
    for entry in entries:
        assert len(entry.signatures) == 1, entry


def test_a_family_that_lacks_a_part_fails_when_it_is_defined():
    with pytest.raises(TypeError, match="Half lacks make_observation_space, make_action_space"):
        parts = ("arguments", "problem_of", "make_batch", "frame")
        type("Half", (BatchEnv,), dict.fromkeys(parts, dict))
    with pytest.raises(TypeError, match="Half lacks draw, step, clone, restore, see Batch"):
        type("Half", (Batch,), dict.fromkeys(("begin", "kpis", "request_log"), dict))
    with pytest.raises(TypeError, match="Half lacks step, see BatchParallelEnv"):
        type("Half", (BatchParallelEnv,), {"_observations": dict})
