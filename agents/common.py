"""What every agent needs around its algorithm: environments and checkpoints. Not an agent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

import servegym  # noqa: F401  (registers the environments)


def parse_settings(items: Sequence[str]) -> dict[str, Any]:
    """``key=value`` items as a dict; a value that is no JSON is a string.

    Raises:
        ValueError: If an item has no ``=``.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"set: {item!r} is not of the form key=value")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def env_kwargs(args: Any) -> dict[str, Any]:
    """Keyword arguments of the training environments: the routing flags, then ``--set``."""
    kwargs: dict[str, Any] = {}
    if args.env_id.startswith("servegym/LLMRouting") and hasattr(args, "profiles"):
        kwargs = {
            "profiles": args.profiles,
            "latency_requirement_s": args.latency_requirement_s,
            "rate": (args.rate_low, args.rate_high),
            "reward": args.reward,
        }
    return kwargs | parse_settings(args.set)


def make_envs(args: Any, num_envs: int, **overrides: Any) -> gym.vector.VectorEnv:
    """The native vector environment, resetting within the step that ends an episode."""
    return gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        **(env_kwargs(args) | overrides),
    )


@torch.no_grad()
def follow(copy: nn.Module, net: nn.Module, tau: float) -> None:
    """Move the copy's weights towards the network's."""
    for mine, theirs in zip(copy.parameters(), net.parameters(), strict=True):
        mine.lerp_(theirs, tau)


def write_checkpoint(net: nn.Module, meta: Mapping[str, str], path: Path) -> None:
    """Weights and text in one safetensors file, written atomically."""
    temporary = path.with_suffix(".tmp")
    weights = {k: v.detach().contiguous().cpu() for k, v in net.state_dict().items()}
    save_file(weights, temporary, dict(meta))
    os.replace(temporary, path)


def snapshot(path: Path, **content: Any) -> None:
    """Write what a run needs to go on exactly, atomically."""
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


class Foresight:
    """What is to come, for critics to learn from and for no policy to see.

    Arrivals and requests are drawn at reset, whatever the router does. A critic that knows them
    has less to guess and biases nothing, as no action changes them (input-dependent baselines,
    Mao et al., ICLR 2019). Columns, for each of `AHEAD` next requests: log of their mean rate,
    their share that the episode still has, mean output length over the experts and mean best score.
    """

    AHEAD = (2, 8, 24, 72)
    WIDTH = 4 * len(AHEAD)

    def __init__(self, envs: Any) -> None:
        """Take the native vector environment of a routing id."""
        self.batch = envs.unwrapped.batch
        table = self.batch.table
        self.length = table[:, :, 2].mean(1) / 150 - 1
        self.score = 4 * table[:, :, 1].max(1) - 3

    def __call__(self) -> NDArray[np.float32]:
        """The present inputs of every system, (B, WIDTH)."""
        batch, most = self.batch, self.AHEAD[-1]
        total = batch.arrivals.shape[1]
        now = np.minimum(batch.env["index"].astype(np.int64), total - 1)
        at = now[:, None] + np.arange(most + 1)
        left, at = at < total, np.minimum(at, total - 1)
        time = np.take_along_axis(batch.arrivals, at, 1)
        kind = np.take_along_axis(batch.rows, at, 1)
        count = np.cumsum(left[:, :-1], 1)
        length, score = (
            np.cumsum(of[kind[:, :-1]] * left[:, :-1], 1) / count
            for of in (self.length, self.score)
        )
        ahead = np.array(self.AHEAD)
        gap = (time[:, ahead] - time[:, :1] + 0.1) / (np.minimum(ahead, count[:, ahead - 1]) + 0.5)
        share = count[:, ahead - 1] / ahead
        parts = [-np.log(gap) - 2, share, length[:, ahead - 1], score[:, ahead - 1]]
        return np.concatenate(parts, 1).astype(np.float32)
