"""Latency of placements on the paper's testbed: Tables I and II, Fig. 5 and Fig. 6 of Prism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.expert_placement.cluster import scenario_cluster
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.simulator import Requests, Simulator
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.placement.claims import CLAIMS
from servegym.experiments.papers.placement.measuring import (
    SEED,
    add_change,
    drive,
    findings,
    interval,
    local_shares,
    measure,
)
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.study import Options, Study, command, ends
from servegym.experiments.papers.verdicts import found_for, split

Row = dict[str, Any]
Rows = Sequence[Row]
POLICIES = (
    "uniform",
    "redundance",
    "smartmoe",
    "eplb",
    "eplb_global",
    "prism",
    "prism_printed",
    "proxy_optimum",
    "whole_layer",
)
MODELS = {"DeepSeek-V2-Lite": "deepseek-v2-lite", "Mixtral-8x7B": "mixtral-8x7b"}
# 200 requests of each server, as in the paper's Fig. 7, rounded up to whole epochs.
WORKLOADS = {"BigBench": ("paper_testbed", 7), "MultiData": ("paper_testbed_multi", 14)}
_METHODS = ("uniform", "redundance", "smartmoe", "eplb_global", "prism")
_PRINTED = {
    ("BigBench", "DeepSeek-V2-Lite"): (21.66, 13.08, 19.39, 9.56, 6.63),
    ("BigBench", "Mixtral-8x7B"): (5.08, 4.85, 2.30, 2.16, 2.09),
    ("MultiData", "DeepSeek-V2-Lite"): (30.65, 17.70, 29.77, 14.93, 13.29),
    ("MultiData", "Mixtral-8x7B"): (10.92, 9.90, 11.85, 9.36, 9.17),
}
PAPER = {key: dict(zip(_METHODS, row, strict=True)) for key, row in _PRINTED.items()}
"""Table II as printed: (workload, model) -> method -> mean seconds of all servers.

