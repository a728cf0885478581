"""The gateway's kernel against plain Python objects, and against examples worked by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from servegym.envs.prefix_routing.gateway import (
    GROWING,
    INDEXES,
    blank,
    gateway_config,
    load,
    prompts,
    sizes,
)
from servegym.envs.prefix_routing.kernel.gateway import (
    COMPLETION,
    FIRST_TOKEN,
    forget,
    look_up,
    scraped,
    sent,
    take_events,
    take_news,
)
from servegym.envs.prefix_routing.kernel.observation import (
    OF_REPLICA,
    REPLICA_HIGH,
    REPLICA_LOW,
    REQUEST_HIGH,
    SEEN_REPLICA,
    SEEN_REQUEST,
    observe,
)

from . import reference_gateway as twin
from .reference import requests_with

DECIDE, SEND, NEWS, EVENTS, SCRAPE, DOWN, UP = range(7)
NEWS_RECORD = np.dtype((np.record, [("time", "f8"), ("request", "i4"), ("kind", "i4")]))
EVENT_RECORD = np.dtype(
    (np.record, [("time", "f8"), ("replica", "i4"), ("id", "i4"), ("change", "i8")])
)
OUTPUT_RECORD = np.dtype((np.record, [("output", "i4")]))


@njit(error_model="numpy")  # not cached, as the cache would not notice an edit of the kernel
def run(g, b, steps, news, events, outputs, shown, asked, columns, asked_columns):
    """Apply the steps (code, request, replica, seconds, number, number, number) one by one."""
    seen = 0
    for i in range(len(steps)):
        code, j, n = int(steps[i, 0]), int(steps[i, 1]), int(steps[i, 2])
        now = steps[i, 3]
        if code == DECIDE:
            look_up(g, b, j, now)
            observe(g, b, j, now, shown[seen], asked[seen], columns[seen], asked_columns[seen])
            seen += 1
        elif code == SEND:
            sent(g, b, j, n, now)
        elif code == NEWS:
            take_news(g, b, news, j, outputs)
        elif code == EVENTS:
            take_events(g, b, events, j, now)
        elif code == SCRAPE:
            scraped(g, b, n, now, int(steps[i, 4]), int(steps[i, 5]), steps[i, 6])
        elif code == DOWN:
            forget(g, b, n, now)
        else:
            g.replica[b, n].up = 1


class Script:
    """Steps for `run`, and what happened in them."""

    def __init__(self):
        self.steps, self.news, self.events = [], [], []

    def add(self, code, j=0, n=0, now=0.0, *numbers):
        self.steps.append((code, j, n, now, *numbers, *([0] * (3 - len(numbers)))))

    def run(self, g, requests, replicas, row=0):
        decisions = sum(step[0] == DECIDE for step in self.steps)
        shown = np.zeros((decisions, replicas), SEEN_REPLICA)
        asked = np.zeros(decisions, SEEN_REQUEST)
        columns = shown.view(np.float32).reshape(decisions, replicas, -1)
        seen = shown, asked, columns, asked.view(np.float32).reshape(decisions, -1)
        events = np.array(self.events or [(0, 0, 0, 0)], EVENT_RECORD)
        outputs = np.zeros(len(requests.output_tokens), OUTPUT_RECORD)
        outputs["output"] = requests.output_tokens
        news = np.array(self.news, NEWS_RECORD) if self.news else np.zeros(1, NEWS_RECORD)
        run(g, row, np.array(self.steps, np.float64), news, events, outputs, *seen)
        return seen[2:]


def allocate(config, replicas, episodes):
    """A gateway for each of the episodes, with room for any of them."""
    g = blank(config, len(episodes), replicas, max(e.requests.num_requests for e in episodes))
    wanted = [sizes(episode) for episode in episodes]
    grown = {}
    for name in GROWING:
        array, most = getattr(g, name), max(each[name] for each in wanted)
        if name != "key_of_id" or INDEXES[config["index"]] == "precise":
            grown[name] = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, most)])
    return g._replace(**grown)


def requests_of(ids, prompt, output, block_size, **columns):
    """Requests with the given block ids, as segments of consecutive ones."""
    segments = []
    for blocks in ids:
        segments.append([])
        for block in blocks:
            if segments[-1] and sum(segments[-1][-1]) == block:
                segments[-1][-1][1] += 1
            else:
                segments[-1].append([block, 1])
    columns["turn"] = np.arange(len(ids))
    return requests_with(prompt, output, segments, block_size, **columns).check()


def random_requests(rng, count, block_size):
    """Prompts that extend prefixes of earlier ones; ids in no order, so segments are short."""
    names = iter(rng.permutation(20 * count) + 5)
    ids, prompt, output = [], [], []
    for _ in range(count):
        before = ids[rng.integers(len(ids))] if ids and rng.random() < 0.8 else []
        shared = before[: rng.integers(len(before) + 1)]
        least = 2 if block_size == 1 else 1  # blocks, of two tokens or more
        new = rng.integers(max(least - len(shared), 0), 7)
        ids.append(shared + [int(next(names)) for _ in range(new)])
        tokens = len(ids[-1]) * block_size + int(rng.integers(0, block_size))
        prompt.append(int(rng.integers(max(tokens - 2 * block_size, 1), tokens)))
        output.append(tokens - prompt[-1])
    session, tenant = 3 * rng.integers(0, 5, count), 7 * rng.integers(0, 3, count)
    return requests_of(ids, prompt, output, block_size, session=session, tenant=tenant)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    index=st.sampled_from(INDEXES),
    block_size=st.sampled_from([1, 4, 16]),
    entry_blocks=st.integers(1, 3),
    strict=st.booleans(),
    replicas=st.integers(1, 4),
    capacity=st.integers(1, 12),
    delay_s=st.sampled_from([0.0, 0.7, 3.0]),
    failures=st.booleans(),
)
def test_kernel_equals_plain_objects(
    seed, index, block_size, entry_blocks, strict, replicas, capacity, delay_s, failures
):
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 40, block_size)
    precise = index == "precise"
    if precise:
        entry_blocks, strict = 1, True
    given = {"index": index, "strict": strict, "smoothing": 0.3}
    size = {"block_size": block_size, "entry_tokens": entry_blocks * block_size}
    config = gateway_config(**given, **size, index_delay_s=delay_s, heat_s=5.0)
    speed, kv = rng.uniform(5, 50, replicas), rng.integers(50, 200, replicas)
    reference = twin.Gateway(
        requests,
        [twin.Replica(capacity, speed[n], int(kv[n]), 8 + n) for n in range(replicas)],
        **given,
        entry_blocks=entry_blocks,
        delay_s=delay_s,
    )
    episode = prompts(config, requests)
    other = prompts(config, random_requests(rng, 50, block_size))
    g = allocate(config, replicas + 1, [other, episode])  # room for more than is needed
    row = {"predicted": 9.0, "ttft_slo_s": 0.5, "tpot_slo_s": 0.04}
    cards = {"speed": speed, "kv_tokens": kv, "max_num_seqs": 8 + np.arange(replicas)}
    cards["capacity"] = capacity
    load(g, 1, episode, **row, replicas=cards)
    script, expected, now = Script(), [], 0.0
    cached = [[] for _ in range(replicas)]
    for j in range(requests.num_requests):
        before, now = now, now + rng.exponential()
        for n in rng.permutation(replicas):
            p = reference.replicas[n]
            for t in sorted(rng.uniform(before, now, rng.integers(0, 4))):
                waiting = [i for i, (_, seen) in p.in_flight.items() if not seen]
                decoding = [i for i, (_, seen) in p.in_flight.items() if seen]
                if waiting and rng.random() < 0.6:
                    script.news.append((t, waiting[0], FIRST_TOKEN))
                    reference.first_token(waiting[0], n, t)
                elif decoding:
                    script.news.append((t, decoding[0], COMPLETION))
                    reference.complete(decoding[0], n, t)
            for t in sorted(rng.uniform(before, now, rng.integers(0, 6) if precise and j else 0)):
                blocks = requests.block_ids(int(rng.integers(j)))
                if cached[n] and rng.random() < 0.3:
                    block = cached[n].pop(rng.integers(len(cached[n])))
                    script.events.append((t, n, block, -1))
                elif len(blocks):
                    cached[n].append(int(rng.choice(blocks)))
                    script.events.append((t, n, cached[n][-1], 1))
            if failures and rng.random() < 0.05:
                script.add(NEWS, len(script.news))
                script.add(EVENTS, len(script.events), 0, now)
                script.add(DOWN, 0, n, now)
                reference.events = list(script.events)
                reference.down(n, now)
                cached[n] = []
            elif not p.up and rng.random() < 0.5:
                script.add(UP, 0, n)
                p.up = True
        if rng.random() < 0.5:
            reference.scraped_s = now
            for n in range(replicas):
                metrics = (int(rng.integers(9)), int(rng.integers(9)), float(rng.random()))
                script.add(SCRAPE, 0, n, now, *metrics)
                reference.replicas[n].metrics = metrics
        script.add(NEWS, len(script.news))
        script.add(EVENTS, len(script.events), 0, now)
        script.add(DECIDE, j, 0, now)
        reference.events = list(script.events)
        expected.append(reference.observe(j, now, 5.0))
        up = [n for n in range(replicas) if reference.replicas[n].up]
        chosen = int(rng.choice(up)) if up and rng.random() < 0.9 else -1
        script.add(SEND, j, chosen, now)
        reference.send(j, chosen, now)
    seen, asked = script.run(g, requests, replicas + 1, row=1)
    assert not seen[:, replicas].any()
    np.testing.assert_array_equal(seen[:, :replicas], np.stack([rows for rows, _ in expected]))
    prompt, turn, gap, heat = np.array([row for _, row in expected], np.float32).T
    columns = [prompt, np.full(40, 9.0), turn, gap, heat, np.full(40, 0.5), np.full(40, 0.04)]
    np.testing.assert_allclose(asked, np.stack(columns, 1), rtol=1e-6, atol=1e-6)
    assert (seen >= REPLICA_LOW).all() and (seen <= REPLICA_HIGH).all()
    assert (asked >= 0).all() and (asked <= REQUEST_HIGH).all()


# Blocks of 64 tokens: prompts of 2 blocks (1, 2), of 3 (1, 2, 3), of one (9), and (1, 2, 3) again.
CHAINS = requests_of([[1, 2], [1, 2, 3], [9], [1, 2, 3]], [128, 192, 64, 192], [10] * 4, 64)
MATCH = OF_REPLICA["match_tokens"]


def loaded():
    config = gateway_config(index="precise", block_size=64)
    g = allocate(config, 2, [prompts(config, CHAINS)])
    row = {"predicted": 10, "ttft_slo_s": 1.0, "tpot_slo_s": 0.1}
    cards = {"speed": 100.0, "kv_tokens": [16 * 64] * 2, "max_num_seqs": 4, "capacity": 1}
    load(g, 0, prompts(config, CHAINS), **row, replicas=cards)
    return g


def test_events_of_a_lost_cache_and_of_an_overrun_ring_do_not_count():
    script = Script()
    script.events = [(1.0, 0, 1, 1), (2.0, 0, 2, 1), (4.0, 0, 1, 1)]
    script.add(DOWN, 0, 0, 3.0)
    script.add(EVENTS, 3, 0, 9.0)
    script.add(DECIDE, 0, 0, 9.0)
    seen, _ = script.run(loaded(), CHAINS, 2)
    assert seen[..., MATCH].tolist() == [[64, 0]]
    assert seen[..., OF_REPLICA["up"]].tolist() == [[0, 1]]
    # A ring of 3 after 5 events: the two that hold the first were overwritten.
    script.steps.pop(0)
    script.steps[0] = (EVENTS, 5, 0, 9.0, 0, 0, 0.0)
    g = loaded()
    assert script.run(g, CHAINS, 2)[0][..., MATCH].tolist() == [[128, 0]]
    assert g.row["missed"].tolist() == [2]
