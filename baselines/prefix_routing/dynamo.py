"""The rule of NVIDIA Dynamo's KV router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real
from servegym.baselines.prefix_routing.view import Rule, View, least
from servegym.envs.prefix_routing.kernel.observation import REPLICA_FEATURES

_AT = {name: k for k, name in enumerate(REPLICA_FEATURES)}
_READ = ("prefill_tokens", "match_tokens", "decode_blocks", "in_flight")


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


class DynamoRows:
    """Dynamo's cost with a set of constants a row, for a batch of observations at a time.

    What `Dynamo` chooses, but that equal costs are broken by chance of its own.

    Args:
        constants: (B, 3) or (1, 3): ``prefill_scale``, ``credit`` and ``request_weight``.
        block_size: Tokens of a block.
    """

    def __init__(self, constants: NDArray[np.float64], block_size: int) -> None:
        self.scale, self.credit, self.weight = np.asarray(constants, np.float64).T[:, :, None]
        self.block_size, self.rng = block_size, np.random.default_rng(0)

    def __call__(self, observation: Mapping[str, NDArray[Any]], mask: Any) -> NDArray[np.int64]:
        """Actions (B,); replica 0 where none takes the request.

        Args:
            observation: Dict observation of the environment, with a leading axis of B.
            mask: int8 (B, A).
        """
        replicas = observation["replicas"].astype(np.float64)
        prefill, match, blocks, in_flight = (replicas[:, :, _AT[name]] for name in _READ)
        tokens = prefill + observation["request"][:, :1] - self.credit * match
        cost = self.scale * np.maximum(tokens / self.block_size, 0.0) + blocks
        cost += self.weight * in_flight + 1e-9 * self.rng.random(cost.shape)
        return np.where(np.asarray(mask)[:, : cost.shape[1]] > 0, cost, np.inf).argmin(-1)
