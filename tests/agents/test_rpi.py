"""RPI: labels against the clairvoyant rollout, candidates, weights, fits with a known answer."""

import pickle
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import load_policy, rpi  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.agents.lib.parallel import run_jobs  # noqa: E402
from servegym.baselines.llm_routing import paired_rollouts  # noqa: E402
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy  # noqa: E402
from servegym.baselines.llm_routing.paired_rollouts import common_actions  # noqa: E402
from servegym.baselines.llm_routing.rollout import Rollout  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402

from .runs import assert_goes_on, lines  # noqa: E402


def tiny(tmp_path, **changes):
    settings = {
        "total_timesteps": 64,
        "num_envs": 8,
        "horizon_s": 1.5,
        "fit_every": 32,
        "eval_episodes": 2,
        "eval_rates": (8.0,),
        "out_dir": str(tmp_path),
        "run_name": "run",
        "set": ("num_experts=3", "episode_requests=50"),
    }
    return rpi.Args(**(settings | changes))


def played(rate, count, steps):
    kwargs = rpi.ENV | {"num_experts": 3, "episode_requests": 50, "rate": rate}
    envs = make_envs("servegym/LLMRouting-v1", count, **kwargs)
    system = RoutingSystem.from_env(envs)
    greedy = PricedGreedy(system)
    obs, info = envs.reset(seed=5)
    for _ in range(steps):
        obs, *_, info = envs.step(greedy.act(obs, info["action_mask"]))
    return envs, system, obs, info["action_mask"]


def values_of(greedy):
    """Values that make a copy do what PricedGreedy does."""

    def values(obs):
        free = 1 - obs["waiting_mask"].all(-1)
        mask = np.pad(free, ((0, 0), (1, 0)), constant_values=1)
        return np.eye(mask.shape[1])[greedy.act(obs, mask)]

    return values


def test_the_best_label_is_the_choice_of_the_rollout_policy():
    """Up to the end of the episode both try the same on the same copies."""
    envs, system, obs, mask = played(9.0, 6, 30)
    actions = np.tile(np.arange(4), (6, 1))
    copies, greedy = rpi.Rollouts(envs, 4), values_of(PricedGreedy(system))
    got = copies.returns(actions, mask > 0, 1e9, greedy)
    assert np.isnan(got[mask == 0]).all() and np.isfinite(got[mask > 0]).all()
    rollout = Rollout(system, horizon=100)
    rollout.bind(envs)
    chosen = rollout.act(obs, mask)
    value = got[np.arange(6), chosen]
    assert value == pytest.approx(np.nanmax(got, 1), abs=1e-5) and len(set(chosen)) > 1
    # The environments themselves went no step further.
    np.testing.assert_array_equal(copies.returns(actions, mask > 0, 1e9, greedy), got)


def test_rollouts_in_jobs_have_the_same_returns_bit_for_bit(tmp_path, monkeypatch):
    """Each job is a part of the states, with all that it needs pickled."""
    source = rpi.Configuration(tiny(tmp_path), 8, 3)
    rng = np.random.default_rng(0)
    for _ in range(30):
        source.step(source.heuristic, rng)
    actions = np.tile(np.arange(3), (8, 1))
    given = actions, source.mask[:, :3] > 0, 2.0, source.heuristic, 0.05
    whole = source.rollouts.returns(*given)
    decisions = source.rollouts.decisions
    done = []

    class Pool:
        def submit(self, function, *job):
            function, *job = pickle.loads(pickle.dumps((function, *job)))
            done.append(len(job[0]))
            future = Future()
            future.set_result(function(*job))
            return future

    monkeypatch.setattr(paired_rollouts, "JOB_STATES", 3)
    parts = rpi.Rollouts(source.envs, 3, partial(run_jobs, pool=Pool()))
    np.testing.assert_array_equal(parts.returns(*given), whole)
    assert parts.decisions == decisions and done == [3, 3, 2]
    assert np.nanstd(whole - whole[:, :1]) > 0.05


