"""Requests with shared prefixes: what is refused, and hits by hand and by a literal loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servegym.envs.prefix_routing.requests import PrefixRequests, infinite_cache_hits


def make(prompt, output, chains, size=4, **changes):
    """Requests whose block ids are given one by one, each id a segment of its own."""
    count = len(prompt)
    fields = {
        "arrival_s": np.arange(count, dtype=np.float64),
        "parent": np.full(count, -1, dtype=np.int32),
        "think_s": np.zeros(count),
        "prompt_tokens": np.array(prompt, dtype=np.int32),
        "output_tokens": np.array(output, dtype=np.int32),
        "session": np.arange(count, dtype=np.int32),
        "tenant": np.zeros(count, dtype=np.int32),
        "turn": np.zeros(count, dtype=np.int32),
        "first_segment": np.cumsum([0] + [len(chain) for chain in chains]).astype(np.int64),
        "segments": np.array([[i, 1] for chain in chains for i in chain], dtype=np.int32),
        "block_size": size,
    }
    return PrefixRequests(**fields | changes)


def example():
    """A, then its next turn B (repeats A's prompt and output), then C that shares A's first block.

    A: 8 + 4 tokens, blocks 0 1 | 2; B: 15 + 1, blocks 0 1 2 3; C: 8 + 1, blocks 0 4.
    """
    return make([8, 15, 8], [4, 1, 1], [[0, 1, 2], [0, 1, 2, 3], [0, 4]])


def test_hits_by_hand():
    hits = infinite_cache_hits(example().check())
    assert hits.blocks.tolist() == [0, 3, 1]
    assert hits.prompt_blocks.tolist() == [2, 3, 2]
    assert hits.token_rate == 16 / 31
    assert hits.block_rate == 4 / 7


def test_each_replica_has_its_own_cache():
    assert infinite_cache_hits(example(), np.array([0, 1, 1])).blocks.tolist() == [0, 0, 1]
    assert infinite_cache_hits(example(), np.array([1, 0, 1])).blocks.tolist() == [0, 0, 1]


def test_ids_may_lie_anywhere():
    far = example()._replace(segments=example().segments + np.array([2_000_000_000, 0], np.int32))
    assert infinite_cache_hits(far.check()).blocks.tolist() == [0, 3, 1]


def test_the_block_of_the_last_token_is_computed_again():
    twice = make([8, 8], [1, 1], [[0, 1], [0, 1]])
    assert infinite_cache_hits(twice).blocks.tolist() == [0, 1]
    assert infinite_cache_hits(twice, recompute_last=False).blocks.tolist() == [0, 2]


def test_segments_are_ranges_of_ids():
    whole = example()
    ranges = whole._replace(
        first_segment=np.array([0, 1, 2, 4]),
        segments=np.array([[0, 3], [0, 4], [0, 1], [4, 1]], dtype=np.int32),
    ).check()
    for j in range(3):
        assert ranges.block_ids(j).tolist() == whole.block_ids(j).tolist()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 1), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    )
)
def test_hits_equal_a_literal_cache(drawn):
    """Prompts are strings over two letters, an id is a number for each different prefix."""
    names: dict[tuple, int] = {}
    chains, prompt, of = [], [], []
    for letters, extra, replica in drawn:
        letters = [*letters, extra]
        chains.append(
            [names.setdefault(tuple(letters[: k + 1]), len(names)) for k in range(len(letters))]
        )
        prompt.append(4 * len(letters))
        of.append(replica)
    requests = make(prompt, [1] * len(prompt), chains).check()
    caches: dict[int, set] = {}
    expected = []
    for chain, tokens, replica in zip(chains, prompt, of, strict=True):
        cache = caches.setdefault(replica, set())
        hit = 0
        while hit < (tokens - 1) // 4 and chain[hit] in cache:
            hit += 1
        expected.append(hit)
        cache.update(chain)
    assert infinite_cache_hits(requests, np.array(of)).blocks.tolist() == expected


BAD = {
    "arrival_s": np.array([0.0, -1.0, 2.0]),
    "think_s": np.array([0.0, np.nan, 2.0]),
    "parent": np.array([-1, 1, 0], dtype=np.int32),
    "prompt_tokens": np.array([8, 0, 8], dtype=np.int32),
    "output_tokens": np.array([4, 1, 1], dtype=np.int64),
    "turn": np.zeros(2, dtype=np.int32),
    "first_segment": np.array([0, 7, 3, 9]),
    "block_size": 0,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named(name):
    with pytest.raises(ValueError, match=f"^{name}"):
        example()._replace(**{name: BAD[name]}).check()


@pytest.mark.parametrize(
    "chains, request_",
    [
        ([[0, 1, 2], [0, 1, 2, 3], [4, 0]], 2),  # id 0 begins a prompt and follows 4
        ([[0, 1, 2], [0, 1, 2, 2], [0, 4]], 1),  # an id follows itself
        ([[0, 1, 2], [0, 3, 2, 4], [0, 5]], 1),  # id 2 after two different ids
    ],
)
def test_ids_that_are_no_prefix_chain_are_refused(chains, request_):
    with pytest.raises(ValueError, match=f"segments of request {request_}.*prefix chain"):
        make([8, 15, 8], [4, 1, 1], chains).check()


def test_a_missing_block_is_refused():
    with pytest.raises(ValueError, match="segments of request 1 have 3 blocks; they must have 4"):
        make([8, 15, 8], [4, 1, 1], [[0, 1, 2], [0, 1, 2], [0, 4]]).check()
