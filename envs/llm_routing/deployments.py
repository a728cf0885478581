"""Fleets after published deployments, as arguments of the environment: ``fleet=NAME``."""

from __future__ import annotations

from typing import Any

_ENGINE = {"scheduler": "chunked_prefill", "memory_policy": "paged"}

DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "a10-4-chat": {
        "profiles": ["a10-llama-3.1-8b"] * 4,
        "models": ["llama-2-7b-chat-hf"] * 4,
        "running_capacity": 64,
        "waiting_capacity": 64,
        "prefill_token_budget": 2048,
        "latency_requirement_s": 0.040,
        "rate": 8.0,
        **_ENGINE,
    },
    "h100-8": {
        "profiles": ["h100-llama-3.1-8b"] * 8,
        "models": ["Meta-Llama-3-8B-Instruct"] * 8,
        "running_capacity": 128,
        "waiting_capacity": 128,
        "prefill_token_budget": 8192,
        "latency_requirement_s": 0.030,
        "rate": 300.0,
        **_ENGINE,
    },
    "h100-2-a10-4": {
        "profiles": ["h100-llama-3.1-8b"] * 2 + ["a10-llama-3.1-8b"] * 4,
        "models": ["Meta-Llama-3-8B-Instruct"] * 2 + ["llama-2-7b-chat-hf"] * 4,
        "running_capacity": 64,
        "waiting_capacity": 64,
        "prefill_token_budget": 2048,
        "latency_requirement_s": 0.040,
        "rate": 60.0,
        **_ENGINE,
    },
}
