"""Late binding: which request is offered when, what is seen of it, and nothing else changes."""

import copy
import math
import pickle

import gymnasium as gym
import numpy as np
import pytest

import servegym
from servegym.baselines.llm_routing import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.envs.llm_routing import parallel_env
from servegym.envs.llm_routing.core import OUTCOMES
from servegym.envs.llm_routing.env import LLMRoutingEnv
from servegym.experiments.evaluate import evaluate

from ...nested import same
from .test_kernel_reference import assert_same_observation, make_case

GRAPH, FLAT, EXPERTS, SUMMARY = servegym.ENV_IDS[:4]
BASE = {"num_experts": 3, "episode_requests": 40, "rate": 12.0}
LATE = {**BASE, "late_binding": {"hold_limit_s": 0.8, "hold_capacity": 3}}
HOLD = 4


def run_late_case(seed, **choices):
    """Random actions, half of them holding, in the kernel and in the reference."""
    rng = np.random.default_rng(seed)
    hold = float(rng.choice([0.05, 0.3, 2.0])), int(rng.integers(1, 5))
    batch, reference, _ = make_case(seed, hold=hold, **choices)
    which = np.ones(1, dtype=np.int8)
    batch.begin(which)
    experts, again, limits = batch.problem.num_experts, 0, 0
    while not reference.terminated:
        j = reference.current
        where = f"seed {seed}, request {j} at {reference.time}"
        assert int(batch.env["current"][0]) == j, where
        assert batch.env["now"][0] == pytest.approx(reference.time, rel=1e-12)
        legal = batch.action_mask[0]
        _, mask = reference.observe()
        assert legal.tolist() == [*mask, reference.may_hold()], where
        waited = min(reference.time - reference.arrivals[j], hold[0])
        seen = batch.observation["held"][0]
        np.testing.assert_allclose(seen, [waited, reference.others], rtol=1e-6, atol=1e-6)
        again += waited > 0
        limits += waited == hold[0]
        assert_same_observation(batch, reference, where)
        action = int(rng.integers(0, experts + 1)) if rng.random() < 0.5 else experts + 1
        batch.step(np.array([action]), which)
        reward, _, ended = reference.step(action)
        assert batch.out[0, 0] + batch.out[0, 1] == pytest.approx(reward, abs=1e-6), where
        assert bool(batch.out[0, 2]) == ended
    for mine, theirs in zip(batch.request_log(0), reference.log, strict=True):
        assert OUTCOMES[mine["outcome"]] == theirs.outcome
        if theirs.outcome == "completed":
            assert mine["finish_s"] == pytest.approx(theirs.finish, rel=1e-9)
    kpis = batch.kpis(0)
    done = [entry for entry in reference.log if entry.outcome == "completed"]
    if done:
        parts = [kpis[f"mean_{k}_s"] for k in ("communication", "routing", "waiting", "inference")]
        assert sum(parts) == pytest.approx(np.mean([entry.e2e for entry in done]))
        held_s = np.mean([e.available - e.arrival - e.routing_s - e.communication_s for e in done])
        assert kpis["mean_hold_s"] == pytest.approx(held_s, abs=1e-9)
    return again, limits


def test_offers_equal_the_reference():
    again = limits = 0
    for seed in range(25):
        more = run_late_case(seed)
        again, limits = again + more[0], limits + more[1]
    assert again > 200 and limits > 30, "held requests were offered again, to their limit too"


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["orca", "chunked_prefill"])
def test_offers_equal_the_reference_in_many_cases(scheduler):
    for seed in range(100, 200):
        run_late_case(seed, scheduler=scheduler, requests=60)


