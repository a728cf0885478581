"""The arguments of the prefix-routing environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servegym._checks import choose
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Options, Range
from servegym.envs.prefix_routing.gateway import INDEXES
from servegym.envs.prefix_routing.kernel import steps
from servegym.envs.prefix_routing.kernel.gateway import MAX_REPLICAS
from servegym.envs.prefix_routing.scenarios import SCENARIOS
from servegym.envs.prefix_routing.tables import EngineArguments
from servegym.envs.prefix_routing.workloads import DISPATCHES, SPLITS, WORKLOADS

REWARDS = {"slo": steps.SLO, "ttft": steps.TTFT, "score": steps.SCORE, "dense": steps.DENSE}
MAX_REQUESTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PrefixArguments(EngineArguments):
    """The arguments of `PrefixRoutingEnv` and of the ids beside it."""

    headings = dict(
        max_num_seqs="engine",
        scenario="workload",
        index="observation",
        admission="action",
        slo="reward",
    )
    profiles: Any = arg.other(
        {"card": "h100", "model": "llama-3.1-8b"}, "of all, or a list: see below"
    )
    num_replicas: int | None = arg.whole(
        None, 1, "N; 8, or one a profile of a list", high=MAX_REPLICAS
    )
    scenario: str | None = arg.choice(None, SCENARIOS, "named; other arguments override its own")
    workload: str = arg.choice("tenants", WORKLOADS, "what draws the requests")
    workload_kwargs: Options = arg.options("of its class in `prefix_routing.workloads`")
    split: str = arg.choice("train", SPLITS, "sessions of a recorded workload")
    dispatch: str = arg.choice("think", DISPATCHES, "a session's next request: see below")
    rate: Range = arg.span(20.0, "mean requests/s, or a range drawn from for each episode")
    episode_requests: int = arg.whole(1000, 1, "decisions", high=MAX_REQUESTS)
    warmup_requests: int = arg.whole(500, 0, "requests before them", high=MAX_REQUESTS)
    index: str = arg.choice("approximate", INDEXES, "prefix index of the gateway: see below")
    index_kwargs: Options = arg.options("see below")
    scrape_s: float = arg.number(0.05, 0.0, "time between scrapes of the metrics; 0: live")
    length_noise: float | None = arg.number(
        None, 0.0, "sigma of log(predicted / true tokens)", high=10.0
    )
    admission: bool = arg.switch(False, "whether a request may be rejected")
    slo: Options = arg.options("`ttft_s` (.5), `ttft_s_per_token` (1e-4), `tpot_s` (.04)")
    reward: str = arg.choice("slo", REWARDS, "see Rewards", box="dense")

    @classmethod
    def named(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The scenario's arguments below those given."""
        if arguments.get("scenario") is None:
            return arguments
        return {**SCENARIOS[choose("scenario", arguments["scenario"], SCENARIOS)], **arguments}
