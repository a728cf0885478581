"""Text and pixels of a placement: what they show is what the system is."""

import numpy as np
import pytest

from servegym.envs._frames import HEIGHT, WIDTH
from servegym.envs.expert_placement import parallel_env
from servegym.envs.expert_placement.env import ExpertPlacementEnv
from servegym.envs.expert_placement.render import expert_colours, render
from servegym.envs.expert_placement.vector_env import ExpertPlacementVectorEnv

SHORT = {"model": "toy", "epochs": 4, "epoch_s": 20.0, "mean_interarrival_s": 1.0}


def played(steps=2, mode="rgb_array", **kwargs):
    env = ExpertPlacementEnv(**SHORT, action_mode="placement", render_mode=mode, **kwargs)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for i in range(steps):
        shape = env.action_space["plan"].shape
        env.step({"migrate": int(i == 0), "plan": rng.integers(0, 2, shape).astype(np.int8)})
    return env


@pytest.fixture
def pixels():
    pytest.importorskip("matplotlib")


def test_the_text_says_who_holds_what():
    env = played(mode="ansi")
    text = env.render()
    cluster, sim = env.problem.cluster, env.batch.episodes[0].simulator
    lines = text.splitlines()
    assert "edge_hetero, toy" in lines[0] and "decision 2 of 4" in lines[0]
    assert "1 changes" in lines[0] and f"{env.episode_kpis()['mean_latency_s']:.2f} s" in lines[0]
    assert len(lines) == 2 + cluster.num_servers
    view = cluster.server_view(sim.placement())
    for n, line in enumerate(lines[2:]):
        assert f"{view[n].sum()}/{cluster.cap[n]}" in line or cluster.gpus[n] > 1
        column = lines[1].index("experts of each layer")
        drawn = line[column : column + cluster.layers]
        for layer, mark in enumerate(drawn):
            share = view[n, layer].mean()
            assert (mark == "█") == (share == 1.0) and (mark == " ") == (share == 0.0)


def test_the_local_ratio_is_that_of_each_epoch():
    env = played(steps=0, mode="ansi")
    totals = np.zeros((2, 3))
    for epoch in range(4):
        plan = np.zeros(env.action_space["plan"].shape, np.int8)
        env.step({"migrate": 0, "plan": plan})
        server = env.batch.episodes[0].simulator.state.server
        now = np.array([server["all_local_tokens"], server["all_remote_tokens"]])
        local, remote = now - totals
        totals = now
        np.testing.assert_allclose(
            env.batch.episodes[0].local_ratio[epoch], local / (local + remote)
        )
        assert np.isnan(env.batch.episodes[0].local_ratio[epoch + 1 :]).all()
    state = env.clone_state()
    env.reset(seed=1)
    assert np.isnan(env.batch.episodes[0].local_ratio).all()
    env.restore_state(state)
    np.testing.assert_allclose(env.batch.episodes[0].local_ratio[3], local / (local + remote))


def test_an_epoch_without_requests_has_no_ratio():
    env = ExpertPlacementEnv(**SHORT | {"mean_interarrival_s": 1e9, "model": "toy"})
    env.reset(seed=0)
    env.step({"migrate": 0, "plan": np.ones((3, 4), np.float32)})
    assert np.isnan(env.batch.episodes[0].local_ratio).all()
    assert "·" in render(env.batch.episodes[0], "ansi")


def test_colours_tell_held_missing_and_coming():
    held = np.array([[True, False, False, False]])
    coming = np.array([[False, False, True, False]])
    colours = expert_colours(held, coming, np.array([[9, 9, 9, 0]]))[0]
    green, red, yellow, white = colours
    assert green[1] > green[0] and red[0] > 2 * red[1]
    assert yellow[0] > yellow[2] and yellow[1] > yellow[2]
    np.testing.assert_array_equal(white, 1.0)
    light = expert_colours(held, coming, np.array([[0, 9, 9, 0]]))[0, 0]
    assert light.sum() > green.sum(), "deeper the more it is used"


def test_all_kinds_of_environments_render(pixels):
    env = ExpertPlacementEnv(**SHORT, render_mode="ansi")
    envs = ExpertPlacementVectorEnv(2, **SHORT, render_mode="ansi")
    every = parallel_env(**SHORT, render_mode="ansi")
    for each in (env, envs, every):
        each.reset(seed=0)
    assert len(envs.render()) == 2
    assert env.render() == envs.render()[0] == every.render()
    every.render_mode = "rgb_array"
    assert every.render().shape == (HEIGHT, WIDTH, 3)


def test_without_a_mode_nothing_is_drawn():
    env = ExpertPlacementEnv(**SHORT)
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None
    assert parallel_env(**SHORT).render() is None
    for make in (ExpertPlacementEnv, parallel_env):
        with pytest.raises(ValueError, match="rgb_array"):
            make(**SHORT, render_mode="human")


def test_the_command_writes_pictures(pixels, tmp_path):
    from servegym.experiments.render import render_episode

    said = []
    kwargs = {**SHORT, "epochs": 2}
    name = "servegym/ExpertPlacement-v0"
    render_episode(name, "prism", 2, kwargs, echo=said.append)
    assert sum("decision" in line for line in said) >= 2 and any("slots used" in x for x in said)
    render_episode(name, "prism", 2, kwargs, out=tmp_path / "a.gif", echo=said.append)
    assert (tmp_path / "a.gif").read_bytes()[:3] == b"GIF"
