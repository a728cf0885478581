"""An estimate of the time that remote experts add, from whole tokens instead of frequencies.

A step waits if *any* expert of a layer is remote (the maximum in Eq. 1), which the frequencies of
Eq. 2 do not say; recorded expert sets of tokens do. For a server that holds some experts of a
layer, the estimate adds, per request: in the prefill the volume of remote tokens, a round trip if
any token is remote and the fixed cost of further messages; in each decode step the same for one
token.

`LayerCostModel.loaded` adds what depends on everybody's placement: which server is asked, and the
wait at the links, each an M/G/1 queue of the messages that the placement causes. GPUs are taken as
idle: links fill up first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.baselines.expert_placement.feasibility import Floats
from servegym.baselines.expert_placement.kernel import layer_costs as kernel
from servegym.envs.workloads.expert_sets import bit_sets, set_bits

if TYPE_CHECKING:
    from servegym.envs.expert_placement.cluster import Cluster

Masks = NDArray[np.uint64]


BUSIEST = 0.95
"""Utilisation at which the wait at a link stops to grow: beyond 1 there would be no mean."""


@dataclass(frozen=True, eq=False)
class Links:
    """What messages between servers cost, (N, N) from row to column.

    Attributes:
        token_s: Seconds that the activations of a token hold the sender's link.
        delay_s: Seconds from there and back that hold nothing: latency, staging.
        call_s: (N,) seconds of a remote call and one of its tokens on a GPU of a server, staging of
            the activations of a token included.
        layer_s: (N,) seconds of a decode step's layer apart from its experts.
        message_s: Seconds that a message holds the link besides.
    """

    token_s: Floats
    delay_s: Floats
    call_s: Floats
    layer_s: Floats
    message_s: float


@dataclass(frozen=True, eq=False)
class LayerCostModel:
    """Token rows of each server and what a remote expert costs it.

    Attributes:
        tables: Costs (N, L), expert sets of tokens (N, L, T), chance that a prompt of a server has
            a token for an expert (N, L, E).
        links: Of the cluster; None if only means are known, and then nothing depends on load.
    """

    tables: kernel.Tables
    links: Links | None = None

    @classmethod
    def build(cls, rows: Sequence[ArrayLike], experts: int, cost: NDArray[Any]) -> LayerCostModel:
        """Tabulate recorded tokens and costs.

        Args:
            rows: N arrays uint64 (T, L), T >= 1: recorded tokens like those of server n.
            experts: E, at most 64.
            cost: `LAYER_COST` (N,), the same in every layer.
        """
        tables = [np.asarray(table, dtype=np.uint64) for table in rows]
        stacked = np.ascontiguousarray(np.stack(tables).transpose(0, 2, 1))
        share = np.stack([set_bits(t, experts).mean(axis=0) for t in tables])
        hit = 1.0 - (1.0 - share) ** cost["prompt_tokens"][:, None, None]
        layered = np.repeat(cost[:, None], stacked.shape[1], axis=1)
        return cls(kernel.Tables(layered, stacked, np.ascontiguousarray(hit)))

    @classmethod
    def of_cluster(
        cls,
        cluster: Cluster,
        rows: Sequence[ArrayLike],
        *,
        prompt_tokens: ArrayLike,
        output_tokens: float,
        weight: ArrayLike,
    ) -> LayerCostModel:
        """The model of a cluster's links and GPUs; those to other servers count by the slots there.

        The rows are those of `build`; ``prompt_tokens`` and ``weight``, requests a time, are (N,),
        and of the tokens of an answer the prefill gives the first one.
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
        links = Links(
            token_s=byte_s * cluster.activation_bytes,
            delay_s=delay + base[None, :] + message + 2.0 * cluster.pcie_latency_s,
            call_s=slope + staging,
            layer_s=cluster.dense_base_s + cluster.dense_token_s,
            message_s=float(cluster.message_cost_s),
        )
        cost = np.zeros(servers, kernel.LAYER_COST)
        cost["weight"], cost["prompt_tokens"] = weight, prompt_tokens
        cost["decode_steps"] = max(output_tokens - 1.0, 0.0)
        trip = (near * (delay + base)).sum(axis=1)
        cost["round_trip_s"] = trip + message + 2.0 * cluster.pcie_latency_s
        token = (near * (both * cluster.activation_bytes + slope)).sum(axis=1)
        cost["token_s"], cost["message_s"] = token + staging, message
        cost["max_messages"] = servers - 1 if cluster.messages == "per_server" else np.inf
        model = cls.build(rows, cluster.experts, cost)
        return replace(model, links=links)

    def loaded(self, resident: ArrayLike, counts: ArrayLike) -> LayerCostModel:
        """The model as the others' placement and the load that it causes make it.

        A missing expert is called at the holder that takes least time without load; of equal ones
        each gets the same. The messages of a step are one job at the link of its server and, by the
        shares of the servers called, at theirs. A message waits as in an M/G/1 queue
        (Pollaczek-Khinchine), but requests send one step at a time: one that is held up sends
        nothing meanwhile, so its steps wait at most the time between two of its messages times
        rho / (1 - rho), as if the link slowed it down by the part that others use. With pairwise
        links, where every pair has its own, the wait is too long.

        ``resident`` (N, L, E) has every expert somewhere; ``counts`` (N, L, E) say how servers use
        them. A model without links is itself.
        """
        links = self.links
        if links is None:
            return self
        view, f = np.asarray(resident, dtype=np.bool_), np.asarray(counts, dtype=np.float64)
        servers, layers, _ = view.shape
        token = links.token_s + links.token_s.T + links.call_s[None, :]
        trip = links.delay_s + token
        near = np.zeros((servers, layers, servers))
        for n in range(servers):
            others = view & (np.arange(servers) != n)[:, None, None]
            time = np.where(others, trip[n][:, None, None], np.inf)
            nearest = others & (time <= time.min(axis=0))
            need = np.where(view[n], 0.0, f[n] + 1e-9) / np.maximum(nearest.sum(axis=0), 1)
            near[n] = (nearest * need).sum(axis=2).T
        near /= np.maximum(near.sum(axis=2, keepdims=True), 1e-300)
        cost = self.tables.cost.copy()
        cost["token_s"] = np.einsum("nlm,nm->nl", near, token)
        cost["round_trip_s"] = np.einsum("nlm,nm->nl", near, links.delay_s)
        tables = self.tables._replace(cost=cost)
        cost["round_trip_s"] += _link_waits(tables, bit_sets(view), near, links)
        return replace(self, tables=tables)

    def cost(self, resident: ArrayLike) -> Floats:
        """Weighted estimated seconds (N, L) that remote experts add for ``resident`` (N, L, E)."""
        masks = bit_sets(np.asarray(resident))
        out = np.empty(masks.shape)
        for n, layer in np.ndindex(*masks.shape):
            out[n, layer] = kernel.layer_cost(self.tables, n, layer, masks[n, layer])
        return out

    def prefix_costs(self, n: int, order: Any) -> Floats:
        """Costs (L, E + 1) of server n if it holds the c first experts of ``order`` (L, E)."""
        return kernel.prefix_costs(self.tables, n, np.ascontiguousarray(order, dtype=np.int64))


