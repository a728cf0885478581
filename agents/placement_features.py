"""What the placement agents read of an observation, and what else both of them need. Not an agent.

For every server and layer: how the server's tokens fall on the layer's experts, what it holds, what
the start would give it. Servers are told apart by their features alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from servegym.baselines.expert_placement.heuristics import whole_layer

Floats = NDArray[np.float64]
BASES = ("best", "whole_layer", "none")
MASS_AT = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
"""Cumulative mass of the most frequent experts, at these shares of a layer."""
WAVES = 8
"""Frequencies that encode the position of a layer."""
LEAST_HELD = 0.4
"""Weight of the base's experts in a layer of which it has few."""
SCALARS = ("in_system", "arrivals", "link_backlog_s", "window_s", "progress")
BASE_HEIGHT, HEIGHT, SLOPE, SLOPE_POWER = 0.6, 0.15, 0.05, 0.5
"""What the base holds, one unit of the height, the slope at zero and its growth."""
INERTIA, FILL = 1.4, 0.1
"""Of a layer to stay in its place, and the weight of frequencies in what is left of the slots."""


class Features:
    """What the network reads of an observation, by server and layer.

    Args:
        cluster: The servers, links and sizes.
        base: One of `BASES`: every expert of a placement found before (``start``), the layers that
            `whole_layer` gives whole, or nothing.
        start: Bool (N, L, E) for ``best``; without one, as of a cluster never seen, whole layers
            are the base.
        exchange: Whether heights exchange the layers of the base, see `exchanged`, instead of
            adding to the scores of single servers.
    """

    columns = len(MASS_AT) + 1 + 4 + 1 + 2 * WAVES + 8

    def __init__(
        self, cluster: Any, base: str, start: Any = None, *, exchange: bool = False
    ) -> None:
        if base not in BASES:
            raise ValueError(f"base is {base!r}; allowed are {', '.join(BASES)}")
        servers, layers, experts = cluster.num_servers, cluster.layers, cluster.experts
        self.shape = (servers, layers, experts)
        self.gpu_server, self.top_k = cluster.gpu_server, cluster.top_k
        held = np.zeros(self.shape)
        if base == "best" and start is not None:
            held[np.asarray(start) > 0] = 1.0
        elif base != "none":
            dealt = whole_layer(np.ones(self.shape), cluster.slots, cluster.gpu_server)
            held[cluster.server_view(dealt).all(axis=2)] = 1.0
        self.base, self.outputs = held.mean(axis=2), 1 if exchange else 2
        # Whole layers are hard to break, single experts are easily exchanged; with no output of
        # the network all that is held stays.
        weight = np.maximum(self.base, LEAST_HELD)[:, :, None]
        self.held = torch.as_tensor(held * weight, dtype=torch.float32)
        byte_s = 1.0 / cluster.link_bytes_s
        trip = cluster.latency_s + cluster.latency_s.T + 2 * cluster.message_cost_s
        trip = trip + cluster.activation_bytes * (byte_s + byte_s.T)
        away = ~np.eye(servers, dtype=bool)
        scale = trip[away].mean() if servers > 1 else 1.0
        trip = np.where(away, trip / scale, 0.0)
        # The nearest other server that holds a layer in the base, and how many do.
        there = np.where(self.base[None] * away[:, :, None] > 0.5, trip[:, :, None], np.inf)
        farthest = trip.max(axis=1, keepdims=True)
        nearest = np.minimum(there.min(axis=1), farthest)
        others = (self.base.sum(axis=0) - self.base) / max(servers - 1, 1)
        position = np.arange(layers) / layers
        waves = [position]
        for k in range(1, WAVES + 1):
            waves += [np.sin(2 * np.pi * k * position), np.cos(2 * np.pi * k * position)]
        cap = cluster.cap / (layers * experts)
        sent = np.log(cluster.nic_bps / cluster.nic_bps.mean())
        self.static = np.concatenate(
            [
                np.stack([self.base, nearest, others], axis=-1),
                np.broadcast_to(np.stack(waves, axis=-1), (servers, layers, len(waves))),
                np.broadcast_to(
                    np.stack([cap, trip.mean(axis=1), sent], axis=-1)[:, None],
                    (servers, layers, 3),
                ),
            ],
            axis=-1,
        )

    def __call__(self, observation: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Features (B, N, L, columns) and log-shares (B, N, L, E) of observations."""
        placement = np.asarray(observation["placement"]) > 0
        held = np.zeros((len(placement), *self.shape), dtype=bool)
        for g, n in enumerate(self.gpu_server):
            held[:, n] |= placement[:, g]
        return self.by_server(observation["counts"], held, observation)

    def by_server(
        self, counts: Any, held: Any, scalars: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The same from what servers know of themselves, none of another.

        Args:
            counts: (B, N, L, E) assignments.
            held: (B, N, L, E) which experts a server has.
            scalars: ``in_system``, ``arrivals``, ``link_backlog_s`` (B, N), ``window_s`` and
                ``progress`` (B, 1) or (B, N).
        """
        counts = np.asarray(counts, dtype=np.float64)
        if counts.shape[1:] != self.shape:
            raise ValueError(f"counts have shape {counts.shape[1:]}, expected {self.shape}")
        batch, (servers, layers, experts) = len(counts), self.shape
        total = counts.sum(axis=3, keepdims=True)
        share = np.where(total > 0, counts / np.maximum(total, 1.0), 1.0 / experts)
        mass = np.cumsum(-np.sort(-share, axis=3), axis=3)
        at = [max(round(part * experts), 1) - 1 for part in MASS_AT]
        entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(axis=3) / np.log(max(experts, 2))
        several = {name: np.asarray(scalars[name], dtype=np.float64) for name in SCALARS}
        # Tokens a second, since the last change.
        demand = counts.sum(axis=(2, 3)) / (layers * self.top_k) / (several["window_s"] + 1.0)
        columns = [np.log(demand + 1e-3) / 3 - 1]
        columns += [np.log1p(several[name]) for name in ("in_system", "arrivals", "link_backlog_s")]
        columns.append(several["progress"])
        rest = np.stack([np.broadcast_to(part, (batch, servers)) for part in columns], axis=-1)
        parts = [
            mass[..., at],
            entropy[..., None],
            np.asarray(held).mean(axis=3)[..., None],
            np.broadcast_to(self.static, (batch, *self.static.shape)),
            np.broadcast_to(rest[:, :, None], (batch, servers, layers, len(columns))),
        ]
        x = np.concatenate(parts, axis=-1).astype(np.float32)
        log_share = 0.5 * np.log(np.clip(share * experts, 1e-2, None)).astype(np.float32)
        return torch.from_numpy(x), torch.from_numpy(log_share)

    def plan(self, z: Tensor, log_share: Tensor) -> NDArray[np.float32]:
        """Scores (B, N, L, E) in [0, 1] of the network's outputs z (B, N, L, 1 or 2).

        Only the order within a server matters for what it takes first, so scores are ranks.
        """
        if self.outputs == 1:
            score = self.exchanged(z[..., 0], log_share) + FILL * log_share
        else:
            slope = SLOPE * torch.exp(SLOPE_POWER * z[..., 1].clamp(-8.0, 8.0))
            score = BASE_HEIGHT * self.held + (HEIGHT * z[..., 0])[..., None]
            score = score + slope[..., None] * log_share
        flat = score.flatten(2)
        rank = flat.argsort(dim=-1, stable=True).argsort(-1)
        return (rank.float() / max(flat.shape[-1] - 1, 1)).view(log_share.shape).numpy()

    def exchanged(self, height: Tensor, log_share: Tensor) -> Tensor:
        """The base (B, N, L, E) with its layers exchanged, the same at all servers.

        A height says how much a server wants to hold a layer. The layers take the places of the
        base, one each, so that the wishes for what is then held are greatest in sum; a layer that
        stays in its place adds `INERTIA`. What a place has of its layer's most used experts it has
        of the new layer's. Memory and coverage stay what they are in the base.

        Args:
            height: (B, N, L).
            log_share: (B, N, L, E), as `__call__` gives.
        """
        used = np.exp(2.0 * log_share.numpy()).sum(axis=1)
        order = np.argsort(-used, axis=2, kind="stable")  # (B, L, E), most used first
        wish = np.einsum("bnl,nk->blk", height.numpy(), self.base)
        found = np.empty(log_share.shape, dtype=np.float32)
        held = (self.held > 0).numpy()
        for b in range(len(found)):
            _, place = linear_sum_assignment(-wish[b] - INERTIA * np.eye(len(wish[b])))
            for level, at in enumerate(place):
                if at == level:
                    found[b, :, level] = held[:, level]
                else:
                    found[b][:, level, order[b, level]] = held[:, at, order[b, at]]
        return torch.from_numpy(found)


def zero_action(features: Features, observation: Mapping[str, Any]) -> NDArray[np.float32]:
    """The plan of the base alone, every output of the network zero."""
    _, log_share = features(observation)
    return features.plan(torch.zeros(*log_share.shape[:3], features.outputs), log_share)


def is_first(observation: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Whether an observation is the first of its episode, (B,)."""
    return np.asarray(observation["progress"])[:, 0] <= 0.0


def group_advantage(advantage: Tensor, members: int) -> Tensor:
    """Advantages (T, groups * members) less the mean of their group, over a robust spread.

    An expert moved at the wrong time can cost a hundred times what plans differ by; without the
    limit such an episode alone would decide the update.
    """
    steps = len(advantage)
    grouped = advantage.view(steps, -1, members)
    centred = (grouped - grouped.median(-1, keepdim=True).values).reshape(steps, -1)
    spread = centred.abs().median().clamp_min(1e-8) * 1.5
    limited = (centred / spread).clamp(-3.0, 3.0).view(steps, -1, members)
    return (limited - limited.mean(-1, keepdim=True)).reshape(steps, -1)
