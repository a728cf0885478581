"""The search by the simulator: feasible, never worse, blind to the future."""

import numpy as np
import pytest

from servegym.baselines.expert_placement import PlacementSystem
from servegym.baselines.expert_placement.feasibility import check_placement
from servegym.baselines.expert_placement.heuristics import uniform, whole_layer
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.simulation_search import (
    SimulatedLatency,
    exchange,
    latency_local_search,
)
from servegym.baselines.registry import make_policy
from servegym.envs.expert_placement.env import ExpertPlacementEnv

from .test_policies import batch


def make_env(**kwargs):
    arguments = {"model": "toy", "epochs": 3, "action_mode": "placement", "epoch_s": 60.0}
    return ExpertPlacementEnv(**(arguments | kwargs))


def make_system(**kwargs):
    env = make_env(**kwargs)
    observation, _ = env.reset(seed=0)
    return PlacementSystem.from_problem(env.problem), observation["counts"].astype(float)


def test_exchanges_keep_coverage_and_memory():
    rng = np.random.default_rng(0)
    changed = 0
    for _ in range(400):
        servers, layers, experts = rng.integers(2, 5), rng.integers(2, 5), rng.integers(1, 9)
        held = rng.random((servers, layers, experts)) < 0.4
        held[rng.integers(servers)] |= ~held.any(axis=0)
        cap = held.sum(axis=(1, 2)) + rng.integers(0, 2, servers)
        counts = rng.poisson(5.0, held.shape).astype(float)
        gains, gives = rng.choice(layers, 2, replace=False)
        n, number = int(rng.integers(servers)), int(rng.integers(1, experts + 1))
        before = held.copy()
        new = exchange(held, counts, cap, n, int(gains), int(gives), number)
        np.testing.assert_array_equal(held, before)
        if new is None:
            continue
        changed += 1
        assert new.any(axis=0).all() and (new.sum(axis=(1, 2)) <= cap).all()
        taken = (new[n, gains] & ~held[n, gains]).sum()
        assert 1 <= taken <= number
    assert changed > 200


def test_from_a_blind_start_it_finds_what_no_other_method_sees():
    """Room for every expert once: neither Eq. 2's optimum nor whole layers are what waits least."""
    system, counts = make_system(
        scenario="edge_decode", cluster_kwargs={"gpus": (1, 1), "slots": (16, 16)}
    )
    slots, home = system.slots, system.gpu_server
    objective = SimulatedLatency.of_counts(system, counts, 10)
    others = [f(counts, slots, home) for f in (uniform, whole_layer, prism, proxy_optimum)]
    found = latency_local_search(objective, counts, slots, home, others[:1], steps=400, seed=1)
    assert objective.latency_s(found) < 0.97 * min(objective.latency_s(z) for z in others)


def test_it_is_never_worse_than_its_starts_and_repeats_itself():
    system, counts = make_system()
    slots, home = system.slots, system.gpu_server
    starts = [uniform(counts, slots, home), prism(counts, slots, home)]
    objective = SimulatedLatency.of_counts(system, counts, 12)
    one = [objective.latency_s(z) for z in starts]
    found = [
        latency_local_search(objective, counts, slots, home, starts, steps=n) for n in (0, 20, 20)
    ]
    for z in found:
        assert objective.latency_s(z) <= min(one)
        check_placement(z, slots)
    np.testing.assert_array_equal(found[1], found[2])


def test_the_simulated_requests_have_the_tasks_and_rates_that_are_known():
    system, _ = make_system(mean_interarrival_s=(1.0, 3.0, 3.0), output_tokens=(2, 5))
    shares = np.eye(2)[[0, 1, 0]]
    requests = SimulatedLatency(system, shares, 3000, seed=3).requests
    share = np.bincount(requests.home, minlength=3) / 3000
    np.testing.assert_allclose(share, [0.6, 0.2, 0.2], atol=0.03)
    assert np.diff(requests.arrival).mean() == pytest.approx(0.6, rel=0.1)
    for n, task in enumerate((0, 1, 0)):
        assert set(requests.prompt[requests.home == n]) <= set(system.task_prompts[task].tolist())
    assert set(requests.outputs.tolist()) == {2, 3, 4, 5}
    assert not set(requests.prompt) & set(np.concatenate(make_env().problem.rows))


def play(env, policy, seed=0):
    policy.reset(1, seed)
    observation, _ = env.reset(seed=seed)
    plans, done = [], False
    while not done:
        action = policy.act(batch(observation), None)
        plans.append(action["plan"][0])
        observation, _, done, _, _ = env.step(
            {"migrate": int(action["migrate"][0]), "plan": plans[-1]}
        )
    return plans


def test_the_policy_sees_nothing_of_what_is_to_come():
    """Other requests after the first epoch leave the first two plans as they are."""
    env = make_env(epochs=2)
    system, family = PlacementSystem.from_problem(env.problem), "expert_placement"
    policy = make_policy("latency_local_search", system, family=family, steps=40)
    first = play(env, policy)
    assert policy.calls > 0
    draw = env.batch.episodes[0]._draw_requests

    def scrambled(random):
        requests = draw(random)
        late = np.flatnonzero(requests.arrival > env.problem.epoch_s)
        requests.prompt[late] = np.random.default_rng(1).permutation(requests.prompt[late])
        requests.home[late] = requests.home[late][::-1]
        return requests

    env.batch.episodes[0]._draw_requests = scrambled
    for one, other in zip(first, play(env, policy), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_searches_again_when_tasks_change():
    env = make_env(epochs=4, rotate_s=120.0, mean_interarrival_s=1.0)
    system, family = PlacementSystem.from_problem(env.problem), "expert_placement"
    policy = make_policy("latency_local_search", system, family=family, steps=0)
    policy.reset(1, 0)
    observation, _ = env.reset(seed=0)
    used = []
    for _ in range(4):
        before = policy.calls
        action = policy.act(batch(observation), None)
        used.append(policy.calls - before)
        observation = env.step({"migrate": int(action["migrate"][0]), "plan": action["plan"][0]})[0]
    # Tasks rotate at 120 s, so the epoch from 120 s to 180 s is the first with the others.
    assert used[0] > 0 and used[1] == used[2] == 0 and used[3] > 0
