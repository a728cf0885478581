"""Replay on replicas: known answers, and what is refused."""

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.requests import PrefixRequests

from ..llm_routing.reference import TableLaw, step_s
from .reference import infinite_hits
from .test_kernel_reference import exact_law, make_requests, profile_of


def requests_of(*rows, size=4) -> PrefixRequests:
    """Rows of arrival, parent, think time, prompt and output tokens, and (first id, blocks)."""
    columns = list(zip(*(row[:5] for row in rows), strict=True))
    segments = [pair for row in rows for pair in row[5]]
    zeros = np.zeros(len(rows), dtype=np.int32)
    return PrefixRequests(
        arrival_s=np.array(columns[0], dtype=np.float64),
        parent=np.array(columns[1], dtype=np.int32),
        think_s=np.array(columns[2], dtype=np.float64),
        prompt_tokens=np.array(columns[3], dtype=np.int32),
        output_tokens=np.array(columns[4], dtype=np.int32),
        session=zeros,
        tenant=zeros,
        turn=zeros,
        first_segment=np.cumsum([0] + [len(row[5]) for row in rows]),
        segments=np.array(segments, dtype=np.int32).reshape(-1, 2),
        block_size=size,
    )


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


def test_a_cache_of_two_blocks_keeps_the_beginning():
    """Freed last block first, a prefix loses its end first."""
    profile, _ = make_profile(12)
    requests = requests_of(
        (0.0, -1, 0.0, 11, 1, [(0, 3)]),
        (100.0, -1, 0.0, 3, 1, [(7, 1)]),  # takes the free block without an id
        (200.0, -1, 0.0, 5, 1, [(9, 1)]),  # takes that again, and the end of the first prompt
        (300.0, -1, 0.0, 11, 1, [(0, 3)]),
    )
    found = replay_prefix([profile], requests)
    assert found["hit_tokens"].tolist() == [0, 0, 0, 4]


@pytest.mark.parametrize("replicas", [1, 3])
def test_an_endless_cache_hits_what_is_ideal(replicas):
    """One request at a time with memory for all: the hit of the cache that never evicts."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        requests = make_requests(rng, 60, 4, closed=False, rate=0.01).check()
        profile, _ = make_profile(10**5, seed)
        assignment = rng.integers(0, replicas, 60)
        found = replay_prefix(profile, requests, assignment, num_replicas=replicas)
        # The last token of an answer is never computed: a block that it ends is not cached.
        seen: list[set[int]] = [set() for _ in range(replicas)]
        for j, n in enumerate(assignment):
            ids = requests.block_ids(j).tolist()
            prompt, output = int(requests.prompt_tokens[j]), int(requests.output_tokens[j])
            known = [i in seen[n] for i in ids[: (prompt - 1) // 4]] + [False]
            assert found["hit_tokens"][j] == 4 * known.index(False), (seed, j)
            seen[n].update(ids[: (prompt + output - 1) // 4])
        ideal = 4 * infinite_hits(requests, assignment)
        assert (found["hit_tokens"] <= ideal).all()
        assert found["hit_tokens"].sum() > 0.5 * ideal.sum() > 0


def test_without_a_prefix_in_common_it_is_the_engine_of_llm_routing():
    """Where memory never binds and nobody shares, caching and order of allocation do not show."""
    rng = np.random.default_rng(0)
    count = 300
    arrivals = np.cumsum(rng.exponential(0.05, count))
    prompts, outputs = rng.integers(1, 3000, count), rng.integers(1, 300, count)
    ids = 0
    rows = []
    for t, prompt, output in zip(arrivals, prompts, outputs, strict=True):
        blocks = int(prompt + output) // 16
        rows.append((t, -1, 0.0, prompt, output, [(ids, blocks)] if blocks else []))
        ids += blocks
    profile = "h100-llama-3.1-8b"
    found = replay_prefix(profile, requests_of(*rows, size=16), max_num_seqs=64)
    expected = replay(arrivals, prompts, outputs, profile=profile, max_num_seqs=64)
    assert not expected["preemptions"].any() and not found["hit_tokens"].any()
    np.testing.assert_allclose(found["finish_s"], expected["finish_s"], rtol=1e-9)
    np.testing.assert_allclose(
        found["first_token_s"] - arrivals, expected["ttft_s"], rtol=0, atol=1e-9
    )
    np.testing.assert_allclose(
        found["admitted_s"] - arrivals, expected["queue_s"], rtol=0, atol=1e-9
    )


def test_round_robin_goes_by_arrival():
    rows = [(3.0 - j, -1, 0.0, 5, 2, [(10 * j, 1)]) for j in range(4)]
    profile, _ = make_profile(100)
    found = replay_prefix(profile, requests_of(*rows), num_replicas=3)
    assert found["replica"].tolist() == [0, 2, 1, 0]
    same = replay_prefix([profile] * 3, requests_of(*rows), [0, 2, 1, 0])
    np.testing.assert_array_equal(found, same)


def test_bad_input_is_refused():
    profile, _ = make_profile(16)
    requests = requests_of((0.0, -1, 0.0, 8, 2, [(0, 2)]), (1.0, -1, 0.0, 15, 2, [(0, 4)]))
    assert replay_prefix(profile, requests)["finish_s"].all()  # 16 tokens are computed
    for options, text in (
        ({"assignment": "random"}, "assignment='random'"),
        ({"assignment": [0]}, "assignment must be"),
        ({"assignment": [0, 1]}, r"assignment\[1\]=1 must be in \[0, 0\]"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens=255"),
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
