"""What a baseline decides on training episodes, for a policy to begin with. Not an agent."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track

from servegym.agents.lib.environments import parse_settings
from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs._files import write_atomic
from servegym.envs.workloads.files import read_arrays

EPISODES, BATCH = 64, 512
FIRST_SEED = 777_001_000
"""Episodes that neither training nor evaluation draws."""
ELSEWHERE = 0.15
"""Share of the requests that another plan serves, so that what follows a slip is seen as well."""


def lessons(args: Any, folder: Path) -> dict[str, NDArray[Any]]:
    """Decisions of ``args.teacher`` on train episodes of a serverless id.

    At some of the requests the plan that serves is not the teacher's: that of another episode's
    request, now and then any plan. The lesson is always the teacher's own.

    Args:
        args: Arguments of the agent: ``teacher``, ``env_id`` (flat view) and ``set``.
        folder: Where lessons are kept, a file for each such arguments: read if it is there, else
            collected and written.

    Returns:
        ``obs`` float32 (N, columns), ``previous`` int64 (N, parts) plans of the requests before,
        ``mask`` int8 (N, actions), ``plan`` int64 (N, parts) of the teacher.

    Raises:
        ValueError: If the teacher is unknown.
    """
    kwargs = parse_settings(args.set)
    about = json.dumps([args.teacher, args.env_id, kwargs], sort_keys=True)
    file = folder / f"lessons_{zlib.crc32(about.encode()):08x}.npz"
    if file.exists():
        return read_arrays(file, "delete it: the lessons are collected again")
    teacher = make_policy(
        args.teacher, ServerlessSystem.from_kwargs(split="train", **kwargs), family="serverless_moe"
    )
    # The same episodes in the view that the teacher reads and in the agent's.
    ids = [args.env_id.replace("Flat", ""), args.env_id]
    settings: dict[str, Any] = {"split": "train"} | kwargs
    both: list[Any] = [
        gym.make_vec(
            name,
            num_envs=EPISODES,
            vectorization_mode="vector_entry_point",
            autoreset_mode=gym.vector.AutoresetMode.DISABLED,
            **settings,
        )
        for name in ids
    ]
    told, seen = both
    seeds = [FIRST_SEED + i for i in range(EPISODES)]
    (dicts, info), (obs, _) = told.reset(seed=seeds), seen.reset(seed=seeds)
    teacher.reset(EPISODES, seed=0)
    rng, sizes = np.random.default_rng(1), told.single_action_space.nvec
    previous = np.zeros((EPISODES, len(sizes)), np.int64)
    rows: dict[str, list[NDArray[Any]]] = {k: [] for k in ("obs", "previous", "mask", "plan")}
    for _ in track(range(told.unwrapped.problem.episode_requests), f"lessons of {args.teacher}"):
        plan = teacher.act(dicts, info["action_mask"])
        for key, value in zip(rows, (obs, previous, info["action_mask"], plan), strict=True):
            rows[key].append(value.copy())
        previous = plan.copy()
        other = rng.random(EPISODES) < ELSEWHERE
        previous[other] = plan[rng.integers(0, EPISODES, other.sum())]
        other = rng.random(EPISODES) < ELSEWHERE / 4
        previous[other] = (rng.random((other.sum(), len(sizes))) * sizes).astype(np.int64)
        dicts, _, _, _, info = told.step(previous)
        obs = seen.step(previous)[0]
    told.close()
    seen.close()
    found = {key: np.concatenate(value) for key, value in rows.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, lambda stream: np.savez_compressed(stream, allow_pickle=False, **found))
    return found


def imitate(agent: Any, args: Any, folder: Path) -> float:
    """Train a policy to decide as its teacher, by maximum likelihood.

    Args:
        agent: A network with ``observe`` and the ``forward`` of ``ppo_serverless.Agent``.
        args: As for `lessons`, ``imitation_epochs`` and ``imitation_rate``.
        folder: As for `lessons`.

    Returns:
        Mean log-likelihood of the teacher's plans over the last pass.
    """
    device, told = next(agent.parameters()).device, lessons(args, folder)
    taught = [torch.as_tensor(told[k], device=device) for k in ("obs", "previous", "mask", "plan")]
    agent.observe(taught[0])
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.imitation_rate)
    likelihood: list[float] = []
    for epoch in range(args.imitation_epochs):
        optimizer.param_groups[0]["lr"] = args.imitation_rate * (1 - epoch / args.imitation_epochs)
        likelihood = []
        for index in torch.randperm(len(taught[0])).split(BATCH):
            log_prob = agent(*(part[index] for part in taught))[0].mean()
            optimizer.zero_grad()
            (-log_prob).backward()
            optimizer.step()
            likelihood.append(log_prob.item())
    return float(np.mean(likelihood))
