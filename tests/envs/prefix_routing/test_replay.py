"""Replay on replicas: known answers, and what is refused."""

import numpy as np
import pytest

from servegym.envs.prefix_routing.replay import replay_prefix

from ..llm_routing.reference import TableLaw, step_s
from .reference import requests_with
from .test_kernel_reference import exact_law, profile_of


def requests_of(*rows):
    """Rows of arrival, parent, think time, prompt and output tokens, and (first id, blocks)."""
    arrival, parent, think, prompt, output, segments = zip(*rows, strict=True)
    times = {"arrival_s": arrival, "think_s": think}
    return requests_with(prompt, output, segments, parent=parent, **times)


def make_profile(capacity, seed=0):
    tables = exact_law(np.random.default_rng(seed))
    return profile_of(tables, capacity), TableLaw(tables)


def test_three_requests_by_hand():
    """A conversation of two turns, and the first prompt once more beside the second turn."""
    profile, law = make_profile(1000)
    requests = requests_of(
        (1.0, -1, 0.0, 8, 3, [(0, 2)]),
        # Its 13 tokens repeat the 11 of the first turn, of which 10 were computed.
        (0.0, 0, 2.0, 13, 1, [(0, 3)]),
        (0.0, 0, 2.0, 8, 2, [(0, 2)]),
    )
    found = replay_prefix([profile], requests)
    first = 1.0 + step_s(law, [(8, 0)], [])
    done = first + step_s(law, [], [9]) + step_s(law, [], [10])
    assert found["first_token_s"][0] == first and found["finish_s"][0] == done
    # Two of its three full blocks are cached; of the last request, whose tokens all are, one is.
    assert found["hit_tokens"].tolist() == [0, 8, 4]
    # Both arrive at one moment, and are in one iteration.
    second = done + 2.0 + step_s(law, [(5, 8), (4, 4)], [])
    assert found["arrival_s"].tolist() == [1.0, done + 2.0, done + 2.0]
    assert found["first_token_s"][1] == found["finish_s"][1] == second
    assert found["admitted_s"][2] == done + 2.0 and found["first_token_s"][2] == second
    assert found["finish_s"][2] == second + step_s(law, [], [9])


def test_the_engine_decides_whether_iterations_are_planned_ahead():
    requests = requests_of(*((0.01 * j, -1, 0.0, 40, 9, [(12 * j, 12)]) for j in range(4)))
    by_default, ahead, at_once = (
        replay_prefix("rtx4090-llama-3.1-8b", requests, async_scheduling=value)["first_token_s"]
        for value in (None, True, False)
    )
    np.testing.assert_array_equal(by_default, ahead)
    assert (ahead > at_once).any()


def test_bad_input_is_refused():
    profile, _ = make_profile(16)
    requests = requests_of((0.0, -1, 0.0, 8, 2, [(0, 2)]), (1.0, -1, 0.0, 15, 2, [(0, 4)]))
    assert replay_prefix(profile, requests)["finish_s"].all()  # 16 tokens are computed
    for options, text in (
        ({"assignment": "random"}, "assignment='random'"),
        ({"assignment": [0, 1]}, r"assignment\[1\]=1 must be in \[0, 0\]"),
        ({"kv_tokens": 15}, "request 1 needs 4 KV blocks"),
    ):
        with pytest.raises(ValueError, match=text):
            replay_prefix(profile, requests, **options)
    with pytest.raises(ValueError, match="profiles is empty"):
        replay_prefix([], requests)
    with pytest.raises(ValueError, match="num_replicas=3"):
        replay_prefix([profile], requests, num_replicas=3)
    with pytest.raises(ValueError, match="block_size=4 is more"):
        replay_prefix(make_profile(3)[0], requests)
    with pytest.raises(ValueError, match=r"output_tokens\[0\] is 0"):
        replay_prefix(profile, requests._replace(output_tokens=np.zeros(2, dtype=np.int32)))
