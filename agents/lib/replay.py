"""Replay of n-step transitions with both action masks and the critics' privileged inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class ReplayBuffer:
    """Time-major ring of transitions; rows of scaled features in float16, both action masks."""

    def __init__(self, size: int, num_envs: int, columns: int, actions: int, inputs: int) -> None:
        self.length, self.envs, self.count = max(size // num_envs, 2), num_envs, 0
        row, legal, extra = (columns, np.float16), (actions, np.int8), (inputs, np.float16)
        kinds = {"obs": row, "next_obs": row, "mask": legal, "next_mask": legal}
        kinds |= {"inputs": extra, "next_inputs": extra}
        shape = (self.length, num_envs)
        self.data = {k: np.zeros((*shape, width), kind) for k, (width, kind) in kinds.items()}
        flat = {"action": np.int64, "reward": np.float32, "terminated": bool, "done": bool}
        self.data |= {k: np.zeros(shape, kind) for k, kind in flat.items()}

    def add(self, **step: NDArray[Any]) -> None:
        """Append one step of all environments."""
        for key, value in step.items():
            self.data[key][self.count % self.length] = value
        self.count += 1

    def sample(
        self, size: int, n_step: int, gamma: float, center: float, rng: np.random.Generator
    ) -> dict[str, NDArray[Any]]:
        """Uniform batch; `return` is the n-step sum of (reward - center), `discount` gamma^n.

        A sum that meets the end of an episode stops there; next_obs, next_mask and terminated are
        those of its last step, so a truncated one bootstraps and a terminated one does not.
        """
        d, stored = self.data, min(self.count, self.length)
        start = self.count - stored + rng.integers(0, stored - n_step + 1, size)
        env = rng.integers(0, self.envs, size)
        total, discount = np.zeros(size, np.float32), np.ones(size, np.float32)
        last, alive = start, np.ones(size, bool)
        for k in range(n_step):
            at = (start + k) % self.length
            last = np.where(alive, start + k, last)
            total += alive * discount * (d["reward"][at, env] - center)
            discount = np.where(alive, discount * gamma, discount).astype(np.float32)
            alive &= np.logical_not(d["done"][at, env])
        first, last = start % self.length, last % self.length
        batch = {k: d[k][first, env] for k in ("obs", "mask", "inputs", "action")}
        after = ("next_obs", "next_mask", "next_inputs", "terminated")
        return batch | {k: d[k][last, env] for k in after} | {"return": total, "discount": discount}
