"""Observations with chosen columns."""

import numpy as np

from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.envs.prefix_routing.kernel.observation import OF_REPLICA, OF_REQUEST


def system_of(replicas, *, cards=(), decode_speed=None, block=16, entry=16, admission=False):
    """Replicas of 1,000 tokens/s with 100,000 tokens of memory."""
    speed = np.full(replicas, 1000.0)
    memory = np.full(replicas, 100_000)
    decode = speed if decode_speed is None else np.array(decode_speed)
    return PrefixSystem(replicas, admission, block, entry, speed, decode, memory, 32, cards)


def observation_of(replicas, prompt_tokens=160, rows=1, **columns):
    """Requests before replicas that are idle but for ``columns``, (N,) or (rows, N)."""
    seen = np.zeros((rows, replicas, len(OF_REPLICA)), np.float32)
    seen[:, :, OF_REPLICA["prefill_tokens_per_s"]] = 1000.0
    for name, values in columns.items():
        seen[:, :, OF_REPLICA[name]] = values
    request = np.zeros((rows, len(OF_REQUEST)), np.float32)
    request[:, OF_REQUEST["prompt_tokens"]] = prompt_tokens
    return {"replicas": seen, "request": request, "time_s": np.zeros((rows, 1), np.float32)}
