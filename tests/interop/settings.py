"""Small systems that the tests of this folder share."""

import gymnasium as gym

import servegym

ROUTING = {"num_experts": 3, "episode_requests": 30, "rate": 8.0}
SERVERLESS = {"model": "toy", "episode_requests": 12}
PLACEMENT = {"model": "toy", "epochs": 6, "epoch_s": 5.0}
PREFIX = {"num_replicas": 2, "episode_requests": 20, "warmup_requests": 5}

SMALL_OF = {
    "LLMRouting": ROUTING,
    "Serverless": SERVERLESS,
    "Placement": PLACEMENT,
    "PrefixRouting": PREFIX,
}

SMALL = {
    env_id: next(kwargs for name, kwargs in SMALL_OF.items() if name in env_id)
    for env_id in servegym.ENV_IDS
}
"""Arguments of every id with which an episode takes milliseconds."""

STEPS = {
    env_id: kwargs.get("episode_requests") or kwargs["epochs"] for env_id, kwargs in SMALL.items()
}
"""Decisions of an episode of `SMALL`."""


def make(env_id, **more):
    """A small environment, its actions seeded."""
    env = gym.make(env_id, **SMALL[env_id], **more)
    env.action_space.seed(0)
    return env
