"""Gymnasium's wrappers on every id, and scripts that know nothing of this package but an id."""

import json
import subprocess
import sys

import gymnasium as gym
import pytest
from gymnasium import wrappers

import servegym

from .settings import SMALL, STEPS, make

every_id = pytest.mark.parametrize("env_id", servegym.ENV_IDS)


@every_id
def test_wrappers_take_every_id(env_id):
    env = wrappers.RecordEpisodeStatistics(wrappers.FlattenObservation(make(env_id)))
    env.reset(seed=0)
    paid, ended = 0.0, False
    while not ended:
        observation, reward, ended, _, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        paid += reward
    assert info["episode"]["l"] == STEPS[env_id] and "episode_kpis" in info
    assert info["episode"]["r"] == pytest.approx(paid, abs=1e-5)


@every_id
def test_record_video(env_id, tmp_path):
    pytest.importorskip("moviepy", reason="RecordVideo writes with moviepy")
    from moviepy import VideoFileClip

    assert "rgb_array" in gym.make(env_id, **SMALL[env_id]).metadata["render_modes"]
    env = wrappers.RecordVideo(
        wrappers.TimeLimit(make(env_id, render_mode="rgb_array"), 4), str(tmp_path / "videos")
    )
    env.reset(seed=0)
    while not any(env.step(env.action_space.sample())[2:4]):
        pass
    env.close()
    (video,) = tmp_path.glob("videos/*.mp4")
    with VideoFileClip(str(video)) as clip:
        assert clip.n_frames == 5  # the first observation's and one a step
        height, width, _ = env.unwrapped.render().shape
        # The encoder takes even sizes only.
        assert abs(clip.w - width) <= 1 and abs(clip.h - height) <= 1


SCRIPT = """
import json, sys
import gymnasium
for env_id, (kwargs, steps) in json.loads(sys.argv[1]).items():
    env = gymnasium.make("servegym:" + env_id, **kwargs)
    info, count, ended = env.reset(seed=0)[1], 0, False
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    while not ended:
        mask = info["action_mask"] if discrete else None
        _, _, ended, _, info = env.step(env.action_space.sample(mask))
        count += 1
    assert count == steps, count
    envs = gymnasium.make_vec("servegym:" + env_id, num_envs=4, **kwargs)
    envs.reset(seed=0)
    observation, rewards, *_ = envs.step(envs.action_space.sample())
    assert rewards.shape == (4,) and envs.observation_space.contains(observation)
    assert type(envs.unwrapped).__name__.endswith("VectorEnv"), envs
    assert type(envs.unwrapped).__module__.startswith("servegym."), "not the native one"
    print(env_id)
"""


def test_a_script_that_knows_gymnasium_alone():
    """The id carries its module: nothing but gymnasium is imported."""
    told = json.dumps({env_id: (SMALL[env_id], STEPS[env_id]) for env_id in SMALL})
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", SCRIPT, told],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(SMALL)
