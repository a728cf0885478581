"""RPI: labels against the clairvoyant rollout, and a fit with a known answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from servegym.agents import rpi
from servegym.agents.lib.environments import make_envs
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy
from servegym.baselines.llm_routing.rollout import Rollout
from servegym.baselines.llm_routing.system import RoutingSystem

from .runs import tiny


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
    copies, greedy = rpi.Rollouts(envs), values_of(PricedGreedy(system))
    got = copies.returns(actions, mask > 0, 1e9, greedy)
    assert np.isnan(got[mask == 0]).all() and np.isfinite(got[mask > 0]).all()
    rollout = Rollout(system, horizon=100)
    rollout.bind(envs)
    chosen = rollout.act(obs, mask)
    value = got[np.arange(6), chosen]
    assert value == pytest.approx(np.nanmax(got, 1), abs=1e-5) and len(set(chosen)) > 1
    # The environments themselves went no step further.
    np.testing.assert_array_equal(copies.returns(actions, mask > 0, 1e9, greedy), got)


def label(source, rng):
    """Labels that say that an expert is worth twice its predicted score and a drop -1."""
    for _ in range(6):
        source.step(source.heuristic, rng)
        obs, mask = source.obs, source.mask
        agent_rows = rpi.Agent(source.model.system).rows(obs)
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
    _, args = tiny("rpi", tmp_path)
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
