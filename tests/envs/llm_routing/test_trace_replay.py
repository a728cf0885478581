"""Replay of one expert: against the reference, against queueing theory, and its refusals."""

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.hardware_profiles import Profile, load

from .reference import Api, TableLaw, replay_reference


def linear(base=0.0, k1=0.0, kb=0.0, k2=0.0) -> Profile:
    """The shipped linear profile with another law."""
    data = load("paper-linear-01").to_dict()
    data["law"] = {
        "kind": "linear",
        "base_s": base,
        "prefill_s_per_token": k1,
        "decode_s_per_sequence": kb,
        "decode_s_per_context_token": k2,
    }
    return Profile.from_dict(data)


API = {"api_in_s": 0.0045, "api_request_s": 0.0011, "api_out_s": 0.003}
HOST = {"step_s": 0.0, "sequence_s": 0.0, "token_s": 0.0}


@pytest.mark.parametrize(
    ("scheduler", "ahead", "times"),
    [
        ("orca", False, {}),
        ("chunked_prefill", False, {}),
        ("chunked_prefill", False, API),
        ("chunked_prefill", True, {}),
        ("chunked_prefill", True, API),
    ],
)
@pytest.mark.parametrize("memory_policy", ["reserve", "paged"])
def test_equals_the_reference(scheduler, memory_policy, ahead, times):
    profile = load("rtx4090-llama-3.1-8b").with_host(HOST | times)
    preempted = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        count = 60
        arrivals = np.cumsum(rng.exponential(0.05, count)) + rng.uniform(0, 0.01, count).cumsum()
        prompts, outputs = rng.integers(1, 700, count), rng.integers(1, 120, count)
        options = {"scheduler": scheduler, "memory_policy": memory_policy, "block_size": 16}
        options |= {"async_scheduling": ahead}
        limits = {"kv_tokens": 4000, "max_num_seqs": 16, "max_num_batched_tokens": 512}
        mine = replay(arrivals, prompts, outputs, profile=profile, **limits, **options)
        theirs = replay_reference(
            list(zip(arrivals, prompts, outputs, strict=True)),
            TableLaw(profile.tables(), profile.mixed_decode_attention_s(), profile.surplus),
            4000,
            running_capacity=16,
            prefill_token_budget=512,
            max_output_tokens=int(outputs.max()) if memory_policy == "reserve" else None,
            api=Api(*(times.get(name, 0.0) for name in API)),
            **options,
        )
        for name in ("ttft", "tpot", "e2e", "finish"):
            expected = [getattr(entry, name) for entry in theirs]
            np.testing.assert_allclose(mine[f"{name}_s"], expected, rtol=1e-9, atol=1e-9)
        preempted += mine["preemptions"].sum()
    assert (preempted > 0) == (memory_policy == "paged")


def test_by_default_iterations_are_planned_as_the_engine_does():
    requests = ([0.0, 0.02, 0.03], [200, 200, 200], [9, 9, 9])
    for name, ahead in (("rtx4090-llama-3.1-8b", True), ("paper-linear-01", False)):
        by_default = replay(*requests, profile=name)
        here, other = (
            replay(*requests, profile=name, async_scheduling=value) for value in (ahead, not ahead)
        )
        np.testing.assert_array_equal(by_default, here)
        assert (by_default["ttft_s"] != other["ttft_s"]).any()
    replay(*requests, profile="rtx4090-llama-3.1-8b", scheduler="orca")


