"""RPI: labels against the clairvoyant rollout, candidates, weights, a fit with a known answer."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import load_policy, rpi  # noqa: E402
from servegym.agents.common import make_envs  # noqa: E402
from servegym.agents.han import Layout  # noqa: E402
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy  # noqa: E402
from servegym.baselines.llm_routing.rollout import Rollout  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402

from .runs import assert_goes_on, lines  # noqa: E402


def tiny(tmp_path, **changes):
    settings = {
        "total_timesteps": 64,
        "num_envs": 8,
        "horizon_s": 1.5,
        "fit_every": 32,
        "batch_size": 16,
        "eval_episodes": 2,
        "eval_rates": (8.0,),
        "eval_requests": 20,
        "out_dir": str(tmp_path),
        "run_name": "run",
        "set": ("num_experts=3", "episode_requests=50"),
    }
    return rpi.Args(**(settings | changes))


def played(args, count, steps):
    envs = make_envs(args, count)
    system = RoutingSystem.from_env(envs)
    greedy = PricedGreedy(system)
    obs, info = envs.reset(seed=5)
    for _ in range(steps):
        obs, *_, info = envs.step(greedy.act(obs, info["action_mask"]))
    return envs, system, obs, info["action_mask"]


def test_the_best_label_is_the_choice_of_the_rollout_policy(tmp_path):
    """Up to the end of the episode both try the same on the same copies."""
    args = tiny(tmp_path, rate_low=9.0, rate_high=9.0)
    envs, system, obs, mask = played(args, 6, 30)
    actions = np.tile(np.arange(4), (6, 1))
    branches = rpi.Branches(envs, system, 4)
    got = branches.returns(actions, mask > 0, 1e9)
    assert np.isnan(got[mask == 0]).all() and np.isfinite(got[mask > 0]).all()
    rollout = Rollout(system, horizon=100)
    rollout.bind(envs)
    chosen = rollout.act(obs, mask)
    value = got[np.arange(6), chosen]
    assert value == pytest.approx(np.nanmax(got, 1), abs=1e-5) and len(set(chosen)) > 1
    # The environments themselves went no step further.
    np.testing.assert_array_equal(branches.returns(actions, mask > 0, 1e9), got)


def test_a_horizon_before_the_next_arrival_has_the_first_reward_alone(tmp_path):
    args = tiny(tmp_path, rate_low=9.0, rate_high=9.0)
    envs, system, _, _ = played(args, 4, 30)
    branches = rpi.Branches(envs, system, 1)
    actions, legal = np.ones((4, 1), np.int64), np.ones((4, 1), bool)
    one, more = (branches.returns(actions, legal, seconds) for seconds in (1e-9, 2.0))
    assert (more != one).all()
    _, reward, *_ = envs.step(actions[:, 0])
    assert one[:, 0] == pytest.approx(reward)


def test_candidates_are_distinct_and_legal_and_begin_with_the_first():
    rng, args = np.random.default_rng(0), rpi.Args(candidates=3, spread=0.01)
    mask = (rng.random((400, 5)) < 0.7).astype(np.int8)
    mask[:, 0] = 1
    value = rng.normal(size=mask.shape)
    first = np.zeros(400, np.int64)
    chosen, tried = rpi.choose_candidates(value, first, mask, args, rng)
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


def test_the_fit_finds_a_known_advantage(random_obs):
    """Labels that say that an expert is worth twice its predicted score, and a drop -1."""
    torch.manual_seed(0)
    system = RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)
    agent = rpi.Agent(Layout(4, 3, 2, impact=True), rpi.Args(epochs=20, batch_size=64), system)
    obs, rng = random_obs(1200, seed=3), np.random.default_rng(0)
    rows = agent.rows(obs)
    actions = np.argsort(rng.random((1200, 5)), 1)[:, :3].astype(np.int8)
    worth = np.concatenate([np.full((1200, 1), -1.0), 2 * obs["request"][..., 1]], 1)
    noise = rng.normal(size=(1200, 1)) * 5  # what all actions of a state have in common
    returns = (np.take_along_axis(worth, actions.astype(int), 1) + noise).astype(np.float32)
    returns[:50, 2] = np.nan
    metrics = rpi.fit(agent, rows, actions, returns, rpi.Args(epochs=20, batch_size=64))
    assert metrics["losses/held_out"] < 0.2 * metrics["losses/held_out_nothing"]
    chosen = agent.act(obs, np.ones((1200, 5), np.int8))
    assert (chosen == worth.argmax(1)).mean() > 0.8


@pytest.mark.parametrize("encoder", ["han", "sets"])
def test_one_seed_one_log_and_a_checkpoint_that_acts_alike(tmp_path, encoder):
    runs = [
        rpi.train(tiny(tmp_path, run_name=name, seed=seed, encoder=encoder))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    logs = [lines(run) for run in runs]
    assert logs[0] == logs[1] != logs[2]
    assert [row["global_step"] for row in logs[0]] == [32, 64]
    policy = load_policy(runs[0])
    assert policy.name == "rpi" and (policy.single is not None) == (encoder == "han")
    envs = make_envs(tiny(tmp_path), 2, split="eval")
    obs, info = envs.reset(seed=3)
    for _ in range(20):
        both = policy.act(obs, info["action_mask"])
        for i in range(2):
            alone = {key: value[i : i + 1] for key, value in obs.items()}
            assert policy.act(alone, info["action_mask"][i : i + 1])[0] == both[i]
        obs, *_, info = envs.step(both)


def test_an_interrupted_run_goes_on_as_if_uninterrupted(tmp_path, monkeypatch):
    assert_goes_on(rpi, tiny, tmp_path, monkeypatch, 32)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"env_id": "servegym/LLMRoutingFlat-v0"}, "env_id"), ({"candidates": 1}, "candidates")],
)
def test_wrong_arguments_are_refused(tmp_path, changes, name):
    with pytest.raises(ValueError, match=name):
        rpi.train(tiny(tmp_path, **changes))
