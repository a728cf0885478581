"""warm_planner: its value iteration against all plans of tiny chains, and its split."""

import dataclasses
import itertools

import numpy as np
import pytest

from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.baselines.serverless_moe.warm_planner import relative_values
from servegym.envs.workloads.activations import make_toy_activations

from .episodes import FAMILY, make_env


def planner(env, requests=30, **kwargs):
    system = ServerlessSystem.from_env(env)
    return make_policy("warm_planner", system, family=FAMILY, requests=requests, **kwargs)


def evaluate_plan(choice, free, cold, warm, chance, switching):
    """Average reward and relative values of a plan by one linear system.

    A state is (last regime, last configuration or 0 for nothing), ``choice[i][state]`` the next
    configuration when request i comes and the last one is found warm, ``choice[i][cold state]``
    when it is not.
    """
    n, regimes, actions = cold.shape
    states = list(itertools.product(range(regimes), range(actions + 1)))
    at = {state: k for k, state in enumerate(states)}
    size = len(states)
    step, reward = np.zeros((size, size)), np.zeros(size)
    for (r, left), i in itertools.product(states, range(n)):
        for found, share in ((left, chance), (0, 1.0 - chance)):
            taken = choice[i][at[r, found]]
            if taken == 0:
                got = free[i, r]
            else:
                got = (warm if found == taken else cold)[i, r, taken - 1]
            reward[at[r, left]] += share / n * got
            for k in range(regimes):
                step[at[r, left], at[k, taken]] += share / n * switching[r, k]
    # v + g = reward + step v, and v = 0 in the first state.
    matrix = np.zeros((size + 1, size + 1))
    matrix[:size, :size], matrix[:size, size], matrix[size, 0] = np.eye(size) - step, 1.0, 1.0
    solved = np.linalg.solve(matrix, np.append(reward, 0.0))
    return solved[-1], solved[:-1].reshape(regimes, actions + 1)


def greedy_plan(worth, free, cold, warm, switching):
    """What is best in each state given the worth of what is left warm."""
    n, regimes, actions = cold.shape
    later = switching @ worth
    choice = np.zeros((n, regimes * (actions + 1)), dtype=np.int64)
    for i, r, left in itertools.product(range(n), range(regimes), range(actions + 1)):
        options = np.append(free[i, r], cold[i, r] + later[r])
        if left:
            options[left] = warm[i, r, left - 1] + later[r, left - 1]
        choice[i, r * (actions + 1) + left] = options.argmax()
    return choice


@pytest.mark.parametrize(("n", "regimes", "actions"), [(2, 2, 1), (2, 1, 2), (3, 1, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_value_iteration_finds_the_best_of_all_plans(n, regimes, actions, seed):
    """Every plan of a tiny chain is valued by a linear system; none is better than the iterated."""
    rng = np.random.default_rng(seed)
    cold = -rng.uniform(0.5, 1.0, (n, regimes, actions))
    warm = cold + rng.uniform(0.0, 0.5, cold.shape)
    free = cold.max(axis=2) + rng.uniform(0.0, 0.2, (n, regimes))
    switching = np.array([[0.8, 0.2], [0.2, 0.8]]) if regimes == 2 else np.ones((1, 1))
    worth, value = relative_values(
        free, cold, warm, chance=0.7, switching=switching, tolerance=1e-10
    )
    states = regimes * (actions + 1)

    def gain_and_values(plan):
        choice = np.reshape(plan, (n, states))
        return evaluate_plan(choice, free, cold, warm, 0.7, switching)

    gain, relative = gain_and_values(greedy_plan(worth, free, cold, warm, switching))
    assert worth == pytest.approx(relative[:, 1:] - relative[:, :1], abs=1e-9)
    assert value.mean() == pytest.approx(gain, abs=1e-9)
    gains = [
        gain_and_values(plan)[0]
        for plan in itertools.product(range(actions + 1), repeat=n * states)
    ]
    assert gain == pytest.approx(max(gains), abs=1e-9)
    assert min(gains) < gain - 1e-3 and worth.max() > 0.0


def test_worth_by_hand():
    """One request, one configuration: warm for good, it saves (warm - cold) with chance p."""
    one = np.ones((1, 1))
    worth, value = relative_values(
        -1.0 * one, -1.1 * one[None], -0.6 * one[None], chance=0.5, switching=one, tolerance=1e-12
    )
    # D = p (W + D - (C + D)) = 0.5 * 0.5, and the cold start, C + D = -0.85, beats F = -1.
    assert worth == pytest.approx(np.array([[0.25]])) and value == pytest.approx([-0.85])
    nothing, value = relative_values(
        -1.0 * one, -1.1 * one[None], -0.6 * one[None], chance=0.0, switching=one
    )
    assert nothing == 0.0 and value == -1.0


def test_the_plan_is_of_the_train_split():
    """Other routing of the val and eval prompts, or another split of the episodes: same plan."""
    toy = make_toy_activations()
    counts, bank = toy.counts.copy(), toy.bank.copy()
    for prompt in np.flatnonzero(toy.split != 0):
        counts[prompt] = counts[prompt, :, ::-1]
        own = slice(toy.bank_start[prompt], toy.bank_start[prompt + 1])
        bank[own] = bank[own][::-1]
    changed = dataclasses.replace(toy, counts=counts, bank=bank)
    plans = [
        planner(make_env(1, episode_requests=12, activations=book, split=split)).worth
        for book, split in ((toy, "eval"), (changed, "eval"), (toy, "train"))
    ]
    assert (plans[0] == plans[1]).all() and (plans[0] == plans[2]).all()
    on_train = counts.copy()
    on_train[toy.split == 0] = on_train[toy.split == 0][:, :, ::-1]
    moved = dataclasses.replace(toy, counts=on_train)
    assert (planner(make_env(1, episode_requests=12, activations=moved)).worth != plans[0]).any()
