"""What an evaluation reports of each environment family beyond the KPIs of its episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.families import Family


def number(value: float, digits: int, scale: float = 1.0) -> str:
    """A number as a cell of a table has it; a dash where it is undefined."""
    return "–" if not math.isfinite(value) else f"{scale * value:.{digits}f}"


@dataclass(frozen=True)
class Column:
    """One column of the printed table: the mean over episodes of a row's number."""

    title: str  # with the unit
    key: str
    digits: int = 1
    scale: float = 1.0  # from the row's unit to the title's
    decides: bool = False  # whether it is in the short table

    def text(self, value: float) -> str:
        """The cell of a row's number."""
        return number(value, self.digits, self.scale)


@dataclass(frozen=True)
class Report:
    """What an evaluation reports of one environment family."""

    headline: str  # key of the row's headline number
    heading: str
    columns: tuple[Column, ...]  # the others of the printed table
    reported_arguments: str  # of the environment, that every row names, set or default
    notes: tuple[str, ...]  # lines below the table
    describe_action: Callable[[Any], str]  # the first action of a batch in words
    example_policy: str  # which is shown where none is named
    naive_policy: str  # which a table shows beside ``random``, however many others are better
    pictured: int  # decisions before a picture in which every part shows something
    higher_is_better: bool = True
    # Arguments that a policy may set: they change what it sees, how it acts or what it is rewarded
    # for, never the world that it is measured in.
    interface: tuple[str, ...] = ()
    # Further ones that the package's own policies set: systems that serve in another way, which
    # are compared with as they are.
    serving: tuple[str, ...] = ()
    # Argument -> value with which the reward tells of what has not ended: a policy that asks for
    # it is clairvoyant.
    early: Mapping[str, Any] = field(default_factory=dict)
    # Parts of the reward that tell of nothing before it has ended, the feedback of a guest; empty
    # where they all do.
    feedback_terms: tuple[str, ...] = ()
    # (request log, problem) -> further numbers of a row.
    episode_statistics: Callable[[Any, Any], dict[str, float]] = lambda log, problem: {}

    def shown(self, every: bool) -> list[Column]:
        """The columns of a table: every one, or those that decide."""
        return [column for column in self.columns if every or column.decides]


def report_of(family: Family) -> Report:
    """What an evaluation reports of a family."""
    return _REPORTS[family.name]


# --------------------------------------------------------------------------------- LLM routing


def _routing_statistics(log: NDArray[Any], problem: Any) -> dict[str, float]:
    from servegym.envs.llm_routing.core import OUTCOMES

    # Drawn fleets have other experts in each episode: these have no names.
    names, models = [], list(problem.models)
    if problem.fleets is None:
        names = [f"{m}@{k}" if models.count(m) > 1 else m for k, m in enumerate(models, 1)]
    done = log[log["outcome"] == OUTCOMES.index("completed")]
    with np.errstate(divide="ignore", invalid="ignore"):
        latency = (done["finish_s"] - done["arrival_s"]) / done["output_tokens"]
    latency = latency[~np.isnan(latency)]
    percentiles = np.percentile(latency, [50, 90, 99]) if latency.size else [math.nan] * 3
    keys = (f"p{percent}_latency_s_per_token" for percent in (50, 90, 99))
    row = dict(zip(keys, map(float, percentiles), strict=True))
    sent = np.bincount(log["expert"][log["expert"] >= 0], minlength=len(names))
    row |= {f"share_{name}": float(sent[n]) / len(log) for n, name in enumerate(names)}
    row["ceiling"] = float(np.mean(log["best_score"], dtype=np.float64))
    return row


_ROUTING = Report(
    headline="avg_qos",
    heading="QoS",
    columns=(
        Column("drop %", "drop_rate", 1, 100, decides=True),
        Column("reject %", "reject_rate", 1, 100, decides=True),
        Column("late %", "violation_rate", 1, 100, decides=True),
        Column("ms/token", "mean_latency_s_per_token", 1, 1e3, decides=True),
        Column("P50", "p50_latency_s_per_token", 1, 1e3),
        Column("P90", "p90_latency_s_per_token", 1, 1e3),
        Column("P99", "p99_latency_s_per_token", 1, 1e3, decides=True),
        Column("TTFT ms", "mean_ttft_s", 0, 1e3),
        Column("TPOT ms", "mean_tpot_s", 1, 1e3),
        Column("e2e s", "mean_e2e_s", 2),
        Column("memory %", "memory_use", 1, 100),
        Column("goodput/s", "goodput_rps", 2),
    ),
    reported_arguments="profiles arrivals rate latency_requirement_s scheduler "
    "score_predictor length_predictor episode_requests",
    notes=(
        "QoS: interquartile mean over episodes [bootstrap 95 % interval]; dropped and rejected "
        "requests count 0. Rates in % of all requests; latency of served requests.",
    ),
    episode_statistics=_routing_statistics,
    describe_action=lambda actions: f"to expert {actions[0]}" if actions[0] else "dropped",
    example_policy="greedy_qos",
    naive_policy="least_outstanding",
    pictured=60,
    interface=("reward",),
    early={"reward": "paid_forward"},
    feedback_terms=("qos",),
)

