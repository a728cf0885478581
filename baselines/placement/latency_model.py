"""An estimate of the time that remote experts add, from whole tokens instead of frequencies.

A step waits if *any* expert of a layer is remote (the maximum in Eq. 1), which the frequencies of
Eq. 2 do not say; recorded expert sets of tokens do. For a server that holds some experts of a
layer, the estimate adds, per request: in the prefill the volume of remote tokens, a round trip if
any token is remote and the fixed cost of further messages; in each decode step the same for one
token. Queueing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.baselines.placement import kernel
from servegym.baselines.placement.placement import Bools, Floats

if TYPE_CHECKING:
    from servegym.envs.expert_placement.cluster import Cluster

Masks = NDArray[np.uint64]


def expert_masks(held: ArrayLike) -> Masks:
    """Bit masks (..., ) of the last axis of ``held`` (..., E), E <= 64."""
    table = np.asarray(held).astype(np.bool_)
    bits = np.uint64(1) << np.arange(table.shape[-1], dtype=np.uint64)
    return np.where(table, bits, np.uint64(0)).sum(axis=-1, dtype=np.uint64)


def mask_experts(masks: ArrayLike, experts: int) -> Bools:
    """Inverse of `expert_masks`: bool (..., E)."""
    words = np.asarray(masks, dtype=np.uint64)
    return (words[..., None] >> np.arange(experts, dtype=np.uint64)) & np.uint64(1) > 0


@dataclass(frozen=True, eq=False)
class LatencyModel:
    """Token rows of each server and what a remote expert costs it.

    Attributes:
        rows: uint64 (N, L, T), expert sets of T tokens of each server.
        hit: (N, L, E) chance that a prompt of the server has a token for the expert.
        par: (N, 7), the columns of `kernel.layer_cost`.
    """

    rows: Masks
    hit: Floats
    par: Floats

    @classmethod
    def build(
        cls,
        rows: Sequence[ArrayLike],
        experts: int,
        *,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        round_trip_s: ArrayLike,
        token_s: ArrayLike,
        message_s: ArrayLike = 0.0,
        weight: ArrayLike = 1.0,
        max_messages: float = np.inf,
        max_rows: int = 512,
        seed: int = 0,
    ) -> LatencyModel:
        """Check the arguments and draw the same number of rows for every server.

        Args:
            rows: N arrays uint64 (T_n, L), T_n >= 1: recorded tokens like those of server n.
            experts: E, at most 64.
            prompt_tokens: Mean tokens of a prompt, one number or (N,).
            output_tokens: Mean tokens of an answer.
            round_trip_s: Seconds of one remote call and its answer, without its volume.
            token_s: Seconds that a token there and back occupies links and devices.
            message_s: Seconds that one more message and its answer take.
            weight: Requests per time, to weigh servers against each other.
            max_messages: Most messages of a step (N - 1 with one message a server).
            max_rows: Rows kept of each server.
            seed: Of the draw.

        Returns:
            The model.

        Raises:
            ValueError: If rows are missing or an argument is out of range.
        """
        if not 1 <= experts <= 64:
            raise ValueError(f"experts must be between 1 and 64, got {experts!r}")
        tables = [np.asarray(table, dtype=np.uint64) for table in rows]
        if not tables or any(t.ndim != 2 or 0 in t.shape for t in tables):
            raise ValueError("rows must hold one array (tokens, layers) a server, none empty")
        if len({t.shape[1] for t in tables}) != 1:
            raise ValueError("rows: the servers must have the same number of layers")
        if experts < 64 and any((t >> np.uint64(experts)).any() for t in tables):
            raise ValueError(f"rows: a set names an expert above {experts - 1}")
        number = min(max_rows, max(len(t) for t in tables))
        rng = np.random.default_rng(seed)
        kept = [
            t[rng.choice(len(t), number, replace=len(t) < number)] if len(t) != number else t
            for t in tables
        ]
        stacked = np.ascontiguousarray(np.stack(kept).transpose(0, 2, 1))
        par = np.empty((len(tables), 7))
        columns = {
            "weight": weight,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "round_trip_s": round_trip_s,
            "token_s": token_s,
            "message_s": message_s,
        }
        for at, (name, given) in enumerate(columns.items()):
            value = np.asarray(given, dtype=np.float64)
            if value.shape not in ((), (len(tables),)) or not np.isfinite(value).all():
                raise ValueError(f"{name} must be a finite number or one a server, got {given!r}")
            if (value < 0).any():
                raise ValueError(f"{name} must not be negative, got {given!r}")
            par[:, at] = value
        par[:, kernel.DECODES] = np.maximum(par[:, kernel.DECODES] - 1.0, 0.0)
        par[:, kernel.TARGETS] = max_messages
        share = np.stack([mask_experts(t, experts).mean(axis=0) for t in kept])
        hit = 1.0 - (1.0 - share) ** par[:, kernel.PROMPT][:, None, None]
        return cls(stacked, np.ascontiguousarray(hit), par)

    @classmethod
    def of_cluster(
        cls,
        cluster: Cluster,
        rows: Sequence[ArrayLike],
        *,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        weight: ArrayLike = 1.0,
        max_rows: int = 512,
        seed: int = 0,
    ) -> LatencyModel:
        """The model of a cluster's links and GPUs.

        Links to the other servers count by the slots there.

        Args:
            cluster: The cluster.
            rows: As `build`.
            prompt_tokens: As `build`.
            output_tokens: As `build`.
            weight: As `build`.
            max_rows: As `build`.
            seed: As `build`.

        Returns:
            The model.
        """
        servers = cluster.num_servers
        near = np.where(np.eye(servers, dtype=bool), 0.0, cluster.cap[None, :].astype(np.float64))
        total = near.sum(axis=1, keepdims=True)
        near = np.divide(near, total, out=np.zeros_like(near), where=total > 0)
        byte_s = 1.0 / cluster.link_bytes_s
        both = byte_s + byte_s.T
        delay = cluster.latency_s + cluster.latency_s.T
        slots = np.maximum(np.bincount(cluster.gpu_server, minlength=servers), 1)
        base = np.bincount(cluster.gpu_server, cluster.expert_base_s, servers) / slots
        slope = np.bincount(cluster.gpu_server, cluster.expert_token_s, servers) / slots
        staging = 2.0 * cluster.activation_bytes / cluster.pcie_bytes_s
        message = 2.0 * cluster.message_cost_s
        return cls.build(
            rows,
            cluster.experts,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            round_trip_s=(near * (delay + base)).sum(axis=1)
            + message
            + 2.0 * cluster.pcie_latency_s,
            token_s=(near * (both * cluster.activation_bytes + slope)).sum(axis=1) + staging,
            message_s=message,
            weight=weight,
            max_messages=servers - 1 if cluster.messages == "per_server" else np.inf,
            max_rows=max_rows,
            seed=seed,
        )

    def cost(self, held: ArrayLike) -> Floats:
        """Estimated seconds (N, L) that remote experts add, weighted, for held (N, L, E)."""
        masks = expert_masks(held)
        out = np.empty(self.hit.shape[:2])
        for n in range(self.hit.shape[0]):
            for layer in range(self.hit.shape[1]):
                out[n, layer] = kernel.cost_of(
                    self.par[n], self.rows[n, layer], self.hit[n, layer], masks[n, layer]
                )
        return out

    def prefix_costs(self, n: int, order: Any) -> Floats:
        """Costs (L, E + 1) of server n if it holds the c first experts of ``order`` (L, E)."""
        table = np.ascontiguousarray(order, dtype=np.int64)
        return kernel.prefix_costs(self.par[n], self.rows[n], self.hit[n], table)

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that the model is for counts of this shape (N, L, E).

        Raises:
            ValueError: If not.
        """
        if self.hit.shape != tuple(shape):
            raise ValueError(f"model is for counts of shape {self.hit.shape}, got {tuple(shape)}")
