"""Both engines simulate one vLLM: where nothing is found again, every request has the same times.

No prompts share a prefix. After a preemption only the engine with a prefix cache finds blocks
again, so that traces with one are left out.
"""

import numpy as np
import pytest

from servegym.envs.llm_routing.trace_replay import replay
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.hardware_profiles import load

from .prefix_routing.reference import requests_with

TRACES = 60
HOST = {"step_s": 0.0, "sequence_s": 0.0, "token_s": 0.0}
API = {"api_in_s": 0.0045, "api_request_s": 0.0011, "api_out_s": 0.003}


def random_trace(rng):
    """Arrivals, prompts, outputs and options: tiny memories, long prompts, equal arrivals."""
    count = int(rng.integers(1, 40))
    size = int(rng.choice([1, 2, 7, 16, 64]))
    seqs = int(rng.choice([1, 2, 4, 8, 32]))
    budget = int(rng.choice([seqs, seqs + 5, 64, 512, 2048]))
    prompts = rng.integers(1, int(rng.choice([8, 100, 1500])) + 1, count)
    outputs = rng.integers(1, int(rng.choice([2, 30, 200])) + 1, count)
    gaps = rng.exponential(1 / float(rng.choice([5.0, 50.0, 500.0])), count)
    if rng.random() < 0.7:  # several at one moment, all at once in some traces
        gaps *= rng.random(count) < rng.choice([0.0, 0.1, 0.5])
    most = (-(-(prompts + outputs - 1) // size)).max()
    room = int(most * rng.choice([1.0, 1.2, 2.0, 6.0])) * size
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": max(budget, seqs), "kv_tokens": room}
    return np.cumsum(gaps), prompts, outputs, size, options


def unshared(arrivals, prompts, outputs, size):
    """The requests for the prefix engine, every block of its own content."""
    full = (prompts + outputs) // size
    first = np.concatenate([[0], np.cumsum(full)])
    segments = [[(i, n)] if n else [] for i, n in zip(first, full, strict=False)]
    return requests_with(prompts, outputs, segments, size, arrival_s=arrivals)


@pytest.mark.parametrize(("ahead", "api"), [(False, {}), (True, {}), (True, API)])
def test_both_engines_give_the_same_times(ahead, api):
    rng = np.random.default_rng(0)
    profile = load("rtx4090-llama-3.1-8b").with_host(HOST | api)
    same, together, split = 0, 0, 0
    for trace in range(TRACES):
        arrivals, prompts, outputs, size, options = random_trace(rng)
        options |= {"async_scheduling": ahead}
        requests = unshared(arrivals, prompts, outputs, size)
        other = replay_prefix(profile, requests, **options)
        one = replay(arrivals, prompts, outputs, profile=profile, block_size=size, **options)
        # Until the first preemption both do the same.
        assert one["preemptions"].any() == other["preemptions"].any(), trace
        if one["preemptions"].any():
            continue
        for mine, theirs in (
            (one["queue_s"] + arrivals, other["admitted_s"]),
            (one["ttft_s"] + arrivals, other["first_token_s"]),
            (one["finish_s"], other["finish_s"]),
        ):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12, err_msg=str(trace))
        same += 1
        together += (np.diff(arrivals) == 0).any()
        split += (prompts > options["max_num_batched_tokens"]).any()
    assert same > TRACES / 2 and together > TRACES / 4 and split > TRACES / 10
