"""Requests with shared prefixes: their ids, and what is refused."""

import numpy as np
import pytest

from .reference import requests_with


def make(prompt, output, chains):
    """Requests a second apart whose block ids are given one by one, each id a segment."""
    segments = [[(i, 1) for i in chain] for chain in chains]
    seconds = np.arange(len(prompt))
    return requests_with(prompt, output, segments, arrival_s=seconds, session=seconds)


def example():
    """A, then its next turn B (repeats A's prompt and output), then C that shares A's first block.

    A: 8 + 4 tokens, blocks 0 1 | 2; B: 15 + 1, blocks 0 1 2 3; C: 8 + 1, blocks 0 4.
    """
    return make([8, 15, 8], [4, 1, 1], [[0, 1, 2], [0, 1, 2, 3], [0, 4]])


BAD = {
    "arrival_s": np.array([0.0, -1.0, 2.0]),
    "prompt_tokens": np.array([8, 0, 8], dtype=np.int32),
    "output_tokens": np.array([4, 1, 1], dtype=np.int64),
    "first_segment": np.array([0, 7, 3, 9]),
}


def test_times_in_milliseconds_since_1970_are_refused():
    late = example()._replace(arrival_s=np.array([0.0, 1.0, 1.7e12]))
    with pytest.raises(ValueError, match=r"arrival_s\[2\] is 17.*; it must be seconds"):
        late.check()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named(name):
    with pytest.raises(ValueError, match=f"^{name}"):
        example()._replace(**{name: BAD[name]}).check()


@pytest.mark.parametrize(
    "chains, request_",
    [
        ([[0, 1, 2], [0, 1, 2, 3], [4, 0]], 2),  # id 0 begins a prompt and follows 4
        ([[0, 1, 2], [0, 3, 2, 4], [0, 5]], 1),  # id 2 after two different ids
    ],
)
def test_ids_that_are_no_prefix_chain_are_refused(chains, request_):
    with pytest.raises(ValueError, match=f"segments of request {request_}.*prefix chain"):
        make([8, 15, 8], [4, 1, 1], chains).check()


def test_a_missing_block_is_refused():
    with pytest.raises(ValueError, match="segments of request 1 have 3 blocks; they must have 4"):
        make([8, 15, 8], [4, 1, 1], [[0, 1, 2], [0, 1, 2], [0, 4]]).check()
