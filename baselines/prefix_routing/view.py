"""What a rule of a gateway may read when it routes a request, and what every rule is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
NOWHERE = -1
"""What a rule answers when no replica is up."""


@dataclass(frozen=True, slots=True)
class View:
    """One decision: a request and N replicas, as the gateway knows them.

    Queues and memory are the values of the last scrape. In-flight numbers are the gateway's own
    accounting: a request counts from its routing to its completion, and its prefill to its first
    token. Matches come from the gateway's prefix index, which may be wrong.

    Attributes:
        prompt_tokens: L, tokens of the prompt.
        predicted_output: Predicted tokens of the output.
        block_size: Tokens of a KV block of the replicas.
        match_tokens: (N,), m, leading tokens of the prompt that the index has for the replica.
        in_flight: (N,) requests.
        prefill_tokens: (N,) uncached prompt tokens of the requests without a first token.
        context_tokens: (N,) prompt tokens of the requests in flight.
        decode_blocks: (N,) KV blocks of the requests in flight.
        waiting: (N,) requests, scraped.
        running: (N,) requests, scraped.
        kv: (N,) share of the KV blocks in use, scraped, in [0, 1].
        capacity_tokens: (N,) tokens that the KV memory holds.
        speed: (N,) prefill tokens per second.
        decode_speed: (N,) tokens per second that the replicas decode under equal load.
        last_replica: Replica of the session's last request, -1 for none.
        session: Identifier of the conversation, -1 for none.
        tenant: Identifier of the customer.
        up: (N,) bool, which replicas take requests.
        now_s: Time of the decision.
        rng: Source of the rules' chance.
        index_block: Tokens of an entry of the prefix index; 0: ``block_size``.
        index_tokens: (N,) tokens that the index holds for the replica, or None where unknown.
        scrape_age_s: Age of ``waiting``, ``running`` and ``kv``.
        tpot_s: (N,) measured seconds per output token, or None before any.
        ttft_slo_s: Time to first token that the request must keep.
        tpot_slo_s: Seconds per output token that the request must keep.
        cards: (N,) names of the replicas' profiles, where they are known.
    """

    prompt_tokens: int
    predicted_output: float
    block_size: int
    match_tokens: Numbers
    in_flight: Numbers
    prefill_tokens: Numbers
    context_tokens: Numbers
    decode_blocks: Numbers
    waiting: Numbers
    running: Numbers
    kv: Numbers
    capacity_tokens: Numbers
    speed: Numbers
    decode_speed: Numbers
    last_replica: int
    session: int
    tenant: int
    up: NDArray[np.bool_]
    now_s: float
    rng: np.random.Generator
    index_block: int = 0
    index_tokens: Numbers | None = None
    scrape_age_s: float = 0.0
    tpot_s: Numbers | None = None
    ttft_slo_s: float = np.inf
    tpot_slo_s: float = np.inf
    cards: tuple[str, ...] = ()

    def match_share(self) -> NDArray[np.float64]:
        """Matched entries of the index over the prompt's full entries (N,); 0 if it has none."""
        entry = self.index_block or self.block_size
        return (self.match_tokens // entry) / np.maximum(self.prompt_tokens // entry, 1)

    def new_tokens(self) -> NDArray[Any]:
        """Prompt tokens that the index has not for the replica (N,), L - m."""
        return self.prompt_tokens - self.match_tokens


class Rule:
    """A routing rule of one gateway, for one episode at a time.

    Rules that remember what they chose do so themselves: `choose` is called once a request, in the
    order of the requests, and the answer counts as followed.

    Attributes:
        name: The name in tables.
        learns: True if `outcome` is to be told what became of the requests.
    """

    name = "rule"
    learns = False

    def __init__(self) -> None:
        """A rule without constants."""

    def reset(self) -> None:
        """Forget everything, at the start of an episode."""

    def outcome(self, decision: int, ttft_s: float, tpot_s: float) -> None:
        """Learn from a request that was completed; ignored unless ``learns``.

        Args:
            decision: How often `choose` was called before it in the episode.
            ttft_s: Seconds from its routing to its first token.
            tpot_s: Seconds per output token after that, NaN for an output of one token.
        """

    def choose(self, view: View) -> int:
        """The replica for the request, 0 to N - 1, or `NOWHERE` if no replica is up."""
        replicas = np.flatnonzero(view.up)
        return self.choose_of(view, replicas) if len(replicas) else NOWHERE

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """The replica for the request, one of ``replicas``, which are up; at least one."""
        raise NotImplementedError


def least(cost: Numbers, replicas: NDArray[np.intp], rng: np.random.Generator | None = None) -> int:
    """The replica of least cost.

    Args:
        cost: (N,) of all replicas.
        replicas: (K,) among which to choose.
        rng: Draws one of several least; None takes the lowest index.
    """
    costs = cost[replicas]
    if rng is None:
        return int(replicas[costs.argmin()])
    tied = np.flatnonzero(costs == costs.min())
    return int(replicas[tied[0] if len(tied) == 1 else tied[rng.integers(len(tied))]])


def best_match(view: View, replicas: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of ``replicas`` with the longest match, which may be 0."""
    match = view.match_tokens[replicas]
    return replicas[match == match.max()]
