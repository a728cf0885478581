"""One decision at a time: the HAN's policy in numpy, without torch's cost per operation.

A router decides when a request arrives, so what counts in service is the time of one decision.
`SingleDecision` computes what an agent's HAN and actor compute for a batch of one, on all slots
with the empty ones masked, so that its time does not depend on the load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def _array(tensor: Any) -> Floats:
    return np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype=np.float32)


class _Linear:
    def __init__(self, layer: Any) -> None:
        self.weight, self.bias = np.ascontiguousarray(_array(layer.weight).T), _array(layer.bias)

    def __call__(self, x: Floats) -> Floats:
        return x @ self.weight + self.bias


class _Layer:
    """`HANLayer` on one graph whose requests fill fixed slots."""

    def __init__(self, layer: Any) -> None:
        self.last: bool = layer.last
        self.proj = {key: _Linear(value) for key, value in layer.proj.items()}
        blocks = _array(layer.blocks)  # (width, heads): which head a column belongs to
        self.width, self.heads = blocks.shape
        self.src, self.dst = (
            {key: blocks * _array(value) for key, value in part.items()}
            for part in (layer.src, layer.dst)
        )
        self.k_lin, self.q = _Linear(layer.k_lin), _array(layer.q)

    def _attend(self, name: str, src: Floats, dst: Floats, held: Any) -> Floats:
        """Attention of each dst (D, 64) over its own slots src (D, K, 64); held (D, K) or None."""
        groups, slots = src.shape[:2]
        score = (src.reshape(-1, self.width) @ self.src[name]).reshape(groups, slots, -1)
        score += (dst @ self.dst[name])[:, None]
        score = np.maximum(score, np.float32(0.2) * score)  # leaky ReLU
        if held is not None:
            score = np.where(held[..., None], score, np.float32(-1e9))
        weight = np.exp(score - score.max(1, keepdims=True))
        if held is not None:
            weight *= held[..., None]
        total = weight.sum(1) + np.float32(1e-16)
        values = src.reshape(groups, slots, self.heads, -1).transpose(0, 2, 1, 3)
        message = (weight.transpose(0, 2, 1)[:, :, None] @ values)[:, :, 0] / total[..., None]
        return np.maximum(message.reshape(groups, -1), 0)

    def __call__(self, x: dict[str, Floats], held: dict[str, Any]) -> dict[str, Floats]:
        """Features {type: (nodes, d)} -> {type: (nodes, 64)}; held: (N, slots) bool by queue."""
        h = {key: self.proj[key](value) for key, value in x.items()}
        n = len(h["expert"])
        kinds = ("arrived", "expert") if self.last else tuple(h)
        own = {key: np.maximum(h[key], 0) for key in kinds}
        messages = [self._attend("expert__arrived", h["expert"][None], h["arrived"], None)]
        messages += [
            self._attend(
                f"{key}__expert", h[key].reshape(n, -1, self.width), h["expert"], held[key]
            )
            for key in ("running", "waiting")
        ]
        # Q . tanh(W x + b) of all nodes in one product.
        parts = [*own.values(), *messages]
        every = np.tanh(self.k_lin(np.concatenate(parts))) @ self.q
        found = np.split(every, np.cumsum([len(part) for part in parts])[:-1])
        score = dict(zip(own, found, strict=False))
        from_experts, running, waiting = found[len(own) :]
        w = _sigmoid(from_experts - score["arrived"])[:, None]
        out = {"arrived": own["arrived"] + w * (messages[0] - own["arrived"])}
        means = [score["arrived"][0], score["expert"].mean(), running.mean(), waiting.mean()]
        mix = np.exp(np.array(means, np.float32) - max(means))
        mix /= mix.sum()
        out["expert"] = (
            mix[0] * own["arrived"]
            + mix[1] * own["expert"]
            + mix[2] * messages[1]
            + mix[3] * messages[2]
        )
        if not self.last:
            for key in ("running", "waiting"):
                mask = held[key]
                gap = (score["expert"][:, None] - score[key].reshape(n, -1)) * mask
                w = _sigmoid(gap.sum() / max(int(mask.sum()), 1))
                mine = own[key].reshape(n, -1, self.width)
                out[key] = (mine + w * (own["expert"][:, None] - mine)).reshape(-1, self.width)
        return out


def _sigmoid(x: Any) -> Any:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # cannot overflow


class SingleDecision:
    """The greedy policy of an agent over the graph, in numpy for a batch of one."""

    def __init__(self, net: Any, heuristic_values: Callable[[Any, int], Any]) -> None:
        """Copy the weights.

        Args:
            net: An agent of ``sac_han``.
            heuristic_values: The agent's values (B, N) to correct, of experts' features (B, N, 10)
                and their running slots.
        """
        encoder, actor = net.encoder, net.actor
        self.net, self.heuristic_values = net, heuristic_values
        self.temperature: float = net.temperature
        self.first, self.second = _Layer(encoder.first), _Layer(encoder.second)
        self.law = _array(net.law)
        self.hidden, self.out = _Linear(actor.request[0]), _Linear(actor.request[2])
        self.by_request, self.by_expert = _Linear(actor.by_request), _Linear(actor.by_expert)
        self.value = _Linear(actor.out)

    def act(self, obs: Any, mask: Any) -> NDArray[np.int64]:
        """The likeliest legal action of every observation; torch decides for more than one."""
        if len(mask) != 1:
            return self.net.act(obs, mask)
        logits = self.logits(self.net.rows(obs), self.net.layout)
        return np.where(np.asarray(mask) != 0, logits, -np.inf).argmax(-1)

    def logits(self, rows: NDArray[np.float16], layout: Any) -> Floats:
        """Logits (N + 1,) of one row (1, columns) of the agent's `Layout.rows`."""
        cuts = np.cumsum(layout.sizes)[:-1]
        arrived, expert, running, waiting, mr, mw = np.split(rows[0].astype(np.float32), cuts)
        expert = expert.reshape(layout.experts, -1)
        x = {
            "arrived": arrived[None],
            "expert": np.concatenate([expert, self.law], -1),
            "running": running.reshape(mr.size, -1),
            "waiting": waiting.reshape(mw.size, -1),
        }
        held = {
            key: mask.reshape(layout.experts, -1) != 0
            for key, mask in (("running", mr), ("waiting", mw))
        }
        x = self.second(self.first(x, held), held)
        h, experts = x["arrived"], x["expert"]
        both = np.concatenate([h, experts.mean(0, keepdims=True)], -1)
        drop, common = self.out(np.maximum(self.hidden(both), 0))[0]
        hidden = np.maximum(self.by_request(h) + self.by_expert(experts), 0)
        logits = np.concatenate([[drop], self.value(hidden)[:, 0]]).astype(np.float32) + common
        if self.temperature:
            logits[1:] += self.heuristic_values(expert[None], layout.running)[0] / self.temperature
        return logits
