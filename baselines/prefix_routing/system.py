"""What an operator knows about the replicas and the gateway before any request arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import SystemDescription

if TYPE_CHECKING:
    from servegym.envs.prefix_routing.config import Problem


@dataclass(frozen=True, eq=False)
class PrefixSystem(SystemDescription):
    """Static description of a prefix-routing problem.

    Attributes:
        num_replicas: N.
        admission: Whether a request may be rejected, by action N.
        block_size: Tokens of a KV block.
        index_block: Tokens of an entry of the gateway's prefix index.
        speed: (N,) prefill tokens/s.
        decode_speed: (N,) tokens/s of a replica's decodes under one load for all, by its hardware
            profile: ``max_num_seqs`` requests that fill the smallest KV memory.
        kv_tokens: (N,) tokens of the KV memories.
        max_num_seqs: Requests that a replica runs, at most.
        cards: (N,) names of the replicas' hardware profiles.
    """

    family = "prefix_routing"

    num_replicas: int
    admission: bool
    block_size: int
    index_block: int
    speed: NDArray[np.float64]
    decode_speed: NDArray[np.float64]
    kv_tokens: NDArray[np.int64]
    max_num_seqs: int
    cards: tuple[str, ...] = ()

    @classmethod
    def from_problem(cls, problem: Problem) -> PrefixSystem:
        """Describe the system of a built prefix-routing problem.

        Args:
            problem: As `servegym.envs.prefix_routing.config.build_problem` returns it.
        """
        kv_tokens = np.asarray(problem.capacity * problem.arguments.block_size, np.int64)
        running = problem.arguments.max_num_seqs
        full = [p.decode_s(running, int(kv_tokens.min())) for p in problem.profiles]
        return cls(
            num_replicas=problem.num_replicas,
            admission=problem.arguments.admission,
            block_size=problem.arguments.block_size,
            index_block=int(problem.gateway["entry_tokens"]),
            speed=np.asarray(problem.speed, np.float64),
            decode_speed=running / np.array(full),
            kv_tokens=kv_tokens,
            max_num_seqs=running,
            cards=tuple(profile.name for profile in problem.profiles),
        )
