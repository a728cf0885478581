"""The host's share of an iteration: against sums worked out step by step."""

import gymnasium
import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.compose import compose
from servegym.hardware_profiles.host import (
    engine_host,
    parse_engine,
    with_engine,
    without_api,
)

RTX = "rtx4090-llama-3.1-8b"
HOST = {"step_s": 0.003, "sequence_s": 2e-5, "token_s": 1e-6}


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


API = {"api_in_s": 0.006, "api_request_s": 0.001, "api_out_s": 0.002}


def test_times_of_a_request_by_hand():
    """Alone 6 ms in and 2 ms out; of several at once each takes 1 ms of the API."""
    profile = load(RTX)
    slow = profile.with_host(dict.fromkeys(HOST, 0.0) | API)
    assert slow.decode_s(3, 900.0) == profile.decode_s(3, 900.0)
    alone, later = (replay([0.0], [100], [10], profile=p)[0] for p in (profile, slow))
    assert later["ttft_s"] - alone["ttft_s"] == pytest.approx(0.008)
    assert later["e2e_s"] - alone["e2e_s"] == pytest.approx(0.008)
    assert later["tpot_s"] == pytest.approx(alone["tpot_s"])
    both = replay([0.0, 0.0, 0.0015], [100] * 3, [1] * 3, profile=slow)
    np.testing.assert_allclose(both["queue_s"][:1], 0.006)
    # The others come at 7 and 8 ms, while the first one's only iteration runs.
    np.testing.assert_allclose(both["queue_s"][1:], alone["ttft_s"] + 0.006 - np.array([0, 0.0015]))
    assert without_api(slow).host == HOST | dict.fromkeys(HOST, 0.0)
    assert without_api(profile) is profile


def test_environments_leave_out_the_times_of_a_request():
    host = dict.fromkeys(HOST, 0.0)
    played = []
    for profile in (load(RTX).with_host(host), load(RTX).with_host(host | API)):
        env = gymnasium.make(
            "servegym/PrefixRouting-v1", profiles=profile, num_replicas=2, episode_requests=20
        )
        env.reset(seed=0)
        played.append([env.step(0)[1] for _ in range(20)])
    assert played[0] == played[1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"api_in_s": 4.5}, "api_in_s.*milliseconds"),
        ({"api_request_s": 0.001}, "api_request_s.*api_in_s"),
    ],
)
def test_wrong_times_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        load(RTX).with_host(HOST | wrong)


def test_sequences_beyond_256_take_less():
    profile = load(RTX)
    slow = profile.with_host(HOST | {"beyond_256_s": 5e-6})
    for b, share in ((100, 100 * 2e-5), (256, 256 * 2e-5), (700, 256 * 2e-5 + 444 * 5e-6)):
        more = slow.decode_s(b, 900 * b) - profile.decode_s(b, 900 * b)
        assert more == pytest.approx(0.003 + share + 1e-6 * b)


def test_a_told_engine_takes_its_share():
    profile = with_engine(compose("h100", "llama-3.1-8b"), "vllm@0.11")
    assert profile.host == engine_host("vLLM", "0.11") and not profile.plans_ahead
    told = compose("h100", "llama-3.1-8b", engine="vllm@0.11")
    assert told.name == "h100-llama-3.1-8b-vllm@0.11" and told.host == profile.host
    assert told.decode_s(300, 300_000) == profile.decode_s(300, 300_000)
    for wrong in ("vllm", "vllm@", "trtllm@1.0", "0.11"):
        with pytest.raises(ValueError, match="must be vllm@VERSION"):
            parse_engine(wrong)


def test_an_engine_that_plans_ahead_hides_most_of_its_host():
    old, new = engine_host("vLLM", "0.13.2"), engine_host("vLLM", "v0.14")
    assert engine_host("vLLM", "unknown") == engine_host("other", "1.0") == {}
    profile = compose("h100", "llama-3.1-8b")
    assert profile.host == new
    kernels = profile.with_host({})
    slow = kernels.with_host(old)
    for law, share_s in ((profile, 0.00005), (slow, 0.003)):
        assert law.decode_s(32, 32000) - kernels.decode_s(32, 32000) == pytest.approx(share_s)
