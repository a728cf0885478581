"""The routing graph's node features as flat rows, which replay and labels hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from servegym.baselines.llm_routing.features import impact_features
from servegym.baselines.llm_routing.latency import LatencyModel

Observation = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Layout:
    """Columns of a flat row of scaled node features: N experts, R running and W waiting slots."""

    experts: int
    running: int
    waiting: int
    EXPERT, REQUEST = 10, 8  # features of an expert and of a queued request

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of arrived, expert, running, waiting, running mask, waiting mask."""
        n, r, w = self.experts, self.running, self.waiting
        queues = (self.REQUEST * n * r, self.REQUEST * n * w)
        return (2, self.EXPERT * n, *queues, n * r, n * w)

    def expert(self, rows: Tensor) -> Tensor:
        """The experts' features (B, N, 10) in a batch of rows."""
        return rows.split(self.sizes, -1)[1].view(len(rows), self.experts, -1)

    def rows(self, obs: Observation, model: LatencyModel | None) -> NDArray[np.float16]:
        """Scale a batch of observations into float16 (B, sum(sizes)); log for p and l_t/L."""
        limit = obs["latency_requirement"]  # (B, 1)
        req, exp, batch = obs["request"], obs["experts"], len(limit)
        p = np.log1p(req[..., :1]) / 6
        of_expert, of_queued = impact_features(obs, model)
        parts = [2 * exp[..., :1], exp[..., 1:] / 3, p, 4 * req[..., 1:2] - 2, req[..., 2:] / 150]
        rows = [p[:, 0], limit / 0.03, np.concatenate([*parts, of_expert], -1).reshape(batch, -1)]
        slots = {"running": slice(self.running), "waiting": slice(self.running, None)}
        for kind, here in slots.items():
            p, s, d, e, t, late = np.moveaxis(obs[kind], -1, 0)
            ratio = np.log1p(late / limit[:, :, None]) / 2
            x = np.stack([np.log1p(p) / 6, 4 * s - 2, d / 150, 8 * e, t / 150, ratio], -1)
            x = np.concatenate([x, of_queued[:, :, here]], -1)
            rows.append((x * obs[f"{kind}_mask"][..., None]).reshape(batch, -1))
        rows += [obs[f"{kind}_mask"].reshape(batch, -1) for kind in ("running", "waiting")]
        return np.concatenate(rows, -1, dtype=np.float16, casting="unsafe")
