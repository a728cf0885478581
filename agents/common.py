"""What every agent needs around its algorithm: environments and checkpoints. Not an agent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
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
