"""The routing observation as a graph, and a dense, masked HAN over it (section V-B, Eq. 6-12).

Not an agent: the encoder that agents share. `Layout.rows` scales a batch of Dict observations into
flat rows that fit a replay buffer; `HAN` embeds them with PyG's ``HANConv`` maths, on each graph
alone (PyG averages its semantic attention over the whole batch) and on the nodes that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.latency import LatencyModel

HEADS, WIDTH = 4, 64


def scale_laws(estimator: NDArray[np.float64]) -> NDArray[np.float32]:
    """Scaled estimators (N, 4) from base_s, k1, k2 and seconds per sequence (Eq. 13/14)."""
    return (estimator / (0.02, 1e-4, 5e-6, 1e-3)).astype(np.float32)


def impact(
    obs: Mapping[str, NDArray[Any]], model: LatencyModel
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What sending the new request to each expert would do, by the estimator of the heuristics.

    Args:
        obs: A batch of Dict observations.
        model: The estimator of the system; it knows predictions and mean laws, as Eq. 13-15 do.

    Returns:
        (B, N, 4) of an expert: the new request's distance from L, its score if kept within L, the
        scores it pushes over L, the seconds of the expert's time it takes; (B, N, R + W, 2) of a
        queued request: distance from L without and with the new one. A distance is
        tanh(3 (l / L - 1)), negative in time.
    """
    limit = obs["latency_requirement"][:, :, None]
    found = model.estimate(with_mean_scores(obs, model.system))
    slots = np.stack([found.without, found.with_new], -1)
    distance = np.tanh(3 * (np.nan_to_num(slots, nan=1.0) / limit[..., None] - 1))
    kept = found.with_new <= limit
    lost = ((found.without <= limit) & ~kept)[..., :-1] * found.scores[..., :-1]
    new = [distance[:, :, -1, 1], found.scores[..., -1] * kept[..., -1], lost.sum(-1), found.work_s]
    return np.stack(new, -1), distance[:, :, :-1]


@dataclass(frozen=True)
class Layout:
    """Columns of a flat row of scaled node features: N experts, R running and W waiting slots."""

    experts: int
    running: int
    waiting: int
    impact: bool = False

    @classmethod
    def of(cls, envs: gym.vector.VectorEnv, impact: bool) -> Layout:
        """The layout for a routing environment's Dict observation.

        Raises:
            ValueError: If its observation is no Dict.
        """
        space = envs.single_observation_space
        if not isinstance(space, gym.spaces.Dict):
            name = envs.spec.id if envs.spec else "it"
            raise ValueError(f"env_id: {name!r} has no Dict observation")
        experts, running = space["running_mask"].sample().shape
        return cls(experts, running, space["waiting_mask"].sample().shape[1], impact)

    @property
    def widths(self) -> tuple[int, int]:
        """Features of an expert and of a queued request: 6 each, and what `impact` adds."""
        return (10, 8) if self.impact else (6, 6)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of arrived, expert, running, waiting, running mask, waiting mask."""
        n, r, w = self.experts, self.running, self.waiting
        expert, request = self.widths
        return (2, expert * n, request * n * r, request * n * w, n * r, n * w)

    def expert(self, rows: Tensor) -> Tensor:
        """The experts' features (B, N, widths[0]) in a batch of rows."""
        return rows.split(self.sizes, -1)[1].view(len(rows), self.experts, -1)

    def rows(
        self, obs: Mapping[str, NDArray[Any]], model: LatencyModel | None = None
    ) -> NDArray[np.float16]:
        """Scale a batch of observations into float16 (B, sum(sizes)); log for p and l_t/L.

        ``model`` is needed where the layout has `impact`.
        """
        limit = obs["latency_requirement"]  # (B, 1)
        req, exp = obs["request"], obs["experts"]
        batch, more = len(limit), None
        p = np.log1p(req[..., :1]) / 6
        arrived = np.concatenate([p[:, 0], limit / 0.03], -1)
        expert = np.concatenate(
            [2 * exp[..., :1], exp[..., 1:] / 3, p, 4 * req[..., 1:2] - 2, req[..., 2:] / 150], -1
        )
        if self.impact:
            if model is None:
                raise ValueError("model: a layout with impact features needs the latency model")
            new, more = impact(obs, model)
            expert = np.concatenate([expert, new], -1)

        def requests(kind: str, slots: slice) -> NDArray[Any]:
            p, s, d, e, t, late = np.moveaxis(obs[kind], -1, 0)
            ratio = np.log1p(late / limit[:, :, None]) / 2
            x = np.stack([np.log1p(p) / 6, 4 * s - 2, d / 150, 8 * e, t / 150, ratio], -1)
            if more is not None:
                x = np.concatenate([x, more[:, :, slots]], -1)
            return (x * obs[f"{kind}_mask"][..., None]).reshape(batch, -1)

        parts = [arrived, expert.reshape(batch, -1)]
        parts += [requests("running", slice(self.running))]
        parts += [requests("waiting", slice(self.running, None))]
        parts += [obs[f"{k}_mask"].reshape(batch, -1) for k in ("running", "waiting")]
        return np.concatenate(parts, -1, dtype=np.float16, casting="unsafe")


