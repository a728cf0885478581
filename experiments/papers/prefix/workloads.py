"""What the workloads with shared prefixes have to offer a cache, beside what their sources say.

``workload_facts`` counts the recorded prefixes; ``workload_reuse`` says how much of them an
episode holds, by its length and rate; ``workload_load`` compares more load by more sessions with
more load by compressed time; ``workload_sessions`` compares fitted conversations with the recorded
ones::

    python -m servegym.experiments.papers.prefix.workloads
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.prefix_routing.requests import PrefixRequests, infinite_cache_hits
from servegym.envs.prefix_routing.workloads import (
    LLM_D_STAGES,
    Tenants,
    make_prefix_workload,
)
from servegym.envs.workloads.prefix_traces import PrefixTrace, load_prefix_trace
from servegym.experiments.evaluation.stats import student_interval
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import pick

__all__ = ["STUDIES", "lru_hits", "main"]

BLOCK = 512
SEEDS = 10
KV_CACHE_TESTER = "kv-cache-tester, docs/trace_replay_tester.md @19c263b: 642 conversations"
LLM_D = "llm-d, report of the benchmark with eight pods (inference-perf)"
CARD = "dataset card valeriol29/mooncake-traces"
DYNAMO = "Dynamo, benchmarks/data_generator/README.md @1f59718"
REUSE = {
    "mooncake": ("mooncake", {}, (3.4, 10.0, 30.0)),
    "sessions": ("sessions", {}, (3.4, 10.0, 30.0)),
    "agents, at most 131,072 tokens": ("agents", {"max_context": 131_072}, (3.4, 10.0)),
    "tenants": ("tenants", {}, (10.0, 30.0)),
}
LENGTHS = (2_000, 10_000, 40_000)
CAPACITIES = (2_000_000, 5_000_000, 15_000_000, 26_000_000)
LOADS = (1, 2, 5)


def lru_hits(requests: PrefixRequests, capacity_blocks: int) -> float:
    """Share of prompt tokens that one pooled LRU cache holds, requests served in their order.

    A request hits its leading cached blocks, but not the block of its last prompt token, and leaves
    all its blocks in the cache, the first ones as the last used.

    Args:
        requests: The requests.
        capacity_blocks: Blocks that the cache holds.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for j in range(requests.num_requests):
        ids = requests.block_ids(j).tolist()
        lookup = (int(requests.prompt_tokens[j]) - 1) // requests.block_size
        hits += next((k for k in range(lookup) if ids[k] not in cache), lookup)
        for name in reversed(ids):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hits * requests.block_size / float(requests.prompt_tokens.sum(dtype=np.int64))


