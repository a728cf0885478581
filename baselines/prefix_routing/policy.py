"""A gateway's rule as a policy of the environment: one decision a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.prefix_routing.view import NOWHERE, Rule, View
from servegym.baselines.protocol import BasePolicy, Observation
from servegym.envs.prefix_routing.kernel.observation import OF_REPLICA, OF_REQUEST

_WHOLE = """
    match_tokens in_flight prefill_tokens context_tokens decode_blocks waiting running index_tokens
""".split()
"""Columns of a replica that a `View` has as whole numbers, by the same names."""


def view_of(
    observation: Observation,
    row: int,
    mask: NDArray[Any],
    system: PrefixSystem,
    rng: np.random.Generator,
) -> View:
    """What a rule reads, from the Dict observation (B, ...) of a row and its mask int8 (A,).

    The first N entries of the mask say which replicas take the request; ``rng`` is the source of
    the rule's chance.
    """
    replicas = observation["replicas"][row].astype(np.float64)
    request = observation["request"][row].astype(np.float64)

    def of(name: str) -> NDArray[Any]:
        return replicas[:, OF_REPLICA[name]]

    last = np.flatnonzero(of("session_replica"))
    return View(
        prompt_tokens=int(request[OF_REQUEST["prompt_tokens"]]),
        predicted_output=float(request[OF_REQUEST["predicted_tokens"]]),
        block_size=system.block_size,
        kv=of("kv_usage"),
        capacity_tokens=of("kv_tokens").astype(np.int64),
        speed=of("prefill_tokens_per_s"),
        decode_speed=system.decode_speed,
        last_replica=int(last[0]) if len(last) else -1,
        session=int(observation["ids"][row, 0]),
        tenant=int(observation["ids"][row, 1]),
        up=mask[: system.num_replicas] == 1,
        now_s=float(observation["time_s"][row, 0]),
        rng=rng,
        index_block=system.index_block,
        scrape_age_s=float(replicas[0, OF_REPLICA["metrics_age_s"]]),
        tpot_s=of("tpot_s") if of("tpot_s").any() else None,
        ttft_slo_s=float(request[OF_REQUEST["ttft_slo_s"]]),
        tpot_slo_s=float(request[OF_REQUEST["tpot_slo_s"]]),
        cards=system.cards,
        **{name: of(name).astype(np.int64) for name in _WHOLE},
    )


class BatchView:
    """Of all rows of an observation what the functions of `plugins` read of a `View`.

    Arrays are (B, N) and numbers (B, 1), made when they are asked for.

    Args:
        observation: Dict observation of the environment, with a leading axis of B.
        mask: int8 (B, A).
        system: The system.
        rng: Source of chance: ``random(shape)``.
    """

    def __init__(
        self, observation: Observation, mask: NDArray[Any], system: PrefixSystem, rng: Any
    ) -> None:
        self._replicas, self._request = observation["replicas"], observation["request"]
        self.block_size, self.index_block = system.block_size, system.index_block
        self.cards, self.rng = system.cards, rng
        self.up = np.asarray(mask)[:, : system.num_replicas] == 1

    def __getattr__(self, name: str) -> NDArray[np.float64]:
        if name in OF_REQUEST:
            value = self._request[:, OF_REQUEST[name], None].astype(np.float64)
        elif name in OF_REPLICA:
            value = self._replicas[:, :, OF_REPLICA[name]].astype(np.float64)
        else:
            raise AttributeError(name)
        setattr(self, name, value)  # asked for again, it is there
        return value

    @property
    def kv(self) -> NDArray[np.float64]:
        """See `View`."""
        return self.kv_usage

    @property
    def last_replica(self) -> NDArray[np.int64]:
        """See `View`."""
        return np.where(self.session_replica.any(-1), self.session_replica.argmax(-1), -1)[:, None]

    match_share, new_tokens = View.match_share, View.new_tokens


class RulePolicy(BasePolicy):
    """A rule for each row.

    Args:
        system: The system.
        make: Makes a rule.
        name: The rule's name.
    """

    env_view = "graph"

    def __init__(self, system: PrefixSystem, make: Callable[[], Rule], name: str) -> None:
        self.system = system
        self.name = name
        self._make = make
        self._rules: list[Rule] = []
        self._chances: list[np.random.Generator] = []
        self.needs_outcomes = make().learns  # arguments out of range are refused here

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._size(num_envs, seed)
        self._rules = [self._make() for _ in range(num_envs)]
        self._chances = self.rng.spawn(num_envs)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """See `Policy.episode_start`."""
        for row in np.flatnonzero(mask):
            self._rules[row].reset()

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`; replica 0, which rejects it, gets a request that nobody can take."""
        system = self.system
        actions = np.zeros(self.num_envs, dtype=np.int64)
        for row, rule in enumerate(self._rules):
            mask = np.asarray(action_mask[row])
            chosen = rule.choose(view_of(observation, row, mask, system, self._chances[row]))
            nowhere = system.num_replicas if system.admission else 0
            actions[row] = nowhere if chosen == NOWHERE else chosen
        return actions

    def outcomes(self, ended: NDArray[Any]) -> None:
        """See `Policy.outcomes`; the records are `envs.prefix_routing.outcomes.OUTCOME`."""
        for each in ended[np.isfinite(ended["finish_s"])]:
            latencies = float(each["ttft_s"]), float(each["tpot_s"])
            self._rules[each["row"]].outcome(int(each["decision"]), *latencies)