def test_a_horizon_before_the_next_arrival_has_the_first_reward_alone():
    envs, system, _, _ = played(9.0, 4, 30)
    copies, greedy = rpi.Rollouts(envs, 1), values_of(PricedGreedy(system))
    actions, legal = np.ones((4, 1), np.int64), np.ones((4, 1), bool)
    one, more = (copies.returns(actions, legal, seconds, greedy) for seconds in (1e-9, 2.0))
    assert (more != one).all()
    _, reward, *_ = envs.step(actions[:, 0])
    assert one[:, 0] == pytest.approx(reward)


def test_the_heuristic_values_choose_as_the_priced_heuristic(tmp_path):
    """But for what it forbids: to push anyone over the requirement, which has a price here."""
    source = rpi.Configuration(tiny(tmp_path, set=("num_experts=3", "rate=5")), 64, seed=5)
    for _ in range(30):
        source.step(source.heuristic, np.random.default_rng(0))
    obs, greedy = source.obs, PricedGreedy(source.model.system)
    mask = np.pad(1 - obs["waiting_mask"].all(-1), ((0, 0), (1, 0)), constant_values=1)
    values = source.heuristic(obs)
    assert (values[:, 0] == 0).all()
    same = np.where(mask > 0, values, -np.inf).argmax(1) == greedy.act(obs, mask)
    assert same.mean() > 0.9


def test_copies_agree_where_it_costs_little():
    nan = np.nan
    values = np.array(
        [
            [[0.0, 0.50, 0.46], [0.0, 0.44, 0.47]],  # the first is better on average
            [[0.0, 0.50, 0.00], [0.0, 0.10, 0.30]],  # too dear for the second
            [[0.0, 0.10, 0.20], [nan, nan, nan]],  # alone
        ]
    )
    assert common_actions(values, 0.05)[:, 0].tolist() == [1, 1, 2]
    assert common_actions(values, 0.05)[:2, 1].tolist() == [1, 2]
    assert common_actions(values, 0.0)[:2, 1].tolist() == [2, 2]


def test_candidates_are_distinct_and_legal_and_begin_with_the_first():
    rng = np.random.default_rng(0)
    mask = (rng.random((400, 5)) < 0.7).astype(np.int8)
    mask[:, 0] = 1
    value = rng.normal(size=mask.shape)
    first = np.zeros(400, np.int64)
    chosen, tried = rpi.choose_candidates(value, first, mask, 3, 0.01, rng)
    assert (chosen[:, 0] == 0).all() and tried[:, 0].all()
    assert (np.take_along_axis(mask, chosen, 1)[tried] == 1).all()
    assert (tried.sum(1) == np.minimum(mask.sum(1), 3)).all()
    assert all(len(set(row)) == 3 for row in chosen)
    # At so low a temperature the second is the best legal one but the first.
    rest = np.where(mask > 0, value, -np.inf)
    rest[:, 0] = -np.inf
    several = mask.sum(1) > 1
    assert (chosen[several, 1] == rest.argmax(1)[several]).mean() > 0.95


def test_weights_are_the_inverse_of_the_noise():
    rng = np.random.default_rng(1)
    load = np.repeat(np.linspace(0, 1, 10), 2000)
    spread = 0.2 + load
    gain = (rng.normal(size=(len(load), 2)) * spread[:, None]).astype(np.float32)
    weight = rpi.noise_weights(load, gain)
    wanted = 1 / (spread**2 + 0.02)
    assert weight.mean() == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(weight, wanted / wanted.mean(), rtol=0.15)


def label(source, rng):
    """Labels that say that an expert is worth twice its predicted score and a drop -1."""
    for _ in range(6):
        source.step(source.heuristic, rng)
        obs, mask, system = source.obs, source.mask, source.model.system
        layout = rpi.Layout(system.num_experts, system.running_capacity, system.waiting_capacity)
        agent_rows = layout.rows(obs, source.model)
        actions = np.argsort(rng.random(mask.shape), 1)[:, :3].astype(np.int8)
        worth = np.concatenate([np.full((len(mask), 1), -1.0), 2 * obs["request"][..., 1]], 1)
        noise = rng.normal(size=(len(mask), 1)) * 5  # what all actions of a state have in common
        returns = np.take_along_axis(worth, actions.astype(int), 1) + noise
        returns[:5, 2] = np.nan
        source.labels.append((agent_rows, actions, returns.astype(np.float32)))
    return obs, worth


