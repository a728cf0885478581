"""The rule of NVIDIA Dynamo's KV router."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.prefix_routing.view import Rule, View, least
from servegym.envs._checks import real


class Dynamo(Rule):
    """Dynamo: least weighted prefill blocks plus decode blocks.

    cost = ``prefill_scale`` * max((prefill tokens in flight + L - ``credit`` * m) / block, 0)
    + decode blocks + ``request_weight`` * requests in flight.

    With ``temperature`` 0 the least cost, random ties; else a draw by the softmax of
    -cost / (range of the costs * temperature), uniform if all are equal.

    Project ai-dynamo/dynamo, ``lib/kv-router/src/scheduling/selector/default.rs`` @07a6c9c
    (overlap_score_credit 1, prefill_load_scale 1, decode_active_request_weight 0,
    router_temperature 0). The blocks of the request itself are the same everywhere and left out, as
    are the credits of host (0.75) and disk (0.25) caches and the decay of the credit (0).
    """

    name = "dynamo"

    def __init__(
        self,
        prefill_scale: float = 1.0,
        credit: float = 1.0,
        temperature: float = 0.0,
        request_weight: float = 0.0,
    ) -> None:
        self.prefill_scale = real("prefill_scale", prefill_scale, 0.0)
        self.credit = real("credit", credit, 0.0)
        self.temperature = real("temperature", temperature, 0.0)
        self.request_weight = real("request_weight", request_weight, 0.0)

    def costs(self, view: View) -> NDArray[np.float64]:
        """The cost of all replicas (N,), in blocks."""
        tokens = view.prefill_tokens + view.prompt_tokens - self.credit * view.match_tokens
        prefill = np.maximum(tokens / view.block_size, 0.0)
        requests = self.request_weight * view.in_flight
        return self.prefill_scale * prefill + view.decode_blocks + requests

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        cost = self.costs(view)
        if self.temperature == 0.0:
            return least(cost, replicas, view.rng)
        cost = cost[replicas]
        spread = cost.max() - cost.min()
        if spread == 0.0:
            return int(replicas[view.rng.integers(len(replicas))])
        weight = np.exp((cost.min() - cost) / (spread * self.temperature))
        return int(view.rng.choice(replicas, p=weight / weight.sum()))
