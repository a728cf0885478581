"""The arguments of the expert placement environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from servegym._checks import one_or_pair, whole
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Options
from servegym.envs.expert_placement.cluster import LOAD_DEFAULTS, MODELS, list_scenarios, scenario
from servegym.envs.expert_placement.simulator import MIGRATION_SOURCES, SimulatorArguments
from servegym.envs.workloads.activations import SKEWS

# The prompts that the first counts come from are never those of the episode.
SPLITS = {"train": "val", "val": "train", "eval": "train"}
ACTION_MODES = ("layer_budget", "layer_height", "expert_score", "placement")


def _tokens(name: str, value: Any) -> int | tuple[int, int]:
    return one_or_pair(name, value, partial(whole, low=1, high=1 << 20))


@dataclass(frozen=True, kw_only=True)
class PlacementArguments(SimulatorArguments):
    """The arguments of `ExpertPlacementEnv`; None: the scenario's."""

    headings = dict(
        replica_choice="engine",
        scenario="workload",
        cluster_kwargs="network",
        action_mode="action",
        reward="reward",
    )
    migration_source: str = arg.choice(None, MIGRATION_SOURCES, "where new weights come from")
    free_start: bool = arg.switch(True, "a change at the first decision takes no time")
    scenario: str = arg.choice("edge_hetero", list_scenarios(), "cluster and load")
    model: str = arg.choice("deepseek-v2-lite", (*MODELS, "toy"), "what is served")
    epochs: int = arg.whole(12, 1, "decisions", high=100_000)
    epoch_s: float = arg.number(300.0, 0.0, "seconds between them", open_low=True)
    split: str = arg.choice("train", SPLITS, "prompts")
    skew: str = arg.choice("measured", SKEWS, "use of the experts, or narrower as in the paper")
    mean_interarrival_s: float | Sequence[float] = arg.other(None, "one number, or one a server")
    output_tokens: int | tuple[int, int] = arg.other(None, "of an answer, or a range", _tokens)
    tasks: Sequence[str] | None = arg.other(None, "their names in the order of the servers")
    rotate_s: float = arg.number(None, 0.0, "time after which tasks move on to the next server")
    history_requests: int = arg.whole(
        100, 0, "of each server, behind the first counts", high=1_000_000
    )
    cluster_kwargs: Options = arg.options("fields of `cluster.ClusterArguments`")
    action_mode: str = arg.choice("layer_budget", ACTION_MODES, "see Action Space")
    reward: str = arg.choice("latency", ("latency", "log_latency"), "see Rewards")

    @property
    def output_range(self) -> tuple[int, int]:
        """Least and most tokens of an answer."""
        tokens: Any = self.output_tokens
        return tokens if isinstance(tokens, tuple) else (tokens, tokens)

    def defaults(self) -> Mapping[str, Any]:
        """The load of the scenario."""
        load = LOAD_DEFAULTS | scenario(self.scenario)
        tasks = load["tasks"].get(self.model) if isinstance(self.model, str) else None
        return {**{name: load[name] for name in LOAD_DEFAULTS}, "tasks": tasks}