def per_session(trace: PrefixTrace) -> np.ndarray:
    """Share of blocks that each session's own earlier requests have: float64 (sessions,)."""
    hits = np.bincount(trace.session, trace.shared_tokens // trace.block_size)
    return hits / np.bincount(trace.session, trace.prompt_tokens // trace.block_size)


def _fact(
    workload: str,
    quantity: str,
    here: float,
    source: str = "",
    published: float | str = "",
    tolerance: float = 0.0,
) -> dict[str, Any]:
    verdict = "counted here"
    if published != "":
        verdict = "agrees" if abs(here - float(published)) <= tolerance else "differs"
    return {
        "workload": workload,
        "quantity": quantity,
        "source": source,
        "published": published,
        "here": float(f"{here:.6g}"),
        "verdict": verdict,
    }


def _facts(*_: Any) -> list[dict[str, Any]]:
    """Counts and hit rates of the recorded prefixes."""
    rows: list[dict[str, Any]] = []
    published = {"conversation": 12_031, "synthetic": 3_993}
    for kind, count in published.items():
        name = f"mooncake {kind}"
        trace = load_prefix_trace(f"mooncake-{kind}")
        hits, blocks = trace.recorded_hits()
        follow = trace.after >= 0
        gaps = trace.think_s[follow]
        prompts = trace.prompt_tokens.astype(np.int64)
        rows += [
            _fact(name, "requests", trace.num_requests, CARD, count),
            _fact(name, "mean prompt, tokens", prompts.mean()),
            _fact(name, "mean output, tokens", trace.output_tokens.mean()),
            _fact(name, "different block ids", blocks - hits),
            _fact(name, "blocks an infinite cache holds, %", 100 * hits / blocks),
            _fact(
                name,
                "tokens an infinite cache holds, %",
                100 * trace.shared_tokens.sum() / prompts.sum(),
            ),
            _fact(name, "requests that extend an earlier one, %", 100 * follow.mean()),
            _fact(name, "time between them, median, s", float(np.median(gaps))),
            _fact(name, "time between them, 90 %, s", float(np.percentile(gaps, 90))),
            _fact(name, "requests that repeat an output, %", 100 * trace.repeats_output.mean()),
            _fact(name, "tokens common to all requests", trace.common_tokens),
        ]
        # Dynamo's page counts input_length // 512 ids a request.
        name_of_rest = "requests with an id for the partial last block, %"
        rows.append(_fact(name, name_of_rest, 100.0 * trace.partial_blocks, DYNAMO, 0.0))
    trace = load_prefix_trace("agents")
    hits, blocks = trace.recorded_hits()
    shares = 100 * per_session(trace)
    rows += [
        _fact("agents", "sessions", float(trace.session.max() + 1)),
        _fact("agents", "requests", trace.num_requests),
        _fact("agents", "median prompt, tokens", float(np.median(trace.prompt_tokens))),
        _fact("agents", "blocks a session's cache holds, %", 100 * hits / blocks),
        _fact("agents", "the same, median session, %", np.median(shares), KV_CACHE_TESTER, 96.9, 1),
        _fact("agents", "the same, mean of sessions, %", shares.mean(), KV_CACHE_TESTER, 93.6, 1),
        _fact(
            "agents",
            "the same, 25 % of sessions are below, %",
            float(np.percentile(shares, 25)),
            KV_CACHE_TESTER,
            91.1,
            1,
        ),
    ]
    for limit in (16_384, 32_768, 65_536, 131_072):
        kept = trace.prompt_tokens + trace.output_tokens <= limit
        rows.append(_fact("agents", f"requests of at most {limit:,} tokens, %", 100 * kept.mean()))
    requests = Tenants(stages=LLM_D_STAGES).draw(np.random.default_rng(0), 1500, 1.0, 16, "trace")
    prompts = {tuple(requests.block_ids(j)[:450].tolist()) for j in range(1500)}
    resident = 16 * len({i for prompt in prompts for i in prompt})
    rows += [
        _fact("tenants", "different prompts", len(prompts), LLM_D, 750),
        _fact("tenants", "tokens of all prompts, prefixes once", resident, LLM_D, 1_800_000),
        _fact(
            "tenants",
            "the same, % of eight pods' 307,328 tokens",
            100 * resident / (8 * 307_328),
            LLM_D,
            73.2,
            0.05,
        ),
    ]
    return rows


def _facts_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    share = {row["quantity"]: row["here"] for row in pick(rows, workload="mooncake conversation")}
    differing = [row["quantity"] for row in pick(rows, verdict="differs")]
    yield (
        "Of Mooncake's conversations an infinite cache holds "
        f"{share['blocks an infinite cache holds, %']:.1f} % of the blocks and "
        f"{share['tokens an infinite cache holds, %']:.1f} % of the tokens; "
        f"{share['requests that extend an earlier one, %']:.1f} % of the requests extend an "
        "earlier one."
    )
    yield note(
        f"{len(pick(rows, verdict='agrees'))} published quantities agree; "
        f"{len(differing)} differ: {'; '.join(differing)}.",
        differing=differing,
    )


def _draw(name: str, kwargs: dict[str, Any], seed: int, count: int, rate: float) -> PrefixRequests:
    workload = make_prefix_workload(name, **kwargs)
    return workload.draw(np.random.default_rng(seed), count, rate, BLOCK, "trace")


def _interval(values: Sequence[float]) -> dict[str, float]:
    found = student_interval(values)
    keys = ("hit_percent", "low", "high")
    return {key: float(f"{100 * x:.4g}") for key, x in zip(keys, found, strict=True)}


def _reuse(options: Options, at: Mapping[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens that one pooled infinite cache holds, by rate and length of an episode."""
    name, kwargs, _rates = REUSE[at["workload"]]
    seeds, count = range(options.episodes), at["requests"]
    drawn = [_draw(name, kwargs, seed, count, at["rate"]) for seed in seeds]
    seconds = float(f"{np.mean([r.arrival_s[-1] for r in drawn]):.4g}")
    found = _interval([infinite_cache_hits(r).token_rate for r in drawn])
    return [{**at, "seconds": seconds, "seeds": options.episodes, **found}]


def _reuse_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    text = ", ".join(
        f"{r['hit_percent']:.1f} % [{r['low']:.1f}, {r['high']:.1f}] at {r['rate']:g} requests/s"
        for r in pick(rows, workload="mooncake", requests=LENGTHS[0])
    )
    yield (
        "A short episode has lost most of the reuse before any router decides: of Mooncake's "
        f"prompts a pooled infinite cache holds {text} in episodes of {LENGTHS[0]:,} requests."
    )


def _load(options: Options, at: Mapping[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """Hits of a pooled LRU cache under a multiple of the load."""
    trace, times = load_prefix_trace("mooncake-conversation"), at["load"]
    rate = (trace.num_requests - 1) / float(trace.time_s[-1])
    drawn = [
        _draw("mooncake", {}, seed, times * trace.num_requests, times * rate)
        for seed in range(options.episodes)
    ]
    rows = []
    for capacity in CAPACITIES[:1] if options.quick else CAPACITIES:
        hits = [lru_hits(requests, capacity // BLOCK) for requests in drawn]
        row = {**at, "capacity_tokens": capacity, "seeds": options.episodes}
        rows.append(row | _interval(hits))
    return rows


def _load_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    capacity = rows[-1]["capacity_tokens"]
    texts = {
        row["load"]: f"{row['hit_percent']:.1f} % [{row['low']:.1f}, {row['high']:.1f}]"
        for row in pick(rows, capacity_tokens=capacity)
    }
    yield (
        f"Compressed time flatters a cache. An LRU cache of {capacity / 1e6:g} million tokens "
        f"holds {texts[1]} of Mooncake's prompts, however much their time is compressed, since its "
        "content depends on the order alone; with five times the sessions it holds "
        f"{texts[5]}."
    )


def _sessions(options: Options, *_: Any) -> list[dict[str, Any]]:
    """An hour of fitted conversations beside the recorded one."""
    trace = load_prefix_trace("mooncake-conversation")
    root = np.arange(trace.num_requests)
    for j in np.flatnonzero(trace.after >= 0):
        root[j] = root[trace.after[j]]
    # Sessions that begin with fewer than two full blocks cannot be followed and are not fitted.
    followed = trace.prompt_tokens[root] >= 2 * BLOCK
    prompt = trace.prompt_tokens[followed].astype(np.int64)
    recorded = {
        "requests that are no first turn, %": 100 * (trace.after[followed] >= 0).mean(),
        "mean prompt, tokens": prompt.mean(),
        "median prompt, tokens": np.median(prompt),
        "mean output, tokens": trace.output_tokens[followed].mean(),
        "tokens an infinite cache holds, %": 100
        * (np.minimum(trace.stream_shared()[followed], prompt - 1) // BLOCK * BLOCK).sum()
        / prompt.sum(),
    }
    rate = int(followed.sum()) / float(trace.time_s[-1])
    count = 1000 if options.quick else int(followed.sum())
    drawn = [_draw("sessions", {}, seed, count, rate) for seed in range(options.episodes)]
    found: dict[str, list[float]] = {name: [] for name in recorded}
    for requests in drawn:
        first: Any = np.unique(requests.session, return_index=True)[1]
        values = (
            100 * (1 - len(first) / requests.num_requests),
            requests.prompt_tokens.mean(dtype=np.float64),
            np.median(requests.prompt_tokens),
            requests.output_tokens.mean(),
            100 * infinite_cache_hits(requests).token_rate,
        )
        for name, value in zip(found, values, strict=True):
            found[name].append(float(value))
    return [
        {
            "quantity": name,
            "recorded": float(f"{recorded[name]:.5g}"),
            **dict(
                zip(
                    ("drawn", "low", "high"),
                    (float(f"{x:.5g}") for x in student_interval(found[name])),
                    strict=True,
                )
            ),
            "seeds": options.episodes,
        }
        for name in recorded
    ]


def _sessions_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    text = "; ".join(
        f"{r['quantity']}: {r['drawn']:,.5g} [{r['low']:,.5g}, {r['high']:,.5g}], recorded "
        f"{r['recorded']:,.5g}"
        for r in rows
    )
    yield f"An hour of fitted conversations: {text}."


def _settings(options: Options) -> dict[str, Any]:
    return {"block_size": BLOCK, "dispatch": "trace"}


STUDIES = (
    Study("workload_facts", "facts", _facts, notes=_facts_notes),
    Study(
        "workload_reuse",
        "reuse",
        _reuse,
        lambda options: [
            {"workload": label, "rate": rate, "requests": count}
            for label, (_, _, rates) in REUSE.items()
            for rate in rates
            for count in (LENGTHS[:1] if options.quick else LENGTHS)
        ],
        notes=_reuse_notes,
        facts=_settings,
    ),
    Study(
        "workload_load",
        "load",
        _load,
        lambda options: [{"load": times} for times in LOADS],
        notes=_load_notes,
        facts=_settings,
    ),
    Study("workload_sessions", "sessions", _sessions, notes=_sessions_notes),
)

main = command(__spec__.name, __doc__, STUDIES, SEEDS)

if __name__ == "__main__":
    run_main(main)
