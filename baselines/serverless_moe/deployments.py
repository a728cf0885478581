"""The paper's rival deployments as policies: they ask for an environment that serves by them.

Such a deployment takes no decision, so the environment ignores the actions; requests, gaps,
overheads, penalties and the reward's unit (the request's MIX cost) are those of any other policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from servegym.baselines.protocol import BasePolicy, Observation
from servegym.baselines.serverless_moe.policies import Actions, Mask
from servegym.baselines.serverless_moe.system import ServerlessSystem

__all__ = ["Cpu", "Deployment", "Fetch", "Gpu", "PerExpert"]


class Deployment(BasePolicy):
    """A deployment that takes no decision; a subclass names it."""

    def __init__(self, system: ServerlessSystem) -> None:
        self.parts = len(system.nvec)
        self.env_kwargs: Mapping[str, Any] = {"deployment": self.name}

    def act(self, observation: Observation, action_mask: Mask) -> Actions:
        """See `Policy.act`; zeros, which the environment ignores.

        Raises:
            ValueError: If there is something to decide: the environment serves by plans, and the
                numbers would be MIX's under this name.
        """
        mask = np.asarray(action_mask)
        if (mask.sum(axis=1) != self.parts).any():
            raise ValueError(
                f"policy {self.name!r} needs an environment made with deployment={self.name!r}"
            )
        return np.zeros((len(mask), self.parts), dtype=np.int64)


class Cpu(Deployment):
    """The whole model on one CPU function."""

    name = "cpu"


class Gpu(Deployment):
    """The whole model in GPU memory."""

    name = "gpu"


class Fetch(Deployment):
    """Experts in CPU memory, copied to the GPU when they are needed."""

    name = "fetch"


class PerExpert(Deployment):
    """A function for every expert."""

    name = "per_expert"