def test_the_fit_finds_a_known_advantage_in_several_configurations_at_once(tmp_path, monkeypatch):
    """Fleets of another size and law share the weights."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(rpi, "EPOCHS", 20)
    monkeypatch.setattr(rpi, "BATCH_SIZE", 64)
    args = tiny(tmp_path)
    settings = ("num_experts=3", 'num_experts=4 profiles="paper-linear"')
    sources = [
        rpi.Configuration(replace(args, set=("episode_requests=50", own)), 150, seed=k)
        for k, own in enumerate(settings)
    ]
    known = [label(source, rng) for source in sources]
    agent = rpi.Agent(sources[0].model.system)
    metrics = rpi.fit(agent, sources, args)
    assert metrics["losses/held_out"] < 0.2 * metrics["losses/held_out_nothing"]
    for source, (obs, worth) in zip(sources, known, strict=True):
        agent.set_system(source.model)
        chosen = agent.act(obs, np.ones_like(worth))
        found = np.take_along_axis(worth, chosen[:, None], 1)[:, 0]  # scores come in buckets
        assert (found == worth.max(1)).mean() > 0.8


def test_a_mixture_trains_on_all_its_configurations_and_improves_on_its_own_policy(
    tmp_path, monkeypatch
):
    names = []
    returns = rpi.Rollouts.returns

    def watched(self, actions, legal, horizon_s, values, near=0.0):
        names.append(getattr(values, "__name__", "heuristic"))
        return returns(self, actions, legal, horizon_s, values, near)

    monkeypatch.setattr(rpi.Rollouts, "returns", watched)
    settings = {
        "mixture": ("rate=[2,6]", "num_experts=4 profiles=paper-linear"),
        "improve_from": 32,
        "near": 0.05,
    }
    run = rpi.train(tiny(tmp_path, **settings))
    assert names == ["heuristic"] * 8 + ["values"] * 8
    for row in lines(run):
        assert {"eval/avg_qos_point_0", "eval/avg_qos_point_1"} <= set(row)
        each = [row[f"eval/avg_qos_point_{k}"] for k in range(2)]
        assert row["eval/avg_qos"] == pytest.approx(np.mean(each))
    policy = load_policy(run)
    assert policy.net.layout.experts == 3  # of the flags; load_policy(run, system) for another


def test_one_seed_one_log_and_a_checkpoint_that_acts_alike(tmp_path):
    runs = [
        rpi.train(tiny(tmp_path, run_name=name, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    logs = [lines(run) for run in runs]
    assert logs[0] == logs[1] != logs[2]
    assert [row["global_step"] for row in logs[0]] == [32, 64]
    policy = load_policy(runs[0])
    assert policy.name == "rpi"
    envs = make_envs("servegym/LLMRouting-v1", 2, **(policy.training_env | {"split": "eval"}))
    obs, info = envs.reset(seed=3)
    for _ in range(20):
        both = policy.act(obs, info["action_mask"])
        for i in range(2):
            alone = {key: value[i : i + 1] for key, value in obs.items()}
            assert policy.act(alone, info["action_mask"][i : i + 1])[0] == both[i]
        obs, *_, info = envs.step(both)


def test_an_interrupted_run_goes_on_as_if_uninterrupted(tmp_path, monkeypatch):
    mixture = ("rate=[2,6]", "num_experts=4")
    assert_goes_on(rpi, tiny, tmp_path, monkeypatch, 32, mixture=mixture, improve_from=32)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"horizon_s": 0.0}, "horizon_s"), ({"candidates": 1}, "candidates")],
)
def test_wrong_arguments_are_refused(tmp_path, changes, name):
    with pytest.raises(ValueError, match=name):
        rpi.train(tiny(tmp_path, **changes))
