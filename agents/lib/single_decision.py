"""One decision at a time: the HAN's policy in numpy, without torch's cost per operation.

A router decides when a request arrives, so what counts in service is the time of one decision.
`SingleDecision` computes what `HAN` and the actor's `Head` compute for a batch of one, on all
slots with the empty ones masked, so that its time does not depend on the load. Not an agent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.agents.han import HEADS, WIDTH, Layout, prior

Floats = NDArray[np.float32]

_DEPTH = WIDTH // HEADS


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
        blocks = _array(layer.blocks)
        self.src, self.dst = (
            {key: blocks * _array(value) for key, value in part.items()}
            for part in (layer.src, layer.dst)
        )
        self.k_lin, self.q = _Linear(layer.k_lin), _array(layer.q)

    def _attend(self, name: str, src: Floats, dst: Floats, held: Any) -> Floats:
        """Attention of each dst (D, 64) over its own slots src (D, K, 64); held (D, K) or None."""
        groups, slots = src.shape[:2]
        score = (src.reshape(-1, WIDTH) @ self.src[name]).reshape(groups, slots, HEADS)
        score += (dst @ self.dst[name])[:, None]
        score = np.maximum(score, np.float32(0.2) * score)  # leaky ReLU
        if held is not None:
            score = np.where(held[..., None], score, np.float32(-1e9))
        weight = np.exp(score - score.max(1, keepdims=True))
        if held is not None:
            weight *= held[..., None]
        total = weight.sum(1) + np.float32(1e-16)
        values = src.reshape(groups, slots, HEADS, _DEPTH).transpose(0, 2, 1, 3)
        message = (weight.transpose(0, 2, 1)[:, :, None] @ values)[:, :, 0] / total[..., None]
        return np.maximum(message.reshape(groups, WIDTH), 0)

    def __call__(self, x: dict[str, Floats], held: dict[str, Any]) -> dict[str, Floats]:
        """Features {type: (nodes, d)} -> {type: (nodes, 64)}; held: (N, slots) bool by queue."""
        h = {key: self.proj[key](value) for key, value in x.items()}
        n = len(h["expert"])
        kinds = ("arrived", "expert") if self.last else tuple(h)
        own = {key: np.maximum(h[key], 0) for key in kinds}
        messages = [self._attend("expert__arrived", h["expert"][None], h["arrived"], None)]
        messages += [
            self._attend(f"{key}__expert", h[key].reshape(n, -1, WIDTH), h["expert"], held[key])
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
                mine = own[key].reshape(n, -1, WIDTH)
                out[key] = (mine + w * (own["expert"][:, None] - mine)).reshape(-1, WIDTH)
        return out


def _sigmoid(x: Any) -> Any:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # cannot overflow


class SingleDecision:
    """The logits of one observation, from the weights of an agent over the graph."""

    def __init__(self, net: Any) -> None:
        """Copy the weights.

        Args:
            net: An agent of ``sac_han`` or ``ppo_han``; its state is the graph.
        """
        encoder, actor = net.encoder, net.actor
        self.temperature: float = net.temperature
        self.first, self.second = _Layer(encoder.first), _Layer(encoder.second)
        self.law = None if net.law is None else _array(net.law)
        self.hidden, self.out = _Linear(actor.request[0]), _Linear(actor.request[2])
        self.per_expert: bool = actor.per_expert
        if self.per_expert:
            self.by_request, self.by_expert = _Linear(actor.by_request), _Linear(actor.by_expert)
            self.value = _Linear(actor.out)

    def logits(self, rows: NDArray[np.float16], layout: Layout) -> Floats:
        """Logits (N + 1,) of one row (1, columns) that `Layout.rows` scaled.

        Args:
            rows: The row.
            layout: Its layout.
        """
        cuts = np.cumsum(layout.sizes)[:-1]
        arrived, expert, running, waiting, mr, mw = np.split(rows[0].astype(np.float32), cuts)
        wide, request = layout.widths
        expert = expert.reshape(-1, wide)
        if self.law is not None:
            expert = np.concatenate([expert, self.law], -1)
        x = {
            "arrived": arrived[None],
            "expert": expert,
            "running": running.reshape(-1, request),
            "waiting": waiting.reshape(-1, request),
        }
        held = {
            key: mask.reshape(layout.experts, -1) != 0
            for key, mask in (("running", mr), ("waiting", mw))
        }
        x = self.second(self.first(x, held), held)
        h, experts = x["arrived"], x["expert"]
        if not self.per_expert:
            return self.out(np.maximum(self.hidden(h), 0))[0]
        both = np.concatenate([h, experts.mean(0, keepdims=True)], -1)
        drop, common = self.out(np.maximum(self.hidden(both), 0))[0]
        hidden = np.maximum(self.by_request(h) + self.by_expert(experts), 0)
        logits = np.concatenate([[drop], self.value(hidden)[:, 0]]).astype(np.float32) + common
        if self.temperature:
            logits[1:] += prior(expert[None, :, :wide], layout.running)[0] / self.temperature
        return logits
