"""Snapshots, from which a stopped run goes on exactly: tensors, and JSON for what is none.

A snapshot is a safetensors file, so that reading it runs no code. Its metadata name the agent and
its arguments; a run goes on with the same arguments alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from servegym._files import write_atomic
from servegym.agents.lib.checkpoint import checksum, read_content
from servegym.envs._vector import BatchVectorEnv

MAY_DIFFER = (
    *("total_timesteps", "resume", "workers", "ray"),
    *("out_dir", "run_name", "save_model", "track", "wandb_project_name"),
)
"""Arguments that do not change what a run does, but for its length."""


def save_snapshot(path: Path, agent: str, args: Any, content: Mapping[str, Any]) -> None:
    """Write the state of a run atomically.

    The content is tensors, arrays, numbers, text and None, in mappings, lists and tuples.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_pack(content, tensors))
    metadata = {"snapshot": agent, "args": json.dumps(asdict(args)), "content": tree}
    data = save(tensors, metadata | {"sha256": checksum(metadata, tensors)})
    write_atomic(path, lambda stream: stream.write(data))


def load_snapshot(path: Path, agent: str, args: Any) -> dict[str, Any]:
    """The content of a snapshot; ValueError if it is damaged or of another agent or arguments."""
    try:
        meta, tensors = read_content(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"resume: {path} is damaged or no snapshot ({error})") from None
    if meta.get("snapshot") != agent:
        raise ValueError(f"resume: {path} is a snapshot of {meta.get('snapshot')}, not of {agent}")
    try:
        before, content = json.loads(meta["args"]), _unpack(json.loads(meta["content"]), tensors)
        now = json.loads(json.dumps(asdict(args)))
        differ = [key for key in now if key not in MAY_DIFFER and now[key] != before[key]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"resume: {path} is not of this version ({error!r})") from None
    if differ:
        each = (f"{key}: {now[key]!r} given, {before[key]!r} in the run" for key in differ)
        raise ValueError(f"resume: {path} has other arguments; {', '.join(each)}")
    return content


def state_of(part: Any) -> Any:
    """What a part of a run is made of, for `save_snapshot`.

    That has a ``state_dict``, is a generator of numpy or a native vector environment, or an object
    whose attributes are all of its state. Other vector environments begin their episodes anew.
    """
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, gym.vector.VectorEnv):
        envs: Any = part.unwrapped
        rows = range(part.num_envs if isinstance(envs, BatchVectorEnv) else 0)
        return [vars(envs.clone_state(row)) for row in rows]
    return vars(part)


def restore_state(part: Any, state: Any) -> None:
    """Put back what `state_of` gave of a part made with the same arguments; environments are reset.

    ValueError if the state is of another version.
    """
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, gym.vector.VectorEnv):
        _restore_envs(part, state)
    else:
        vars(part).update(state)


def _restore_envs(envs: Any, states: list[dict[str, Any]]) -> None:
    for row, values in enumerate(states):
        state = envs.unwrapped.clone_state(row)
        try:
            for name, value in values.items():
                setattr(state, name, _like(getattr(state, name), value))
            envs.unwrapped.restore_state(row, state)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"resume: system {row} is not of this version ({error})") from None


def _like(current: Any, saved: Any) -> Any:
    """Saved values in the form of the current ones: bytes become records again."""
    if isinstance(current, tuple):
        return tuple(_like(*pair) for pair in zip(current, saved, strict=True))
    if isinstance(current, np.ndarray) and current.dtype.names is not None:
        return saved.view(current.dtype).reshape(current.shape)
    return saved


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON, its tensors and arrays by their numbers in ``tensors``."""
    if isinstance(value, np.ndarray | torch.Tensor):
        kind, key = "tensor", str(len(tensors))
        if isinstance(value, np.ndarray):
            kind, value = "array", np.ascontiguousarray(value)
            value = torch.from_numpy(value if value.dtype.names is None else value.view(np.uint8))
        tensors[key] = value.detach().cpu().contiguous()
        return {kind: key}
    if isinstance(value, Mapping):
        return {"mapping": [[key, _pack(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(part, tensors) for part in value]}
    return value.item() if isinstance(value, np.generic) else value


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The reverse of `_pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind in ("tensor", "array"):
        return tensors[inner] if kind == "tensor" else tensors[inner].numpy()
    if kind == "mapping":
        return {key: _unpack(part, tensors) for key, part in inner}
    parts = [_unpack(part, tensors) for part in inner]
    return tuple(parts) if kind == "tuple" else parts
