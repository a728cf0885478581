"""Latency of placements on the paper's testbed: Tables I and II, Fig. 5 and Fig. 6 of Prism.

``table1`` compares servers that fetch experts on their own with servers that share them; ``table2``
runs every policy on both models and both workloads; ``fit`` looks for the cost of a
message at which the published column of one of them comes out best; ``fig5`` sends single requests
through layers of which a given share of experts is remote; ``fig6`` follows the share of work that
is served where it arrives.
"""

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
from servegym.experiments.papers.placement.common import (
    SEED,
    change,
    compared,
    drive,
    growing,
    interval,
    local_shares,
    measure,
    setting,
)
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.study import Options, Study, command, ends, interval_columns
from servegym.experiments.papers.verdicts import found_for, pick, split

__all__ = ["PAPER", "STUDIES", "layer_times", "main"]

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
    "latency_dp",
)
MODELS = {"DeepSeek-V2-Lite": "deepseek-v2-lite", "Mixtral-8x7B": "mixtral-8x7b"}
# 200 requests of each server, as in the paper's Fig. 7, rounded up to whole epochs.
WORKLOADS = {"BigBench": ("paper_testbed", 7), "MultiData": ("paper_testbed_multi", 14)}
_METHODS = ("uniform", "redundance", "smartmoe", "eplb_global", "prism")
_PRINTED = {
    ("BigBench", "DeepSeek-V2-Lite"): (
        (48.55, 17.28, 9.43, 21.66),
        (25.88, 13.77, 4.79, 13.08),
        (40.28, 16.43, 9.51, 19.39),
        (23.93, 7.08, 3.12, 9.56),
        (14.67, 5.85, 2.49, 6.63),
    ),
    ("BigBench", "Mixtral-8x7B"): (
        (6.44, 6.04, 3.44, 5.08),
        (5.96, 6.16, 3.07, 4.85),
        (3.76, 1.59, 2.03, 2.30),
        (3.60, 1.53, 1.82, 2.16),
        (3.52, 1.57, 1.67, 2.09),
    ),
    ("MultiData", "DeepSeek-V2-Lite"): (
        (24.85, 30.63, 36.48, 30.65),
        (15.96, 24.76, 12.36, 17.70),
        (23.68, 30.41, 35.21, 29.77),
        (16.36, 19.07, 9.35, 14.93),
        (13.96, 16.72, 9.20, 13.29),
    ),
    ("MultiData", "Mixtral-8x7B"): (
        (9.20, 10.26, 13.31, 10.92),
        (8.28, 10.32, 11.08, 9.90),
        (9.82, 11.89, 13.84, 11.85),
        (8.69, 9.52, 9.89, 9.36),
        (8.30, 9.80, 9.41, 9.17),
    ),
}
PAPER: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {
    key: dict(zip(_METHODS, rows, strict=True)) for key, rows in _PRINTED.items()
}
"""Table II as printed: (workload, model) -> method -> seconds of servers 1, 2, 3 and of all.

Its EPLB was made for clusters of unlike servers, so that it is compared with ``eplb_global``.
"""
CLAIMED = {
    ("BigBench", "DeepSeek-V2-Lite"): "-30.6 %",
    ("BigBench", "Mixtral-8x7B"): "a slight but consistent improvement (-3.2 % by the table)",
    ("MultiData", "DeepSeek-V2-Lite"): "-10.9 %",
    ("MultiData", "Mixtral-8x7B"): "-2.0 %",
}


def _skews(options: Options) -> tuple[str, ...]:
    return ("measured",) if options.quick else ("measured", "paper")


