"""The engine that is fed while it runs, against the one that knows all requests."""

import numpy as np
import pytest

from servegym.envs.prefix_routing.live import LiveEngine
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.hardware_profiles import LawTables

from .test_kernel_reference import API, exact_law, make_requests, profile_of


def contents(requests, j):
    """Token ids of a request that are equal exactly where its block ids are."""
    size = requests.block_size
    prompt, output = int(requests.prompt_tokens[j]), int(requests.output_tokens[j])
    ids = np.repeat(requests.block_ids(j) + 1, size)
    rest = np.full(prompt + output - len(ids), 10**6 + j)
    tokens = np.concatenate([ids, rest]).tolist()
    return tokens[:prompt], tokens[prompt:]


def serve(engine, requests):
    """Feed the requests in their order: times of all tokens, and the last state of the records."""
    slots, times, ended = {}, {}, {}

    def work(until):
        for time, slot, last in engine.work(until):
            times.setdefault(slots[slot], []).append(time)
            if last:
                r = engine.request(slot)
                ended[slots.pop(slot)] = r["hit"], r["recomputed"], r["preemptions"], r["admitted"]
                engine.release(slot)

    for j in np.argsort(requests.arrival_s, kind="stable"):
        now = float(requests.arrival_s[j])
        work(np.nextafter(now, -1.0))  # who arrives as an iteration begins joins it
        slots[engine.submit(now, *contents(requests, j))] = int(j)
    work(1e9)
    assert not slots and engine.next_s == np.inf
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0.0)
    return times, ended


@pytest.mark.parametrize(("ahead", "host"), [(False, {}), (True, {}), (True, API)])
def test_it_serves_as_the_offline_engine(ahead, host):
    hits = lost = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([1, 4, 16]))
        requests = make_requests(rng, 60, size, closed=False)
        longest = int((requests.prompt_tokens + requests.output_tokens).max())
        capacity = -(-longest // size) * size * int(rng.integers(1, 4))
        profile = profile_of(exact_law(rng), capacity, host=host)
        running, budget = int(rng.integers(1, 9)), int(rng.integers(9, 64))
        given = {"max_num_seqs": running, "max_num_batched_tokens": budget, "kv_tokens": capacity}
        given["async_scheduling"] = ahead
        found = replay_prefix([profile], requests, **given)
        engine = LiveEngine(profile, block_size=size, max_requests=64, **given)
        for _ in range(2):  # as new after `clear`
            times, ended = serve(engine, requests)
            for j in range(60):
                assert len(times[j]) == requests.output_tokens[j]
                assert times[j][0] == pytest.approx(found["first_token_s"][j], rel=1e-12)
                assert times[j][-1] == pytest.approx(found["finish_s"][j], rel=1e-12)
                hit, recomputed, preemptions, admitted = ended[j]
                assert admitted == pytest.approx(found["admitted_s"][j], rel=1e-12)
                assert (hit, recomputed, preemptions) == tuple(
                    found[name][j] for name in ("hit_tokens", "recomputed_tokens", "preemptions")
                )
            engine.clear()
        hits, lost = hits + found["hit_tokens"].sum(), lost + found["preemptions"].sum()
    assert hits > 500 and lost > 20


def flat_profile(capacity):
    """Every iteration takes a second."""
    axis = np.array([0.0, 4096.0])
    zero = np.zeros((2, 2))
    tables = LawTables(axis, np.ones(2), axis, axis, zero, axis, axis, zero, axis, np.zeros(2))
    return profile_of(tables, capacity)


@pytest.mark.parametrize("seed", range(2))
def test_aborts_at_random_leave_nothing_behind(seed):
    rng = np.random.default_rng(seed)
    engine = LiveEngine(
        profile_of(exact_law(rng), 256),
        max_num_seqs=6,
        max_num_batched_tokens=16,
        block_size=4,
        max_requests=32,
    )
    now, held, ended = 0.0, {}, 0
    for _ in range(2000):
        now += float(rng.exponential(0.01))
        for _, slot, last in engine.work(now):
            held[slot] -= 1
            assert last == (held[slot] == 0)
            if last:
                del held[slot]
                engine.release(slot)
                ended += 1
        if rng.random() < 0.5 and not engine.full:
            prompt = rng.integers(0, 2, int(rng.integers(1, 60))).tolist()
            output = rng.integers(0, 2, int(rng.integers(1, 40))).tolist()
            held[engine.submit(now, prompt, output)] = len(output)
        elif held and rng.random() < 0.3:
            slot = int(rng.choice(list(held)))
            del held[slot]
            engine.abort(slot)
    for slot in held:
        engine.abort(slot)
    assert ended > 100
    assert engine.work(now + 1e6) == []
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0.0)


def test_contents_that_nothing_has_are_forgotten():
    engine = LiveEngine(flat_profile(64), max_num_seqs=2, max_num_batched_tokens=64, block_size=1)
    now = 0.0
    for j in range(1500):
        slot = engine.submit(now, list(range(40 * j, 40 * j + 40)), [1])
        now += 2.0
        assert engine.work(now)[-1][1] == slot
        engine.release(slot)
    assert len(engine._ids) < 5_000
    # What is in the memory is still found.
    slot = engine.submit(now, list(range(40 * 1499, 40 * 1499 + 40)), [1])
    engine.work(now + 2.0)
    assert engine.request(slot)["hit"] == 39


def test_what_cannot_be_served_is_refused():
    engine = LiveEngine(
        flat_profile(8), max_num_seqs=1, max_num_batched_tokens=8, block_size=2, max_requests=1
    )
    with pytest.raises(ValueError, match="needs 5 KV blocks"):
        engine.submit(0.0, [1] * 9, [1, 1])
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit(0.0, [], [1])
    engine.submit(0.0, [1], [1])
    with pytest.raises(ValueError, match="takes no more"):
        engine.submit(0.0, [1], [1])
