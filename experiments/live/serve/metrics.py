"""What a simulated server counts, in Prometheus' text format with vLLM's names.

Names, labels and buckets are those of vLLM 0.32 (``vllm/v1/metrics``).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from servegym.envs.prefix_routing.live import LiveEngine

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_TTFT += (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_ITL += (10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_LATENCY += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)


def _steps(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to a number of tokens."""
    steps = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


_GAUGES = {
    "num_requests_running": "Requests that run.",
    "num_requests_waiting": "Requests that wait.",
    "kv_cache_usage_perc": "Share of the KV cache in use, 1 means all.",
}
_COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Preemptions of requests.",
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens generated.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": (_TTFT, "Seconds to the first token."),
    "inter_token_latency_seconds": (_ITL, "Seconds between tokens."),
    "request_time_per_output_token_seconds": (_ITL, "Seconds a token after the first, by request."),
    # The name of vLLM before 0.11, which gateways still read.
    "time_per_output_token_seconds": (_ITL, "Seconds between tokens."),
    "e2e_request_latency_seconds": (_LATENCY, "Seconds from end to end."),
    "request_queue_time_seconds": (_LATENCY, "Seconds in the queue."),
    "request_inference_time_seconds": (_LATENCY, "Seconds in execution."),
    "request_prefill_time_seconds": (_LATENCY, "Seconds from admission to a token."),
    "request_decode_time_seconds": (_LATENCY, "Seconds from first to last token."),
    "request_prompt_tokens": ((), "Tokens of a request's prompt."),
    "request_generation_tokens": ((), "Tokens of a request's answer."),
}
"""Name -> upper ends of the buckets, none for steps up to the context, and help."""
_CACHE = 'enable_prefix_caching="True",prefix_caching_hash_algo="blake2b"'


class ServerMetrics:
    """Counters of a server since its start; times are those of the wall clock, seconds.

    Args:
        model: The model's name.
        context: Most tokens of a request.

    Attributes:
        ended: Requests that ended, by reason.
        total: Counters by name.
    """

    def __init__(self, model: str, context: int) -> None:
        self._labels = f'engine="0",model_name={json.dumps(model, ensure_ascii=False)}'
        self.ended: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.total: Counter[str] = Counter()
        steps = _steps(context)
        self._bounds = {name: bounds or steps for name, (bounds, _) in _HISTOGRAMS.items()}
        self._counts = {name: [0] * (len(bounds) + 1) for name, bounds in self._bounds.items()}
        self._sums = dict.fromkeys(_HISTOGRAMS, 0.0)

    def observe(self, **values: float) -> None:
        """Count a value in the histogram of each name."""
        for name, value in values.items():
            self._counts[name][bisect_left(self._bounds[name], value)] += 1
            self._sums[name] += value

    def text(self, engine: LiveEngine, lag_s: float) -> str:
        """All of it, of an engine whose tokens leave so late."""
        labels = self._labels
        lines: list[str] = []

        def add(name: str, kind: str, what: str, samples: Sequence[str]) -> None:
            lines.extend([f"# HELP vllm:{name} {what}", f"# TYPE vllm:{name} {kind}", *samples])

        now = engine.running, engine.waiting, engine.kv_usage
        for (name, what), value in zip(_GAUGES.items(), now, strict=True):
            add(name, "gauge", what, [f"vllm:{name}{{{labels}}} {float(value)!r}"])
        for name, what in _COUNTERS.items():
            sample = f"vllm:{name}_total{{{labels}}} {float(self.total[name])!r}"
            add(f"{name}_total", "counter", what, [sample])
        ended = [
            f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(n)!r}'
            for reason, n in self.ended.items()
        ]
        add("request_success_total", "counter", "Requests that ended, by reason.", ended)
        for name, (_, what) in _HISTOGRAMS.items():
            totals = [float(total) for total in accumulate(self._counts[name])]
            ends = [*map(repr, self._bounds[name]), "+Inf"]
            samples = [
                f'vllm:{name}_bucket{{{labels},le="{end}"}} {total!r}'
                for end, total in zip(ends, totals, strict=True)
            ]
            samples += [f"vllm:{name}_count{{{labels}}} {totals[-1]!r}"]
            samples += [f"vllm:{name}_sum{{{labels}}} {self._sums[name]!r}"]
            add(name, "histogram", what, samples)
        info = f'block_size="{engine.block_size}",num_gpu_blocks="{engine.capacity}",{_CACHE}'
        sample = f'vllm:cache_config_info{{engine="0",{info}}} 1.0'
        add("cache_config_info", "gauge", "Facts of the KV cache.", [sample])
        lines.append("# HELP servegym:lag_seconds How late tokens leave, moving average.")
        lines.append("# TYPE servegym:lag_seconds gauge")
        lines.append(f"servegym:lag_seconds {lag_s!r}")
        return "\n".join(lines) + "\n"