def _policy(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next(row for row in rows if row["policy"] == name)


# -------------------------------------------------------------------------------------- Table I


TABLE1 = {
    "moe_infinity": (9.14, 4.77, 3.18, 5.19),
    "moe_infinity_lb": (8.60, 4.77, 3.10, 5.03),
    "uniform": (4.96, 4.34, 3.40, 4.11),
}
"""Table I as printed, Mixtral-8x7B; "naive collaboration" is ``uniform``."""
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
    sharing = _policy(rows, "uniform")
    for rival in ("moe_infinity", "moe_infinity_lb"):
        found = change(sharing["_latency"], _policy(rows, rival)["_latency"])
        sharing |= interval_columns(f"change_pct_{rival}", found)
    return rows


def _table1_notes(options: Options, rows: Rows) -> Iterator[Note]:
    paper = {"uniform": -20.8, "moe_infinity_lb": -3.1}
    for at, own in split(rows, "skew", "pcie_gb_s"):
        speed = at["pcie_gb_s"]
        place = (
            f"{at['skew']} skew, PCIe {speed} GB/s (a fetch of 352 MB takes {352 / speed:.0f} ms)"
        )
        fetching = _policy(own, "moe_infinity")
        for name in paper:
            one = _policy(own, name)
            yield note(
                f"{place}: {name} against moe_infinity: mean latency {compared(one, fetching)} "
                f"(paper {paper[name]} %).",
                **at,
                policy=name,
                change_pct=list(change(one["_latency"], fetching["_latency"])),
            )
        servers = [
            f"{row['policy']} "
            + " / ".join(f"{row[f'mean_latency_s_server_{n}']:.1f}" for n in range(3))
            for row in own
        ]
        yield f"{place}: mean latency in s on servers 1 / 2 / 3: {', '.join(servers)}."
    yield (
        "The paper has on servers 1 / 2 / 3: moe_infinity 9.14 / 4.77 / 3.18, moe_infinity_lb "
        "8.60 / 4.77 / 3.10, uniform 4.96 / 4.34 / 3.40. What sharing is worth depends on the "
        "speed of the host channel, which the paper does not give: the default is 12 GB/s."
    )


def _draw_table1(rows: Sequence[Mapping[str, Any]]) -> Any:
    picture = Bars(
        x="policy",
        y="mean_latency_s",
        line="pcie_gb_s",
        panels="skew",
        log="y",
        reference="paper_mean_s",
    )
    return picture([{**row, "paper_mean_s": TABLE1[row["policy"]][3]} for row in rows])


# ------------------------------------------------------------------------------------- Table II


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
        cells = PAPER[at["workload"], at["model"]].get(row["policy"], (float("nan"),) * 4)
        names = (*(f"paper_server_{n}_s" for n in (1, 2, 3)), "paper_mean_s")
        row |= dict(zip(names, cells, strict=True))
        row["ratio_to_paper"] = row["mean_latency_s"] / cells[3]
    prism, eplb = _policy(rows, "prism"), _policy(rows, "eplb_global")
    found = change(prism["_latency"], eplb["_latency"])
    prism |= interval_columns("change_pct_eplb_global", found)
    return rows


def _table2_notes(options: Options, rows: Rows) -> Iterator[Note]:
    """Each part against the paper's: gain over EPLB, size, order and the fastest."""
    for at, part in split(rows, "workload", "model", "skew"):
        here = f"{at['workload']}, {at['model']}, {at['skew']} skew"
        key = at["workload"], at["model"]
        own = {row["policy"]: row["mean_latency_s"] for row in part}
        printed = {name: cells[3] for name, cells in PAPER[key].items()}
        ratios = {name: own[name] / seconds for name, seconds in printed.items()}
        inside = sum(0.7 <= ratio <= 1.3 for ratio in ratios.values())
        mine, theirs = (sorted(printed, key=table.__getitem__) for table in (own, printed))
        best, prism = min(own, key=own.__getitem__), _policy(part, "prism")
        for rival, claim in (
            ("eplb_global", f" (the paper claims {CLAIMED[key]} against its EPLB)"),
            ("eplb", ""),
        ):
            found = compared(prism, _policy(part, rival))
            yield note(f"{here}: prism against {rival}: mean latency {found}{claim}.", place=here)
        sizes = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        yield note(
            f"{here}: our mean latency over the paper's: {sizes}; {inside} of {len(ratios)} are "
            "within 30 %.",
            place=here,
            ratio_to_paper=ratios,
            within_30_pct=inside,
        )
        order = "the same order" if mine == theirs else "another order"
        yield note(
            f"{here}: {order} as in the paper: {' < '.join(mine)}; the paper: "
            f"{' < '.join(theirs)}.",
            place=here,
            order=mine,
            same_order=mine == theirs,
        )
        found = compared(_policy(part, best), prism)
        text = f"{here}: {best} is fastest of all, {found} against prism."
        yield note(text, place=here, fastest=best)
    yield growing(rows, "workload", "model", "skew", "policy")
    yield (
        "Means over episodes of about 200 requests a server, with Student's 95 % intervals over "
        "episodes; 'mean of servers' weighs servers alike, the mean latency requests alike."
    )


def _table2_facts(options: Options) -> Row:
    return {
        f"{workload}, {model}": setting(scenario=scenario, model=name)
        for workload, (scenario, _) in WORKLOADS.items()
        for model, name in MODELS.items()
    }


# --------------------------------------------------------------------- the cost of a message, h


_FITTED = PAPER["BigBench", "DeepSeek-V2-Lite"]


def _fit(options: Options, at: Row, policies: Sequence[str]) -> Rows:
    """Latency of the five published methods against the cost of a message."""
    kwargs = {
        "scenario": "paper_testbed",
        "epochs": 1 if options.quick else 7,
        "split": "train",
        "cluster_kwargs": {"message_cost_s": at["h_ms"] * 1e-3},
    }
    rows = measure(at, policies, options.episodes, **kwargs)
    logs = [np.log(row["mean_latency_s"] / _FITTED[row["policy"]][3]) for row in rows]
    error = float(np.sqrt(np.mean(np.square(logs))))
    return [row | {"rms_log_ratio": error} for row in rows]


def _fit_notes(options: Options, rows: Rows) -> Iterator[Note]:
    errors = {row["h_ms"]: row["rms_log_ratio"] for row in rows}
    best = min(errors, key=errors.__getitem__)
    ratios = [
        f"{row['policy']} {row['mean_latency_s'] / _FITTED[row['policy']][3]:.2f}"
        for row in pick(rows, h_ms=best)
    ]
    yield note(
        f"A message cost h of {best:g} ms fits the paper's BigBench column of DeepSeek-V2-Lite "
        f"best: root mean square of log ratios {errors[best]:.3f}, our latency over the paper's "
        f"{', '.join(ratios)}.",
        h_ms=best,
        rms_log_ratio=errors[best],
    )
    yield (
        "Root mean square of log ratios by h: "
        + ", ".join(f"{h:g} ms {error:.3f}" for h, error in errors.items())
        + ". One number is fitted to five, on prompts of the train split."
    )


# --------------------------------------------------------------------------------------- Fig. 5


def layer_times(share: float, seed: int, messages: str, count: int) -> dict[str, float]:
    """Seconds of a layer where a share of each layer's experts is on another server.

    Requests of the first server's task come one at a time to it, so that none waits for another.

    Args:
        share: Remote share of the experts of each layer, 0..1.
        seed: Of the experts and the requests.
        messages: ``per_expert`` or ``per_server``.
        count: Number of requests.

    Returns:
        ``prefill_ms`` and ``decode_ms``, mean time of a layer; ``remote_calls``, share of calls.
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
        row |= interval([found[key] for found in runs], key)
    return [row]


def _fig5_notes(options: Options, rows: Rows) -> Iterator[Note]:
    for at, part in split(rows, "messages"):
        first, last = part[0], part[-1]
        ratio = {s: last[f"{s}_ms"] / first[f"{s}_ms"] for s in ("prefill", "decode")}
        grows = [
            f"{s} {first[f'{s}_ms']:.2f} to {last[f'{s}_ms']:.2f} ms ({times:.0f} x)"
            for s, times in ratio.items()
        ]
        text = f"Messages {at['messages']}, time of a layer from all experts local to all remote: "
        yield note(f"{text}{', '.join(grows)}.", **at, ratio=ratio)
    if not options.quick:
        eighth, end = (
            pick(rows, messages="per_expert", remote_share=share)[0] for share in (0.125, 1.0)
        )
        part = eighth["decode_ms"] / end["decode_ms"]
        yield note(
            f"The sharp rise of the paper's Fig. 5 is there: with an eighth of the experts remote "
            f"a decode step's layer already takes {100 * part:.0f} % of the time with all remote "
            "(per_expert), because one remote call is enough to wait for.",
            eighth_over_all=part,
        )


# --------------------------------------------------------------------------------------- Fig. 6


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
        _table1_notes,
        _draw_table1,
        facts=lambda options: {
            "setting": setting(scenario="paper_testbed", model="mixtral-8x7b"),
        },
    ),
    Study(
        "table2_latency",
        "table2",
        _table2,
        _parts,
        lambda options, at: POLICIES,
        _table2_notes,
        Bars(
            x="policy",
            y="mean_latency_s",
            line="skew",
            panels=("workload", "model"),
            log="y",
            reference="paper_mean_s",
        ),
        facts=_table2_facts,
    ),
    Study(
        "table2_message_cost",
        "fit",
        _fit,
        lambda options: [
            {"h_ms": h} for h in ends(options, (0.5, 0.75, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75))
        ],
        tuple(_FITTED),
        _fit_notes,
        Lines(x="h_ms", y=("mean_latency_s", "rms_log_ratio"), line="policy", log="y"),
        facts=lambda options: {"setting": setting(scenario="paper_testbed", split="train")},
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
