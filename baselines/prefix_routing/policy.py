"""A rule as a policy: what it reads of all rows of a batch, and which replica it chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.protocol import BasePolicy, Observation
from servegym.envs.prefix_routing.kernel.observation import OF_REPLICA, OF_REQUEST

Numbers = NDArray[Any]
Keep = NDArray[np.bool_]


class View:
    """B decisions, each a request and N replicas, as the gateway knows them.

    The observation's columns by their names, of a replica (B, N), of the request (B, 1). Queues and
    memory are the values of the last scrape. In-flight numbers are the gateway's own accounting: a
    request counts from its routing to its completion, and its prefill to its first token. Matches
    come from the gateway's prefix index, which may be wrong.

    Args:
        observation: Dict observation of the environment, with a leading axis of B.
        system: The system.
        chances: Source of chance of each row.
    """

    def __init__(
        self,
        observation: Observation,
        system: PrefixSystem,
        chances: Sequence[np.random.Generator] = (),
    ) -> None:
        self._replicas, self._request = observation["replicas"], observation["request"]
        self._chances = chances[: len(self._request)]
        self.system = system

    def __getattr__(self, name: str) -> NDArray[np.float64]:
        if name in OF_REQUEST:
            value = self._request[:, OF_REQUEST[name], None].astype(np.float64)
        elif name in OF_REPLICA:
            value = self._replicas[:, :, OF_REPLICA[name]].astype(np.float64)
        else:
            raise AttributeError(name)
        setattr(self, name, value)  # asked for again, it is there
        return value

    def new_tokens(self) -> NDArray[np.float64]:
        """Prompt tokens that the index has not for the replica (B, N), L - m."""
        return self.prompt_tokens - self.match_tokens

    def matched_entries(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Matched entries of the index (B, N), and the prompt's full ones (B, 1), at least 1."""
        entry = self.system.index_block
        return self.match_tokens // entry, np.maximum(self.prompt_tokens // entry, 1)

    def match_share(self) -> NDArray[np.float64]:
        """Matched entries over the prompt's full entries (B, N); 0 if it has none."""
        matched, entries = self.matched_entries()
        return matched / entries

    def random(self, size: int) -> NDArray[np.float64]:
        """Uniform numbers (B, size), each row from its own source."""
        return np.array([chance.random(size) for chance in self._chances])


Decide = Callable[[View, Keep], tuple[Numbers, Keep]]
"""A rule: from a view and the replicas (B, N) that take requests to costs (B, N), and to which of
these replicas are left. The least cost is chosen; costs of what is not left mean nothing."""


def extremes(values: Numbers, keep: Keep) -> tuple[Numbers, Numbers]:
    """Least and largest value (B, 1) of the replicas that are kept."""
    low = np.where(keep, values, np.inf).min(-1, keepdims=True)
    return low, np.where(keep, values, -np.inf).max(-1, keepdims=True)


def least(cost: Numbers, keep: Keep) -> Keep:
    """Those that are kept and have the least cost of these."""
    return keep & (cost == extremes(cost, keep)[0])


class RulePolicy(BasePolicy):
    """The replica of least cost by a rule.

    Args:
        system: The system.
        name: The policy's name.
        decide: The rule.
        chance: Whether a tie is broken at random; else by the lowest index.
    """

    env_view = "graph"

    def __init__(
        self, system: PrefixSystem, name: str, decide: Decide, chance: bool = True
    ) -> None:
        self.system, self.name, self.decide, self.chance = system, name, decide, chance
        self._chances: list[np.random.Generator] = []

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._size(num_envs, seed)
        self._chances = self.rng.spawn(num_envs)

    def reset_alike(self, seeds: Sequence[Any]) -> None:
        """`reset` with a seed for each row: rows of one seed have the same chance."""
        self._size(len(seeds), 0)
        self._chances = [np.random.default_rng(seed) for seed in seeds]

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`; replica 0, which rejects it, gets a request that nobody can take."""
        up = np.asarray(action_mask)[:, : self.system.num_replicas] == 1
        able = up.any(-1)  # other rows are decided as if all were up, and count for nothing
        view = View(observation, self.system, self._chances)
        tied = least(*self.decide(view, up | ~able[:, None]))
        chosen = tied.argmax(-1)
        if self.chance:
            for row in np.flatnonzero(able & (tied.sum(-1) > 1)):
                among = np.flatnonzero(tied[row])
                chosen[row] = among[self._chances[row].integers(len(among))]
        nowhere = self.system.num_replicas if self.system.admission else 0
        return np.where(able, chosen, nowhere)


class RoundRobin(RulePolicy):
    """The next replica in turn, passing over those that are down."""

    def __init__(self, system: PrefixSystem) -> None:
        super().__init__(system, "round_robin", self._distance, chance=False)

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        super().reset(num_envs, seed)
        self._next = np.zeros((num_envs, 1), np.int64)

    def episode_start(self, mask: NDArray[np.bool_]) -> None:
        """Begin with replica 0."""
        self._next[mask] = 0

    def _distance(self, view: View, keep: Keep) -> tuple[Numbers, Keep]:
        return (np.arange(keep.shape[1]) - self._next) % keep.shape[1], keep

    def act(self, observation: Observation, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`."""
        chosen = super().act(observation, action_mask)
        self._next = (chosen[:, None] + 1) % self.system.num_replicas
        return chosen
