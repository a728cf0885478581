"""Text and pixels of a placement: what they show is what the system is."""

import numpy as np
import pytest

from servegym.envs._frames import HEIGHT, WIDTH
from servegym.envs.expert_placement import parallel_env
from servegym.envs.expert_placement.env import ExpertPlacementEnv
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
