"""The host's share of an iteration: against sums worked out step by step."""

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.compose import compose
from servegym.hardware_profiles.host import engine_host

RTX = "rtx4090-llama-3.1-8b"
HOST = {"step_s": 0.003, "sequence_s": 2e-5, "token_s": 1e-6}


def test_absent_host_leaves_every_table_alone():
    profile = load(RTX)
    assert profile.host == {} and "host" not in profile.to_dict()
    bare = profile.with_host(HOST).with_host({})
    for mine, theirs in zip(bare.tables(), profile.tables(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", [RTX, "h100-llama-3.1-8b", "paper-linear-01"])
def test_the_shares_add_up(name):
    profile = load(name)
    slow = profile.with_host(HOST)
    for chunks, sequences in (([], 1), ([], 37), ([(700, 0)], 0), ([(64, 16), (200, 0)], 5)):
        tokens = sum(chunk for chunk, _ in chunks) + sequences
        share = 0.003 + 2e-5 * (sequences + len(chunks)) + 1e-6 * tokens
        alone = profile.step_s(chunks, sequences, 900.0 * sequences)
        assert slow.step_s(chunks, sequences, 900.0 * sequences) == pytest.approx(alone + share)
    slow_again = Profile.from_dict(slow.to_dict())
    assert slow_again.decode_s(3, 900.0) == slow.decode_s(3, 900.0)


def test_the_engine_sees_the_host():
    """One request alone: a prefill and nine decodes, each 4 ms longer."""
    profile = load(RTX)
    host = {"step_s": 0.004, "sequence_s": 0.0, "token_s": 0.0}
    first, then = (
        replay([0.0], [100], [10], profile=p)[0] for p in (profile, profile.with_host(host))
    )
    assert then["ttft_s"] - first["ttft_s"] == pytest.approx(0.004)
    assert then["e2e_s"] - first["e2e_s"] == pytest.approx(0.04)


def test_an_engine_that_plans_ahead_hides_most_of_its_host():
    old, new = engine_host("vLLM", "0.13.2"), engine_host("vLLM", "v0.14")
    assert engine_host("vLLM", "unknown") == engine_host("other", "1.0") == {}
    profile = compose("h100", "llama-3.1-8b")
    assert profile.host == new
    kernels = profile.with_host({})
    slow = kernels.with_host(old)
    for law, share_s in ((profile, 0.000274), (slow, 0.003)):
        assert law.decode_s(32, 32000) - kernels.decode_s(32, 32000) == pytest.approx(share_s)
