"""Requests of a file, and experts whose speed drifts."""

import gymnasium
import numpy as np
import pytest

from servegym.envs.llm_routing import replay

PROFILE = "rtx4090-llama-3.1-8b"
ENGINE = {
    "scheduler": "chunked_prefill",
    "memory_policy": "paged",
    "running_capacity": 4,
    "waiting_capacity": 64,
    "router_delay_s": 0.0,
    "bytes_per_token": 0.0,
}


@pytest.fixture
def file(tmp_path):
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(0.2, 30))
    lines = ["arrival_s,prompt_tokens,output_tokens_a,output_tokens_b,score_a,score_b"]
    for time in arrivals:
        p, a, b = random.integers(5, 200, 3)
        lines.append(f"{float(time)!r},{p},{a},{b},0.25,0.75")
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "requests.csv"


def _play(env, seed=0):
    _, info = env.reset(seed=seed)
    done, last = False, {}
    while not done:
        *_, done, _, last = env.step(2)
    return env.unwrapped.request_log(), last


def _make(file, **more):
    return gymnasium.make(
        "servegym/LLMRouting-v1",
        **{"requests_file": str(file), "profiles": [PROFILE, PROFILE], **ENGINE, **more},
    )


def test_an_episode_is_the_file_and_equals_its_replay(file):
    columns = np.genfromtxt(file, delimiter=",", names=True)
    log, _ = _play(_make(file))
    assert np.array_equal(log["arrival_s"], columns["arrival_s"])
    assert np.array_equal(log["prompt_tokens"], columns["prompt_tokens"])
    assert np.array_equal(log["output_tokens"], columns["output_tokens_b"])
    assert (log["score"] == 0.75).all()
    alone = replay(
        columns["arrival_s"],
        columns["prompt_tokens"].astype(int),
        columns["output_tokens_b"].astype(int),
        profile=PROFILE,
        max_num_seqs=4,
        async_scheduling=False,
    )
    assert np.allclose(log["finish_s"], alone["finish_s"], rtol=1e-12)
    again, _ = _play(_make(file), seed=7)
    assert np.array_equal(again["finish_s"], log["finish_s"])


def test_requests_of_one_instant_are_served_in_order(file):
    head, *lines = file.read_text().splitlines()
    file.write_text("\n".join([head, *(f"1.5,{line.partition(',')[2]}" for line in lines)]))
    log, _ = _play(_make(file, running_capacity=1))
    assert (np.diff(log["finish_s"]) > 0).all()


def test_an_answer_exactly_at_the_requirement_is_on_time(file):
    log, _ = _play(_make(file))
    latency = (log["finish_s"] - log["arrival_s"]) / log["output_tokens"]
    exact = float(np.sort(latency)[15])
    for limit in (exact, np.nextafter(exact, 0.0)):
        _, info = _play(_make(file, latency_requirement_s=float(limit)))
        expected = 0.75 * (latency <= limit).mean()
        assert info["episode_kpis"]["avg_qos"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"catalog": "synthetic"}, "catalog"),
        ({"rate": 2.0}, "rate"),
        ({"episode_requests": 31}, "episode_requests"),
        ({"requests_file": 3}, "requests_file"),
        ({"models": ["a", "c"]}, "'c'"),
    ],
)
def test_what_does_not_fit_the_file_is_refused(file, more, name):
    with pytest.raises(ValueError, match=name):
        _make(file, **more)