def test_held_request_by_hand():
    """One expert with one slot: the second request is offered again when the first completes."""
    env = LLMRoutingEnv(
        num_experts=1,
        episode_requests=3,
        running_capacity=1,
        late_binding={"hold_limit_s": 100.0, "hold_capacity": 1},
        reward="completed_qos",
    )
    env.reset(seed=0)
    batch = env.batch
    batch.arrivals[0] = [1.0, 1.1, 1.2]
    batch.begin(np.ones(1, np.int8))
    env.step(1)
    seen, _, _, _, info = env.step(2)
    assert seen["held"].tolist() == [0.0, 1.0]
    assert info["action_mask"].tolist() == [1, 1, 0], "the only place is taken"
    _, _, _, _, info = env.step(2)  # so it is rejected
    log = env.request_log()
    assert [OUTCOMES[k] for k in log["outcome"]] == ["completed", "pending", "rejected"]
    now = float(batch.env["now"][0])
    assert now == log["finish_s"][0]
    assert info["action_mask"].tolist() == [1, 1, 1]
    seen, _, ended, _, _ = env.step(2)  # held again: nobody completes any more, so to the limit
    assert not ended and seen["held"].tolist() == [100.0, 0.0]
    assert env.action_masks().tolist() == [True, True, False]
    _, _, ended, _, info = env.step(1)
    log = env.request_log()
    assert ended and log["available_s"][1] > 101.1
    kpis = info["episode_kpis"]
    assert kpis["mean_hold_s"] == pytest.approx(100.0 / 2, rel=1e-9)
    late = (log["finish_s"][1] - 1.1) / log["output_tokens"][1]
    first = (log["finish_s"][0] - 1.0) / log["output_tokens"][0]
    assert kpis["mean_latency_s_per_token"] == pytest.approx((late + first) / 2)


def test_who_never_holds_plays_as_without_late_binding():
    for env_id, width in ((GRAPH, None), (FLAT, 2), (EXPERTS, 2), (SUMMARY, 2)):
        extra = {"validate": True, "speed_noise": 0.2 if env_id == FLAT else 0.0}
        early, late = gym.make(env_id, **BASE, **extra), gym.make(env_id, **LATE, **extra)
        mine, theirs = late.reset(seed=3), early.reset(seed=3)
        for action in [*np.random.default_rng(3).integers(0, 4, 40), None]:
            if width is None:
                assert same({k: v for k, v in mine[0].items() if k != "held"}, theirs[0])
            else:
                assert same(mine[0][..., :-width], theirs[0]) and not mine[0][..., -width:].any()
            assert same(mine[-1]["action_mask"][:-1], theirs[-1]["action_mask"])
            if action is not None:
                mine, theirs = late.step(int(action)), early.step(int(action))
                assert mine[1:4] == theirs[1:4]
        kpis = mine[4]["episode_kpis"]
        assert kpis.pop("mean_hold_s") == pytest.approx(0.0, abs=1e-9)
        assert kpis == pytest.approx(theirs[4]["episode_kpis"])


def late_actions(count, rows):
    rng = np.random.default_rng(0)
    return np.where(rng.random((count, rows)) < 0.4, HOLD, rng.integers(0, 5, (count, rows)))


@pytest.mark.parametrize("env_id", [GRAPH, FLAT, EXPERTS, SUMMARY])
def test_native_vector_equals_single(env_id):
    one = gym.make_vec(env_id, num_envs=3, vectorization_mode="sync", **LATE)
    native = gym.make_vec(env_id, num_envs=3, num_threads=2, **LATE)
    assert same(one.reset(seed=4)[0], native.reset(seed=4)[0])
    ends = 0
    for actions in late_actions(200, 3):
        mine, theirs = one.step(actions), native.step(actions)
        assert same(mine[:4], theirs[:4])
        assert same(mine[4]["action_mask"], theirs[4]["action_mask"])
        ends += int(mine[2].sum())
    assert ends >= 3