def prior(expert: Any, running: int) -> Any:
    """What `PricedGreedy` thinks of sending the request to each expert, in scores; (B, N).

    The new request's score if it is kept within L, less the scores it pushes over L and the price
    of the time it takes, which rises with the fourth power of the load; a drop is worth 0.

    Args:
        expert: Expert features (B, N, 10) with `impact`, a tensor or an array.
        running: Running slots of an expert.
    """
    load = 3 * (expert[..., 1] + expert[..., 2]) / running
    load = (load + load.mean(-1)[..., None]) / 2
    kept, lost, work = expert[..., 7], expert[..., 8], expert[..., 9]
    return kept - lost - load**4 * work


def held_score(obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Predicted score of all queued requests, (B,): the potential behind paid_forward.

    The environment pays completed + P(s') - P(s), an exact shaping of the undiscounted return. With
    gamma < 1 it needs gamma P(s'), or a bill that comes late is worth more than one that comes at
    once and a full queue looks good; the agent takes (1 - gamma) P(s') off the reward.
    """
    running, waiting = (
        (obs[k][..., 1] * obs[f"{k}_mask"]).sum((1, 2)) for k in ("running", "waiting")
    )
    return running + waiting


class HANLayer(nn.Module):
    """One ``HANConv`` on every graph of a batch, over the nodes that exist.

    Edge types: expert -> arrived, arrived/running/waiting -> expert, expert -> running/waiting and
    a self-loop at every node. Only the first, third and fourth have more than one neighbour; on the
    others node attention is 1 whatever its weights, and the message is the neighbour itself.
    """

    blocks: Tensor

    def __init__(self, in_dims: Mapping[str, int], last: bool) -> None:
        super().__init__()
        self.last = last  # nobody reads the queued requests' outputs of the last layer
        self.proj = nn.ModuleDict({k: nn.Linear(d, WIDTH) for k, d in in_dims.items()})
        names = ("expert__arrived", "running__expert", "waiting__expert")
        self.src, self.dst = (
            nn.ParameterDict(
                {k: nn.Parameter(torch.empty(WIDTH, 1).uniform_(-0.5, 0.5)) for k in names}
            )
            for _ in range(2)
        )
        self.register_buffer("blocks", torch.eye(HEADS).repeat_interleave(WIDTH // HEADS, 0), False)
        self.k_lin = nn.Linear(WIDTH, WIDTH)
        self.q = nn.Parameter(torch.empty(WIDTH).uniform_(-0.3, 0.3))

    def attend(self, name: str, src: Tensor, dst: Tensor, index: Tensor) -> Tensor:
        """Softmax attention of every node of dst (M, 64) over its src (K, 64); index (K,)."""
        blocks = self.blocks  # (64, 4): which head a column belongs to
        score = src @ (blocks * self.src[name])
        score = F.leaky_relu(score + (dst @ (blocks * self.dst[name])).index_select(0, index), 0.2)
        top = score.new_full((len(dst), HEADS), -1e9)
        top.scatter_reduce_(0, index[:, None].expand(-1, HEADS), score.detach(), "amax")
        weight = (score - top.index_select(0, index)).exp()
        total = weight.new_zeros(len(dst), HEADS).index_add(0, index, weight)
        message = src * (weight @ blocks.T)
        message = dst.new_zeros(len(dst), WIDTH).index_add(0, index, message)
        return (message * ((total + 1e-16).reciprocal() @ blocks.T)).relu()

    def semantic(self, x: Tensor) -> Tensor:
        """Q . tanh(W x + b) of every node; (M, 64) -> (M,)."""
        return torch.tanh(self.k_lin(x)) @ self.q

    def forward(self, x: dict[str, Tensor], index: dict[str, Tensor]) -> dict[str, Tensor]:
        """Node features {type: (nodes, d)} -> {type: (nodes, 64)}; index: expert of a request."""
        h = {k: self.proj[k](v) for k, v in x.items()}
        own = {k: v.relu() for k, v in h.items() if k in ("arrived", "expert") or not self.last}
        score = {k: self.semantic(v) for k, v in own.items()}
        batch, n = len(h["arrived"]), len(h["expert"]) // len(h["arrived"])
        graph = torch.arange(batch, device=h["expert"].device).repeat_interleave(n)
        from_experts = self.attend("expert__arrived", h["expert"], h["arrived"], graph)
        queues = [
            self.attend(f"{k}__expert", h[k], h["expert"], index[k]) for k in ("running", "waiting")
        ]
        w = torch.sigmoid(self.semantic(from_experts) - score["arrived"])  # softmax of two
        out = {"arrived": torch.lerp(own["arrived"], from_experts, w[:, None])}
        scores = [score["expert"], *(self.semantic(m) for m in queues)]
        w = torch.stack([score["arrived"], *(x.view(batch, n).mean(1) for x in scores)], -1)
        w = w.softmax(-1)  # (B, 4)
        values = torch.stack([own["expert"], *queues]).view(3, batch, n, WIDTH)
        mix = torch.einsum("bk,kbnd->bnd", w[:, 1:], values)
        out["expert"] = (mix + (w[:, :1] * own["arrived"])[:, None]).view(-1, WIDTH)
        if not self.last:
            for k in ("running", "waiting"):
                where = index[k] // n
                gap = score["expert"].index_select(0, index[k]) - score[k]
                count = torch.bincount(where, minlength=batch).clamp(min=1)
                gap = gap.new_zeros(batch).index_add(0, where, gap) / count
                w = torch.sigmoid(gap).index_select(0, where)[:, None]
                out[k] = torch.lerp(own[k], own["expert"].index_select(0, index[k]), w)
        return out


class HAN(nn.Module):
    """Two layers, four heads, 64 wide: rows (B, columns) -> request (B, 64), experts (B, N, 64)."""

    def __init__(self, layout: Layout, law: int) -> None:
        super().__init__()
        self.layout = layout
        expert, request = layout.widths
        dims = {"arrived": 2, "expert": expert + law, "running": request, "waiting": request}
        self.first = HANLayer(dims, last=False)
        self.second = HANLayer(dict.fromkeys(dims, WIDTH), last=True)

    def nodes(
        self, rows: Tensor, law: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Features of the nodes that exist, and the flat expert index of the queued requests."""
        parts: dict[str, Tensor] = dict(
            zip(
                ("arrived", "expert", "running", "waiting", "mr", "mw"),
                rows.split(self.layout.sizes, -1),
                strict=True,
            )
        )
        wide, request = self.layout.widths
        expert = parts["expert"].reshape(-1, wide)
        if law is not None:
            expert = torch.cat([expert, law.repeat(len(rows), 1)], -1)
        x: dict[str, Tensor] = {"arrived": parts["arrived"], "expert": expert}
        index: dict[str, Tensor] = {}
        slots = {"running": self.layout.running, "waiting": self.layout.waiting}
        for k, mask in (("running", "mr"), ("waiting", "mw")):
            held = parts[mask].reshape(-1).nonzero().squeeze(-1)
            x[k], index[k] = parts[k].reshape(-1, request).index_select(0, held), held // slots[k]
        return x, index

    def forward(self, rows: Tensor, law: Tensor | None) -> tuple[Tensor, Tensor]:
        """Embed a batch of flat rows."""
        x, index = self.nodes(rows, law)
        x = self.second(self.first(x, index), index)
        return x["arrived"], x["expert"].view(len(rows), -1, WIDTH)


class Sets(nn.Module):
    """In the HAN's place: one small network over every expert and the sums of its queue.

    An expert's input is its features, the arrived request's, and mean and maximum of those of the
    requests it holds; the request's embedding is that of the mean over the experts.
    """

    def __init__(self, layout: Layout, law: int) -> None:
        super().__init__()
        self.layout = layout
        expert, request = layout.widths
        self.each = nn.Sequential(
            nn.Linear(2 + expert + law + 2 * request, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
        )
        self.all = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, rows: Tensor, law: Tensor | None) -> tuple[Tensor, Tensor]:
        """Embed a batch of flat rows."""
        batch, n = len(rows), self.layout.experts
        arrived, expert, running, waiting, mr, mw = rows.split(self.layout.sizes, -1)
        wide = self.layout.widths[1]
        held = torch.cat([x.view(batch, n, -1, wide) for x in (running, waiting)], 2)
        mask = torch.cat([x.view(batch, n, -1) for x in (mr, mw)], 2)
        mean = held.sum(2) / mask.sum(2, keepdim=True).clamp(min=1)
        top = held.masked_fill(mask[..., None] == 0, -2.0).amax(2)
        parts = [arrived[:, None].expand(batch, n, 2), expert.view(batch, n, -1), mean, top]
        if law is not None:
            parts.append(law.expand(batch, *law.shape))
        experts = self.each(torch.cat(parts, -1))
        return self.all(experts.mean(1)), experts


class ExpertRows(nn.Sequential):
    """The experts' rows of Eq. 7 alone: memory, running and waiting requests, for a fixed N.

    What the paper's Baseline RL sees: neither the request nor its predictions nor the queues.
    """

    def __init__(self, layout: Layout) -> None:
        width = 3 * layout.experts
        super().__init__(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.layout = layout

    def forward(self, rows: Tensor, law: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One embedding of the state, (B, 64) and again as (B, 1, 64)."""
        h = super().forward(self.layout.expert(rows)[..., :3].flatten(1))
        return h, h[:, None]


class Head(nn.Module):
    """One value per action (B, N+1): drop from MLP[h_r | mean h], expert n from MLP[h_r | h_n].

    A critic's head may know `extra` inputs besides, which it reads with the request.
    """

    def __init__(self, actions: int, per_expert: bool, extra: int = 0) -> None:
        super().__init__()
        self.per_expert = per_expert
        outputs, inputs = 2 if per_expert else actions, WIDTH * (1 + per_expert) + extra
        self.request = nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))
        if per_expert:
            self.by_request, self.by_expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, 1)

    @torch.no_grad()
    def start_small(self) -> None:
        """Shrink the last layers, so that little is added at first to what the head corrects."""
        last = [*self.request[2].parameters(), *(self.out.parameters() if self.per_expert else ())]
        for weight in last:
            weight.mul_(0.1 if weight.ndim > 1 else 0.0)  # no bias

    def forward(self, request: Tensor, experts: Tensor, *extra: Tensor) -> Tensor:
        """Embeddings -> (B, N+1); a value common to all actions is added (dueling)."""
        if not self.per_expert:
            return self.request(torch.cat([request, *extra], -1))
        known = torch.cat([request, experts.mean(1), *extra], -1)
        drop, common = self.request(known).split(1, -1)
        hidden = (self.by_request(request)[:, None] + self.by_expert(experts)).relu()
        return torch.cat([drop, self.out(hidden).squeeze(-1)], -1) + common
