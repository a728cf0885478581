"""The host's share of an iteration: against sums and maxima worked out step by step."""

import bisect

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.compose import compose
from servegym.hardware_profiles.host import engine_host, host_s, vllm_graph_sizes

RTX = "rtx4090-llama-3.1-8b"
HOST = {"step_s": 0.003, "sequence_s": 2e-5, "token_s": 1e-6, "overlap": False}


def test_absent_host_leaves_every_table_alone():
    profile = load(RTX)
    assert profile.host == {} and "host" not in profile.to_dict()
    bare = profile.with_host(HOST).with_host({})
    for mine, theirs in zip(bare.tables(), profile.tables(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", [RTX, "h100-llama-3.1-8b", "paper-linear-01"])
def test_without_overlap_the_shares_add_up(name):
    profile = load(name)
    slow = profile.with_host(HOST)
    for chunks, sequences in (([], 1), ([], 37), ([(700, 0)], 0), ([(64, 16), (200, 0)], 5)):
        tokens = sum(chunk for chunk, _ in chunks) + sequences
        share = 0.003 + 2e-5 * (sequences + len(chunks)) + 1e-6 * tokens
        alone = profile.step_s(chunks, sequences, 900.0 * sequences)
        assert slow.step_s(chunks, sequences, 900.0 * sequences) == pytest.approx(alone + share)
    slow_again = Profile.from_dict(slow.to_dict())
    assert slow_again.decode_s(3, 900.0) == slow.decode_s(3, 900.0)


@pytest.mark.parametrize("sequences", [1, 3, 24, 100, 256])
@pytest.mark.parametrize("step_s", [0.0, 0.019, 0.05])
def test_with_overlap_a_decode_takes_the_longer_share(sequences, step_s):
    """Where the host is slower for all contexts or for none; between it bends once."""
    profile = load(RTX)
    hidden = profile.with_host({**HOST, "step_s": step_s, "overlap": True})
    share = step_s + 2.1e-5 * sequences
    for context in profile.tables().decode_context_tokens[:6]:
        kernels = profile.decode_s(sequences, sequences * context)
        taken = hidden.decode_s(sequences, sequences * context)
        assert taken == pytest.approx(max(kernels, share), rel=1e-12)
    # Prefill iterations, and the decodes' attention in them, are the device's.
    chunks = [(512, 0)]
    assert hidden.step_s(chunks) == profile.step_s(chunks)
    assert hidden.mixed_step_s(chunks, sequences, 1000.0 * sequences) == pytest.approx(
        profile.mixed_step_s(chunks, sequences, 1000.0 * sequences), rel=1e-12
    )


def test_an_iteration_is_padded_to_the_next_captured_size():
    profile, sizes = load(RTX), vllm_graph_sizes(512)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-2:] == [496, 512] and len(sizes) == 51
    none = dict.fromkeys(("step_s", "sequence_s", "token_s"), 0.0)
    padded = profile.with_host({**none, "overlap": False, "graph_sizes": sizes})
    for tokens in (*range(1, 515), 600, 2048, 9000):
        size = sizes[bisect.bisect_left(sizes, tokens)] if tokens <= 512 else tokens
        assert padded.dense_s(tokens) == pytest.approx(profile.dense_s(size), rel=1e-12), tokens
    # The head and the attention work for the sequences there are.
    assert padded.decode_s(33, 33_000) == pytest.approx(
        profile.dense_s(40) + profile.decode_attention_s(33, 1000) + profile.head_s(33)
    )


def test_the_engine_sees_the_host():
    """One request alone: a prefill and nine decodes, each 4 ms longer."""
    profile = load(RTX)
    host = {"step_s": 0.004, "sequence_s": 0.0, "token_s": 0.0, "overlap": False}
    first, then = (
        replay([0.0], [100], [10], profile=p)[0] for p in (profile, profile.with_host(host))
    )
    assert then["ttft_s"] - first["ttft_s"] == pytest.approx(0.004)
    assert then["e2e_s"] - first["e2e_s"] == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_s": 3.0}, ["host.step_s", "milliseconds"]),
        ({"sequence_s": -1e-6}, ["host.sequence_s", ">= 0"]),
        ({"overlap": "yes"}, ["host.overlap", "true or false"]),
        ({"graph_sizes": [1, 2, 2]}, ["host.graph_sizes", "rising"]),
        ({"graph_sizes": []}, ["host.graph_sizes"]),
        ({"step": 0.1}, ["host.step", "did you mean 'step_s'"]),
    ],
)
def test_bad_fields_are_named(change, words):
    data = {**load(RTX).to_dict(), "host": {**HOST, **change}}
    with pytest.raises(ValueError) as caught:
        Profile.from_dict(data, "mine.json")
    for word in ["mine.json", *words]:
        assert word in str(caught.value)


def test_an_engine_that_plans_ahead_hides_most_of_its_host():
    old, new = engine_host("vLLM", "0.13.2"), engine_host("vLLM", "v0.14")
    assert host_s(old, 32, 32) == pytest.approx(0.003)
    assert host_s(new, 32, 32) == pytest.approx(0.000274)
    assert engine_host("vLLM", "unknown") == engine_host("other", "1.0") == {}
    profile = compose("h100", "llama-3.1-8b")
    assert profile.host == new
    kernels = profile.with_host({})
    slow = kernels.with_host(old)
    for law, host in ((profile, new), (slow, old)):
        assert law.decode_s(32, 32000) == pytest.approx(
            kernels.decode_s(32, 32000) + host_s(host, 32, 32), rel=1e-9
        )
