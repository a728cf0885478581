"""Gymnasium's wrappers on every id, and scripts that know nothing of this package but an id."""

import json
import subprocess
import sys

import gymnasium as gym
import pytest
from gymnasium import wrappers

import servegym

from .settings import SMALL, STEPS, make


@pytest.mark.parametrize("env_id", servegym.ENV_IDS)
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
    observation, info = env.reset(seed=0)
    count, ended = 0, False
    while not ended:
        mask = info.get("action_mask")
        if isinstance(env.action_space, gymnasium.spaces.MultiDiscrete):
            sizes = env.action_space.nvec.cumsum()
            mask = tuple(mask[end - size : end] for end, size in zip(sizes, env.action_space.nvec))
        action = env.action_space.sample(mask)
        observation, reward, terminated, truncated, info = env.step(action)
        count, ended = count + 1, terminated or truncated
    assert count == steps, count
    envs = gymnasium.make_vec("servegym:" + env_id, num_envs=4, **kwargs)
    observation, info = envs.reset(seed=0)
    for _ in range(3):
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
