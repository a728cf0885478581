"""The recorded prefixes counted, beside what their sources say of them: ``workload_facts``.

::

    python -m servegym.experiments.papers.prefix.workloads
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.prefix_routing.workloads import LLM_D_STAGES, Tenants
from servegym.envs.workloads.prefix_traces import PrefixTrace, load_prefix_trace
from servegym.experiments.papers.prefix.claims import CLAIMS
from servegym.experiments.papers.study import Study, command
from servegym.experiments.papers.verdicts import found_for

KV_CACHE_TESTER = "kv-cache-tester, docs/trace_replay_tester.md @19c263b: 642 conversations"
LLM_D = "llm-d, report of the benchmark with eight pods (inference-perf)"
CARD = "dataset card valeriol29/mooncake-traces"
DYNAMO = "Dynamo, benchmarks/data_generator/README.md @1f59718"


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
        prompts, shared = trace.prompt_tokens.astype(np.int64), trace.shared_tokens.sum()
        rows += [
            _fact(name, "requests", trace.num_requests, CARD, count),
            _fact(name, "mean prompt, tokens", prompts.mean()),
            _fact(name, "mean output, tokens", trace.output_tokens.mean()),
            _fact(name, "different block ids", blocks - hits),
            _fact(name, "blocks an infinite cache holds, %", 100 * hits / blocks),
            _fact(name, "tokens an infinite cache holds, %", 100 * shared / prompts.sum()),
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
    low = float(np.percentile(shares, 25))
    rows += [
        _fact("agents", "sessions", float(trace.session.max() + 1)),
        _fact("agents", "requests", trace.num_requests),
        _fact("agents", "median prompt, tokens", float(np.median(trace.prompt_tokens))),
        _fact("agents", "blocks a session's cache holds, %", 100 * hits / blocks),
        _fact("agents", "the same, median session, %", np.median(shares), KV_CACHE_TESTER, 96.9, 1),
        _fact("agents", "the same, mean of sessions, %", shares.mean(), KV_CACHE_TESTER, 93.6, 1),
        _fact("agents", "the same, 25 % of sessions are below, %", low, KV_CACHE_TESTER, 91.1, 1),
    ]
    for limit in (16_384, 32_768, 65_536, 131_072):
        short = trace.prompt_tokens + trace.output_tokens <= limit
        rows.append(_fact("agents", f"requests of at most {limit:,} tokens, %", 100 * short.mean()))
    requests = Tenants(stages=LLM_D_STAGES).draw(np.random.default_rng(0), 1500, 1.0, 16, "trace")
    prompts = {tuple(requests.block_ids(j)[:450].tolist()) for j in range(1500)}
    resident = 16 * len({i for prompt in prompts for i in prompt})
    share = 100 * resident / (8 * 307_328)
    return [
        *rows,
        _fact("tenants", "different prompts", len(prompts), LLM_D, 750),
        _fact("tenants", "tokens of all prompts, prefixes once", resident, LLM_D, 1_800_000),
        _fact("tenants", "the same, % of eight pods' 307,328 tokens", share, LLM_D, 73.2, 0.05),
    ]


STUDIES = (Study("workload_facts", "facts", _facts, notes=found_for(CLAIMS, "workload_facts")),)

main = command(__spec__.name, __doc__, STUDIES, 1)

if __name__ == "__main__":
    run_main(main)