def _link_waits(tables: kernel.Tables, masks: Masks, near: Floats, links: Links) -> Floats:
    """Mean seconds (N, L) that the two messages of a round trip wait in all.

    ``near`` (N, L, M) are the shares of a server's remote calls that go to each other server; the
    tables have the round trips apart from waiting.
    """
    servers, layers = masks.shape
    # Of the jobs at a link: share of time that they take, rate times squared size.
    busy, square = np.zeros(servers), np.zeros(servers)
    calls = np.zeros((servers, servers))  # of a decode step, at each server
    step = links.layer_s * layers
    for n, layer in np.ndindex(servers, layers):
        cost, to = tables.cost[n, layer], near[n, layer]
        rate, prompt, decodes = cost["weight"], cost["prompt_tokens"], cost["decode_steps"]
        share, volume, hits = kernel.remote_calls(tables, n, layer, masks[n, layer])
        calls[n] += share * to
        step[n] += share * cost["round_trip_s"]
        each = volume / max(share, 1e-9)
        jobs = (
            (
                rate * (1.0 - (1.0 - share) ** prompt),
                prompt * volume,
                min(hits, cost["max_messages"]),
            ),
            (rate * decodes * share, each, each),
        )
        for times, tokens, messages in jobs:
            out = tokens * float(to @ links.token_s[n]) + messages * links.message_s
            busy[n] += times * out
            square[n] += times * out**2
            back = to * (tokens * links.token_s[:, n] + messages * links.message_s)
            busy += times * back
            square += times * back**2
    idle = 1.0 - np.minimum(busy, BUSIEST)
    open_wait, slowed = square / (2.0 * idle), (1.0 - idle) / idle
    home = np.minimum(open_wait, step / np.maximum(calls.sum(axis=1), 1e-9) * slowed)
    away = np.minimum(open_wait, step[:, None] / np.maximum(calls, 1e-9) * slowed)
    return home[:, None] + np.einsum("nlm,nm->nl", near, away)