def test_iterations_planned_ahead_by_hand():
    """1 s a prefill token or decode: a request joins one iteration later, and so does a slot."""
    settings = {"profile": linear(k1=1.0, kb=1.0), "max_num_seqs": 2}
    requests = ([0.0, 2.5, 2.6], [2, 1, 1], [5, 2, 1])
    at_once = replay(*requests, **settings)
    ahead = replay(*requests, **settings, async_scheduling=True)
    # 0-2 prefill of 0, 2-3 it decodes alone; 1 arrives at 2.5. At once: 3-5 it decodes beside the
    # prefill of 1. Ahead: 3-4 was planned at 2, so that 1 joins in 4-6 and ends in 6-8, beside the
    # last token of 0. Then both slots are free, and with nothing left to run 2 starts at 8.
    np.testing.assert_allclose(at_once["ttft_s"], [2.0, 2.5, 6.4])
    np.testing.assert_allclose(ahead["ttft_s"], [2.0, 3.5, 6.4])
    np.testing.assert_allclose(ahead["finish_s"], [8.0, 8.0, 9.0])
    # A longer answer keeps the expert busy: the slot that 1 leaves at 8 is filled at 9.
    ahead = replay([0.0, 2.5, 2.6], [2, 1, 1], [7, 2, 1], **settings, async_scheduling=True)
    np.testing.assert_allclose(ahead["finish_s"][1:], [8.0, 11.0])


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error from 25 batch means."""
    batches = values[: len(values) // 25 * 25].reshape(25, -1).mean(axis=1)
    return float(batches.mean()), float(batches.std(ddof=1) / 5)


@pytest.mark.parametrize(("law", "load_factor"), [("M/D/1", 0.8), ("M/M/1", 0.6)])
def test_first_come_first_served_waits(law, load_factor):
    """One slot is M/G/1: Pollaczek-Khinchine gives the mean wait."""
    rng = np.random.default_rng(7)
    count, step = 200_000, 0.001
    outputs = np.full(count, 100) if law == "M/D/1" else rng.geometric(1 / 100, count)
    service = (outputs - 1) * step  # the first token comes with the prefill, which takes no time
    mean, square = service.mean(), (service**2).mean()
    rate = load_factor / mean
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    how = {"profile": linear(k1=1e-12, kb=step), "scheduler": "orca"}
    result = replay(arrivals, np.ones(count), outputs, max_num_seqs=1, **how)
    wait, error = mean_and_error(result["queue_s"])
    assert abs(wait - rate * square / (2 * (1 - load_factor))) < 4 * error
    assert error < 0.1 * wait


@pytest.mark.filterwarnings("ignore:.*outside its domain")
def test_decode_time_in_proportion_to_the_batch_is_processor_sharing():
    """M/G/1-PS: the mean time in the system is E[S] / (1 - rho), whatever the lengths' law."""
    rng = np.random.default_rng(11)
    count, step, load_factor = 200_000, 0.0005, 0.6
    outputs = np.where(rng.random(count) < 0.8, 50, 800)
    service = (outputs - 1) * step
    rate = load_factor / service.mean()
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    how = {"profile": linear(k1=1e-12, kb=step), "scheduler": "orca"}
    result = replay(arrivals, np.ones(count), outputs, max_num_seqs=512, kv_tokens=10**7, **how)
    time, error = mean_and_error(result["e2e_s"])
    # Sharing goes by whole iterations: an arrival also waits for the one in flight.
    expected = service.mean() / (1 - load_factor)
    assert abs(time - expected) < 4 * error + step / (1 - load_factor)
    assert error < 0.1 * time


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arrival_s": [0.0, np.nan]}, r"arrival_s\[1\]"),
        ({"arrival_s": [0.0, 1.7e12]}, r"arrival_s\[1\].*below 1e\+11: seconds, not milliseconds"),
        ({"arrival_s": [1.0, 0.5]}, "sort the requests"),
        ({"prompt_tokens": [1, 0]}, r"prompt_tokens\[1\]"),
        ({"kv_tokens": 64}, "request 0"),
        ({"scheduler": "orca", "async_scheduling": True}, "async_scheduling"),
    ],
)
def test_bad_input_is_refused(change, words):
    good = {"arrival_s": [0.0, 1.0], "prompt_tokens": [100, 10], "output_tokens": [5, 5]}
    arguments = {**good, **change}
    lists = [arguments.pop(name) for name in good]
    with pytest.raises(ValueError, match=words):
        replay(*lists, **arguments)


def test_leaving_the_profiles_domain_warns_and_names_it(tmp_path):
    data = load("rtx4090-llama-3.1-8b").to_dict()
    data["name"] = "a-card-of-this-test"
    file = tmp_path / "profile.json"
    Profile.from_dict(data).save(file)
    with pytest.warns(UserWarning, match=r"context_tokens <= \d+\): context_tokens 20030 >"):
        replay([0.0], [20_000], [30], profile=str(file))