# ------------------------------------------------------------------------------- serverless MoE


_SERVERLESS = Report(
    headline="mean_reward",
    heading="reward a request",
    columns=(
        Column("cost / MIX", "cost_over_mix", 3, decides=True),
        Column("late TTFT %", "ttft_violation_rate", 1, 100, decides=True),
        Column("late TPOT %", "tpot_violation_rate", 1, 100, decides=True),
        Column("infeasible %", "infeasible_rate", 1, 100),
        Column("TTFT s", "mean_ttft_s", 2),
        Column("TPOT ms", "mean_tpot_s", 1, 1e3),
        Column("cold s", "mean_cold_start_s", 2),
        Column("remote %", "mean_remote_ratio", 1, 100),
        Column("main warm %", "main_warm_rate", 1, 100),
        Column("1e-3 USD/request", "mean_cost_usd", 3, 1e3),
    ),
    reported_arguments="model preset gpu granularity predictor "
    "decode_invocation price_ratio episode_requests",
    notes=(
        "reward: minus cost and penalties over the cost of the same request with every expert in "
        "the main function (MIX); interquartile mean over episodes [bootstrap 95 % interval].",
    ),
    describe_action=lambda actions: f"plan {np.asarray(actions[0]).tolist()}",
    example_policy="greedy_warm",
    naive_policy="mix",
    pictured=40,
    interface=("granularity", "keep_action"),
    serving=("deployment",),
)

# ----------------------------------------------------------------------------- expert placement


_PLACEMENT = Report(
    headline="mean_latency_s",
    heading="latency s",
    higher_is_better=False,
    columns=(
        Column("P99 s", "p99_latency_s", 2, decides=True),
        Column("TTFT s", "mean_ttft_s", 2, decides=True),
        Column("local tokens %", "local_token_ratio", 1, 100),
        Column("local calls %", "local_call_ratio", 1, 100),
        Column("remote layer steps %", "remote_layer_ratio", 1, 100),
        Column("network MB", "network_bytes", 0, 1e-6),
        Column("weights MB", "weight_bytes", 0, 1e-6),
        Column("migrations", "migrations", 1),
        Column("requests", "requests", 0),
    ),
    reported_arguments="scenario model skew epochs epoch_s",
    notes=(
        "latency: mean over the requests of an episode, interquartile mean over episodes "
        "[bootstrap 95 % interval].",
    ),
    describe_action=lambda actions: "migrate" if int(actions["migrate"][0]) else "keep",
    example_policy="prism",
    naive_policy="uniform",
    pictured=6,
    interface=("action_mode",),
    serving=("serving", "cache", "router", "execution", "replica_choice"),
)

# ----------------------------------------------------------------- prefix-cache-aware routing


_PREFIX = Report(
    headline="attainment",
    heading="attainment",
    columns=(
        Column("TTFT met %", "attainment_ttft", 1, 100, decides=True),
        Column("TPOT met %", "attainment_tpot", 1, 100, decides=True),
        Column("TTFT s", "mean_ttft_s", 2),
        Column("P90", "p90_ttft_s", 2),
        Column("P99 TTFT s", "p99_ttft_s", 2, decides=True),
        Column("TPOT ms", "mean_tpot_s", 1, 1e3),
        Column("e2e s", "mean_e2e_s", 2),
        Column("hit %", "hit_rate", 1, 100, decides=True),
        Column("false match %", "false_match_rate", 1, 100),
        Column("preempted", "preemption_rate", 3),
        Column("imbalance", "imbalance", 2),
        Column("goodput/s", "goodput_rps", 2),
    ),
    reported_arguments="scenario workload dispatch rate num_replicas "
    "index scrape_s episode_requests warmup_requests",
    notes=(
        "attainment: share of the requests that are completed within both objectives, "
        "interquartile mean over episodes [bootstrap 95 % interval]. Hits in % of the completed "
        "prompts' tokens, false matches of those that the index named.",
    ),
    describe_action=lambda actions: f"to replica {int(actions[0])}",
    example_policy="lmetric",
    naive_policy="round_robin",
    pictured=800,
    interface=("reward",),
)

_REPORTS = {
    "llm_routing": _ROUTING,
    "serverless_moe": _SERVERLESS,
    "expert_placement": _PLACEMENT,
    "prefix_routing": _PREFIX,
}