@pytest.mark.parametrize("env_id", [GRAPH, SUMMARY])
def test_state_can_be_cloned_pickled_and_restored(env_id):
    env, other = (gym.make(env_id, **LATE).unwrapped for _ in range(2))
    env.reset(seed=1)
    actions = late_actions(200, 1)[:, 0]
    seen = [copy.deepcopy(env.step(int(a))) for a in actions[:30]]
    assert env.batch.env["held"][0] > 0
    state, twin = env.clone_state(), pickle.loads(pickle.dumps(env))
    assert same(twin._observation(), seen[-1][0])

    def rest(of):
        found = []
        for action in actions[30:]:
            found.append(copy.deepcopy(of.step(int(action))))
            if found[-1][2]:
                return found
        raise AssertionError("the episode did not end")

    mine = rest(env)
    other.reset(seed=9)
    again, info = other.restore_state(state)
    assert same(again, seen[-1][0]) and same(info["action_mask"], seen[-1][4]["action_mask"])
    assert same(rest(other), mine) and same(rest(twin), mine)
    early = gym.make(env_id, **BASE).unwrapped
    early.reset(seed=1)
    with pytest.raises(ValueError, match="late_binding"):
        early.restore_state(state)


def test_drawn_fleets_hold_too():
    env = gym.make(SUMMARY, fleet="random", late_binding=True, episode_requests=60, validate=True)
    rng, held = np.random.default_rng(0), 0
    for seed in range(3):
        seen, info = env.reset(seed=seed)
        assert env.action_space.n == 18 and seen.shape == (16, 46)
        ended = False
        while not ended:
            legal = np.flatnonzero(info["action_mask"])
            action = 17 if rng.random() < 0.5 and 17 in legal else int(rng.choice(legal))
            seen, _, ended, _, info = env.step(action)
            assert not seen[seen[:, 0] == 0].any()
            held += seen[0, -1] > 0
    assert held > 10


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"late_binding": 1}, ["late_binding=1"]),
        ({"late_binding": {"hold_limit": 1}}, ["hold_limit_s"]),
        ({"late_binding": {"hold_limit_s": 0}}, ["hold_limit_s", "0"]),
        ({"late_binding": {"hold_limit_s": math.inf}}, ["hold_limit_s", "inf"]),
        ({"late_binding": {"hold_capacity": 0}}, ["hold_capacity", "0"]),
        ({"late_binding": True, "staleness_s": 1.0}, ["late_binding", "staleness_s"]),
        (
            {
                "late_binding": True,
                "failures": {"mean_time_to_failure_s": 8.0, "mean_time_to_repair_s": 2.0},
            },
            ["late_binding", "failures"],
        ),
    ],
    ids=str,
)
def test_bad_values_are_refused(kwargs, words):
    with pytest.raises(ValueError) as caught:
        LLMRoutingEnv(**kwargs)
    for word in words:
        assert word in str(caught.value)


def test_actions_out_of_range_and_several_access_points_are_refused():
    env = gym.make(GRAPH, **LATE).unwrapped
    env.reset(seed=0)
    with pytest.raises(ValueError, match="out of range"):
        env.step(5)
    with pytest.raises(ValueError, match="late_binding"):
        parallel_env(late_binding=True)


def test_rule_holds_and_without_worth_is_the_early_rule():
    kwargs = {"rate": 9.0, "episode_requests": 150, "split": "val"}
    system = RoutingSystem.from_kwargs(rate=9.0)
    never, now = make_policy("late_qos", system, worth=0.0), make_policy("late_qos", system)
    early = make_policy("expected_qos", system)
    rows = evaluate(GRAPH, [early, never, now], 3, 0, kwargs)
    qos = np.array([row["avg_qos"] for row in rows]).reshape(3, 3)
    assert qos[1].tolist() == qos[0].tolist()
    assert min(row["mean_hold_s"] for row in rows[6:]) > 0.001
    assert abs(qos[2].mean() - qos[0].mean()) < 0.05
    late = {**kwargs, "late_binding": True}
    again = [row["avg_qos"] for row in evaluate(GRAPH, [early], 3, 0, late)]
    assert again == qos[0].tolist(), "a rule that knows no holding plays on"
    with pytest.raises(ValueError, match="worth"):
        make_policy("late_qos", system, worth=-1.0)
