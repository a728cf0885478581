"""Named settings of a prefix-routing environment, as its arguments: ``scenario=NAME``.

`docs/prefix-routing.md` says what they are. Rates are ours: about where the best published rule
begins to miss the objectives. The warm-up is long where prefixes come again late.
"""

from __future__ import annotations

from typing import Any

_8B = "llama-3.1-8b"
_H100 = {"card": "h100", "model": _8B}
_A100 = {"card": "a100-80g", "model": _8B}
_L40S = {"card": "l40s", "model": _8B}
_TENANTS: dict[str, Any] = {
    "groups": 100,
    "users": 20,
    "prefix_tokens": 6000,
    "question_tokens": [200, 2000],
    "output_tokens": [50, 500],
    "questions": "fresh",
    "order": "random",
}

SCENARIOS: dict[str, dict[str, Any]] = {
    # llm-d's benchmark with eight pods (inference-perf's report in llm-d-kv-cache-manager).
    "llm-d-8": {
        "workload": "tenants",
        "profiles": {"card": "h100", "model": "qwen3-32b", "tp": 2},
        "kv_tokens": 307_328,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "block_size": 64,
        "slo": {"ttft_s": 1.0, "tpot_s": 0.1},
        "rate": 15.0,
    },
    "chat": {"workload": "sessions", "rate": 9.0, "warmup_requests": 4000},
    "agents": {"workload": "agents", "rate": 1.0, "warmup_requests": 2000},
    "mooncake": {"workload": "mooncake", "rate": 10.0, "warmup_requests": 4000},
    "hot-tenant": {
        "workload": "tenants",
        "workload_kwargs": {**_TENANTS, "hot_factor": 10.0},
        "rate": 60.0,
    },
    "drift": {
        "workload": "tenants",
        "workload_kwargs": {**_TENANTS, "skew": 1.0, "drift_s": 60.0},
        "rate": 58.0,
    },
    # The simulation that issue 709 of the Gateway API inference extension asks for, up to a full KV
    # memory: all of an H100's is filled to 14 % by 256 sequences of ShareGPT's lengths.
    "gie-709": {
        "workload": "tenants",
        "workload_kwargs": {
            "groups": 1,
            "users": 1,
            "prefix_tokens": 0,
            "question_tokens": "sharegpt",
            "output_tokens": "sharegpt",
            "questions": "fresh",
            "order": "random",
        },
        "num_replicas": 6,
        "max_num_seqs": 256,
        "kv_tokens": 40_000,
        "rate": 300.0,
        "warmup_requests": 3000,
    },
    "mixed-cards": {
        "workload": "tenants",
        "workload_kwargs": _TENANTS,
        "profiles": [_H100] * 4 + [_A100] * 2 + [_L40S] * 2,
        "rate": 30.0,
    },
}
