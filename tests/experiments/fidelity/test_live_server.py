"""Two runs of a live server beside their simulation; ``vllm_h200/README.md`` tells of them."""

import csv
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.hardware_profiles.calibrate.calibrate_server import calibrate_server
from servegym.hardware_profiles.calibrate.server_loads import read_loads
from servegym.hardware_profiles.compose import compose

FOLDER = Path(__file__).with_name("vllm_h200")
BLOCK = 16
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_tokens": 919_824}


def read_run(name):
    """The rows of a run, and of each: start and TTFT, end to end in seconds, tokens in and out."""
    with (FOLDER / f"{name}.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = ("sent_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens")
    sent, ttft, e2e, *tokens = (np.array([float(r[name]) for r in rows]) for name in names)
    return rows, sent - sent[0], ttft, e2e, *(n.astype(np.int32) for n in tokens)


def errors(output, true, ours):
    """Simulated over measured less 1, of the means of TTFT, TPOT and end-to-end latency."""
    several = output > 1
    (ttft, tpot, e2e), measured = (
        (first.mean(), ((end - first)[several] / (output[several] - 1)).mean(), end.mean())
        for first, end in (ours, true)
    )
    return np.array([ttft, tpot, e2e]) / measured - 1.0


@pytest.fixture(scope="module")
def composed():
    return compose("h200", "llama-3.1-8b")


def test_a_run_is_predicted_and_measured_loads_bring_the_prediction_closer(composed):
    _, sent, *true, prompt, output = read_run("azure5")

    def off(profile):
        times = replay(sent, prompt, output, profile=profile, **ENGINE)
        return errors(output, true, (times["ttft_s"], times["e2e_s"]))

    assert np.abs(off(composed)).max() < 0.05
    fitted = calibrate_server(read_loads(FOLDER / "server.csv"), composed, "corrected").profile
    assert np.abs(off(fitted)[1:]).max() < 0.025


def test_every_cached_token_of_a_run_is_predicted(composed):
    rows, sent, *true, prompts, output = read_run("prefix")

    @cache
    def tokens(part):
        seed, count = map(int, part.split(":"))
        draw = random.Random(seed)
        return [draw.randrange(100, 128_156) for _ in range(count)]

    ids, segments, first = {}, [], [0]
    for j, row in enumerate(rows):
        prompt = [token for part in row["parts"].split() for token in tokens(part)]
        before = -1
        for end in range(BLOCK, len(prompt) + int(output[j]) + 1, BLOCK):
            block = tuple(prompt[end - BLOCK : end])
            key = (before, block) if end <= len(prompt) else ("answer", j, end)
            before = ids.setdefault(key, len(ids))
            segments.append((before, 1))
        first.append(len(segments))
    none = np.zeros(len(rows), np.int32)
    requests = PrefixRequests(
        arrival_s=sent,
        parent=none - 1,
        think_s=np.zeros(len(rows)),
        prompt_tokens=prompts,
        output_tokens=output,
        session=np.array([row["session"] for row in rows], np.int32),
        tenant=none,
        turn=none,
        first_segment=np.array(first),
        segments=np.array(segments, np.int32),
        block_size=BLOCK,
    )
    times = replay_prefix(composed, requests, **ENGINE)
    assert times["hit_tokens"].sum() == 676_032
    ours = [times[name] - times["arrival_s"] for name in ("first_token_s", "finish_s")]
    assert np.abs(errors(output, true, ours)).max() < 0.05
