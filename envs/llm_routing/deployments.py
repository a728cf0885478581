"""Fleets after published deployments, as arguments of the environment: ``fleet=NAME``.

Where each number comes from:

- ``a10-4-chat``: RayLLM's published configuration of Llama-2-7b-chat on one A10 a replica
  (ray-project/ray-llm, ``models/continuous_batching/meta-llama--Llama-2-7b-chat-hf.yaml`` at
  3ed0940): vLLM, 64 sequences. Its 4096 tokens an iteration are 2048 here, as far as the timings of
  the card reach. Four cards are those of an AWS g5.12xlarge, whose A10G the A10 stands for.
- ``h100-8``: the eight cards of a DGX H100. 128 sequences and 8192 tokens an iteration are ours:
  half of what vLLM's server took by default for years (256), and the longest iteration that the
  timings of the card cover.
- ``h100-2-a10-4``: the mix of fast and cheap cards that Mélange (arXiv:2404.14527) finds cheapest
  for chat; the counts are ours, the engine's limits those of ``a10-4-chat``.

L is 40 ms/token in all three: the limit of MLPerf Inference v5.0 for interactive Llama 2 70B and
the tight one of Mélange, there for the time per output token. Ours are the places in the waiting
queues (vLLM bounds none), and the rates, about .8 of what the fleet serves within L.
"""

from __future__ import annotations

from typing import Any

_A10, _H100 = "a10-llama-3.1-8b", "h100-llama-3.1-8b"
_LLAMA_2, _LLAMA_3 = "llama-2-7b-chat-hf", "Meta-Llama-3-8B-Instruct"
_ENGINE: dict[str, Any] = {
    "running_capacity": 64,
    "waiting_capacity": 64,
    "prefill_token_budget": 2048,
    "latency_requirement_s": 0.040,
    "scheduler": "chunked_prefill",
    "memory_policy": "paged",
}

DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "a10-4-chat": {**_ENGINE, "profiles": [_A10] * 4, "models": [_LLAMA_2] * 4, "rate": 12.0},
    "h100-8": {
        **_ENGINE,
        "profiles": [_H100] * 8,
        "models": [_LLAMA_3] * 8,
        "running_capacity": 128,
        "waiting_capacity": 128,
        "prefill_token_budget": 8192,
        "rate": 250.0,
    },
    "h100-2-a10-4": {
        **_ENGINE,
        "profiles": [_H100] * 2 + [_A10] * 4,
        "models": [_LLAMA_3] * 2 + [_LLAMA_2] * 4,
        "rate": 55.0,
    },
}