Its EPLB was made for clusters of unlike servers, so that it is compared with ``eplb_global``.
"""


def _skews(options: Options) -> tuple[str, ...]:
    return ("measured",) if options.quick else ("measured", "paper")


TABLE1 = {"moe_infinity": 5.19, "moe_infinity_lb": 5.03, "uniform": 4.11}
"""Means of Table I as printed, Mixtral-8x7B; "naive collaboration" is ``uniform``."""
PCIE_GB_S = (12, 16, 24)
"""Host channel of a GPU: the default, and faster ones."""


def _channels(options: Options) -> list[Row]:
    return [
        {"model": "mixtral-8x7b", "skew": skew, "pcie_gb_s": speed}
        for skew in _skews(options)
        for speed in ends(options, PCIE_GB_S)
    ]


def _table1(options: Options, at: Row, policies: Sequence[str]) -> Rows:
    """Servers that fetch experts from their own memory against servers that share experts."""
    kwargs: Row = {"scenario": "paper_testbed", "model": at["model"], "skew": at["skew"]}
    kwargs |= {"epochs": 1 if options.quick else 7}
    kwargs |= {"cluster_kwargs": {"pcie_bytes_s": at["pcie_gb_s"] * 1e9}}
    rows = measure(at, policies, options.episodes, **kwargs)
    by = {row["policy"]: row for row in rows}
    for rival in ("moe_infinity", "moe_infinity_lb"):
        add_change(by["uniform"], by[rival], rival)
    return rows


def _draw_table1(rows: Sequence[Mapping[str, Any]]) -> Any:
    look: dict[str, Any] = {"log": "y", "reference": "paper_mean_s"}
    picture = Bars(x="policy", y="mean_latency_s", line="pcie_gb_s", panels="skew", **look)
    return picture([{**row, "paper_mean_s": TABLE1[row["policy"]]} for row in rows])


def _parts(options: Options) -> list[Row]:
    return [
        {"workload": workload, "model": model, "skew": skew}
        for workload in WORKLOADS
        for model in MODELS
        for skew in _skews(options)
    ]


def _table2(options: Options, at: Row, policies: Sequence[str]) -> Rows:
    """Latency per server and over all requests, every policy, both models and workloads."""
    scenario, epochs = WORKLOADS[at["workload"]]
    kwargs: Row = {"scenario": scenario, "model": MODELS[at["model"]], "skew": at["skew"]}
    rows = measure(at, policies, options.episodes, **kwargs, epochs=1 if options.quick else epochs)
    for row in rows:
        row["paper_mean_s"] = PAPER[at["workload"], at["model"]].get(row["policy"], float("nan"))
        row["ratio_to_paper"] = row["mean_latency_s"] / row["paper_mean_s"]
    by = {row["policy"]: row for row in rows}
    add_change(by["prism"], by["eplb_global"], "eplb_global")
    return rows


def layer_times(share: float, seed: int, messages: str, count: int) -> dict[str, float]:
    """Means of a layer where a share of each layer's experts, 0 to 1, is on another server.

    So many requests of the first server's task come to it one at a time: none waits for another.
    ``prefill_ms`` and ``decode_ms``, and ``remote_calls``, the share of calls.
    """
    problem = build_problem(scenario="paper_testbed", split="eval")
    size = problem.cluster.layers * problem.cluster.experts
    cluster = scenario_cluster("paper_testbed", messages=messages, slots=[size] * 4)
    rng = np.random.default_rng(seed)
    z = np.ones((4, cluster.layers, cluster.experts), dtype=np.uint8)
    away = round(share * cluster.experts)
    for layer in range(cluster.layers):
        z[0, layer, rng.permutation(cluster.experts)[:away]] = 0
    requests = Requests(
        home=np.zeros(count, dtype=np.int64),
        arrival=1000.0 * np.arange(count),
        prompt=rng.choice(problem.rows[0], count),
        outputs=np.full(count, 20),
        offset=rng.integers(0, 1 << 16, count),
    )
    simulator = Simulator(cluster, problem.prompts)
    simulator.begin(requests, z)
    simulator.run()
    request, server = simulator.state.request, simulator.state.server[0]
    first = request["first"] - requests.arrival
    rest = request["finish"] - request["first"]
    calls = int(server["all_local_calls"]) + int(server["all_remote_calls"])
    return {
        "prefill_ms": 1e3 * float(first.mean()) / cluster.layers,
        "decode_ms": 1e3 * float(rest.mean()) / (19 * cluster.layers),
        "remote_calls": int(server["all_remote_calls"]) / calls,
    }


def _shares(options: Options) -> list[Row]:
    return [
        {"messages": messages, "remote_share": float(share)}
        for messages in ("per_expert", "per_server")
        for share in ends(options, tuple(np.arange(9) / 8))
    ]


def _fig5(options: Options, at: Row, _: Sequence[str]) -> Rows:
    """Time of a layer against the share of its experts that are remote, nothing queued."""
    share, messages = at["remote_share"], at["messages"]
    runs = [layer_times(share, SEED + s, messages, 40) for s in range(options.episodes)]
    row = dict(at)
    for key in runs[0]:
        row |= interval([run[key] for run in runs], key)
    return [row]


def _fig5_notes(options: Options, rows: Rows) -> Iterator[Note]:
    for at, part in split(rows, "messages"):
        ratio = {s: part[-1][f"{s}_ms"] / part[0][f"{s}_ms"] for s in ("prefill", "decode")}
        yield note(
            f"Messages {at['messages']}: with all experts remote a layer takes "
            f"{ratio['prefill']:.0f} x the time with none in prefill, {ratio['decode']:.0f} x in "
            "decoding.",
            **at,
            ratio=ratio,
        )


LOCAL_POLICIES = ("uniform", "redundance", "smartmoe", "eplb_global", "prism", "proxy_optimum")


def _fig6(options: Options, at: Row, policies: Sequence[str]) -> Iterator[Row]:
    """Share of tokens and calls served where they arrive, over time."""
    scenario, epochs = WORKLOADS[at["workload"]]
    kwargs: Row = {"scenario": scenario, "model": MODELS[at["model"]]}
    kwargs["epochs"] = 2 if options.quick else epochs
    for policy in policies:
        runs = [
            drive(kwargs, policy, SEED + s, 5, pooled_start=True)[1]
            for s in range(options.episodes)
        ]
        for looks in zip(*runs, strict=True):
            row = {**at, "policy": policy, "minute": looks[0]["end_s"] / 60}
            adopted = float(np.mean([look["adopted"] for look in looks]))
            yield row | local_shares(looks) | {"adopted": adopted}


STUDIES = (
    Study(
        "table1_pcie",
        "table1",
        _table1,
        _channels,
        tuple(TABLE1),
        findings("table1_pcie", "skew", "pcie_gb_s", "policy"),
        _draw_table1,
    ),
    Study(
        "table2_latency",
        "table2",
        _table2,
        _parts,
        lambda options, at: POLICIES,
        findings("table2_latency", "workload", "model", "skew", "policy"),
        Bars(
            x="policy",
            y="mean_latency_s",
            line="skew",
            panels=("workload", "model"),
            log="y",
            reference="paper_mean_s",
        ),
    ),
    Study(
        "fig5_layer_time",
        "fig5",
        _fig5,
        _shares,
        (),
        _fig5_notes,
        Lines(x="remote_share", y=("prefill_ms", "decode_ms"), line="messages"),
    ),
    Study(
        "fig6_local_ratio",
        "fig6",
        _fig6,
        lambda options: [{"workload": w, "model": m} for w in WORKLOADS for m in MODELS],
        LOCAL_POLICIES,
        found_for(CLAIMS, "fig6_local_ratio"),
        Lines(
            x="minute",
            y=("local_tokens", "local_calls"),
            line="policy",
            panels=("workload", "model"),
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=8)

if __name__ == "__main__":
    run_main(main)
