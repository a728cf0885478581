"""The jitted engine against the slow reference, event for event, and against known answers."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servegym.envs.expert_placement.cluster import ModelTimes, build_cluster
from servegym.envs.expert_placement.kernel.calls import scramble
from servegym.envs.expert_placement.kernel.events import rise, sink
from servegym.envs.expert_placement.simulator import (
    EXECUTIONS,
    ROUTERS,
    Forecast,
    Requests,
    Simulator,
    make_prompts,
    uniform_placement,
)

from .reference import COMPILED, Reference


def small_model(layers=3, experts=6, top_k=2, base=2e-3, token=1e-4, dense=1e-3):
    return ModelTimes(layers, experts, top_k, 512, 3_300_000, 0.0, 1.0, base, token, dense, 1e-5)


def random_prompts(rng, cluster, count=5, rows=7):
    layers, experts, k = cluster.layers, cluster.experts, cluster.top_k
    tokens = rng.integers(1, 40, count)
    start = np.concatenate([[0], np.cumsum(rng.integers(1, rows + 1, count))])
    bank = np.zeros((start[-1], layers), np.uint64)
    counts = np.zeros((count, layers, experts), np.int32)
    weights = rng.gamma(0.6, size=(count, layers, experts)) + 1e-3
    for p in range(count):
        for layer in range(layers):
            chance = weights[p, layer] / weights[p, layer].sum()
            for row in range(start[p], start[p + 1]):
                chosen = rng.choice(experts, k, replace=False, p=chance)
                bank[row, layer] = sum(1 << int(e) for e in chosen)
            for _ in range(tokens[p]):
                counts[p, layer, rng.choice(experts, k, replace=False, p=chance)] += 1
    return make_prompts(tokens, counts, bank, start, k)


def random_requests(rng, cluster, prompts, count, span):
    return Requests(
        home=rng.integers(0, cluster.num_servers, count),
        arrival=np.sort(rng.uniform(0, span, count)),
        prompt=rng.integers(0, len(prompts.tokens), count),
        outputs=rng.integers(1, 6, count),
        offset=rng.integers(0, 50, count),
    )


def random_placement(rng, cluster):
    """A feasible placement, with copies where there is room."""
    total = cluster.layers * cluster.experts
    z = np.zeros((cluster.num_gpus, total), np.uint8)
    room = cluster.slots.copy()
    for i in rng.permutation(total):
        g = rng.choice(np.flatnonzero(room > 0))
        z[g, i] = 1
        room[g] -= 1
    for g in range(cluster.num_gpus):
        free = np.flatnonzero(z[g] == 0)
        z[g, rng.permutation(free)[: rng.integers(0, room[g] + 1)]] = 1
    return z.reshape(-1, cluster.layers, cluster.experts)


def random_forecast(rng, prompts, tasks=2):
    """A forecast that has little to do with the requests."""
    profile = rng.random((tasks, *prompts.counts.shape[1:]))
    return Forecast(rng.integers(0, tasks, len(prompts.tokens)), profile, float(rng.uniform(1, 6)))


def random_layers(rng, cluster):
    """Half of the layers whole on one server or several, the others on random GPUs."""
    z = np.zeros((cluster.num_gpus, cluster.layers, cluster.experts), np.uint8)
    for layer in range(cluster.layers):
        whole = rng.random() < 0.7
        for _ in range(int(rng.integers(1, 3)) if whole else 1):
            server = rng.integers(cluster.num_servers)
            on = np.flatnonzero((cluster.gpu_server == server) | (not whole))
            z[rng.choice(on, cluster.experts), layer, np.arange(cluster.experts)] = 1
    return z


def random_cluster(rng, **options):
    gpus = tuple(int(g) for g in rng.integers(1, 3, rng.integers(2, 5)))
    model = small_model(layers=int(rng.integers(1, 4)), experts=int(rng.integers(3, 8)))
    total = model.layers * model.experts
    each = math.ceil(total / sum(gpus))
    servers = len(gpus)
    return build_cluster(
        sizes=model,
        gpus=gpus,
        slots=[int(each + rng.integers(0, 5)) for _ in range(sum(gpus))],
        nic_bps=rng.uniform(2e6, 2e8, servers) if rng.random() < 0.7 else 5e7,
        latency_s=rng.uniform(0, 0.02, (servers, servers)) if rng.random() < 0.7 else 0.001,
        message_cost_s=float(rng.choice([0.0, 1e-3])),
        pcie_latency_s=float(rng.choice([1e-5, 1e-2])),
        gpu_speed=rng.uniform(0.5, 2.0, sum(gpus)) if rng.random() < 0.7 else 1.0,
        **options,
    )


def compare(sim, ref):
    state = sim.state
    assert sim.now == ref.now
    assert state.meta["events"][0] == len(ref.trace)
    assert state.meta["loads"][0] == ref.loads
    for name in ("first", "finish"):
        mine = state.request[name]
        np.testing.assert_array_equal(mine, [getattr(r, name) for r in ref.requests])
    np.testing.assert_array_equal(state.gpu["free"], [g.queue.free for g in ref.gpus])
    for g in ref.gpus:
        assert set(np.flatnonzero(state.resident[g.number])) == g.holds
    for key, lane in ref.links.items():
        at = key if not isinstance(key, tuple) else key[0] * sim.cluster.num_servers + key[1]
        assert state.link["free"][at] == lane.free
    for (n, i), x in ref.counts.items():
        assert state.counts[n, i] == x
    assert state.counts.sum() == sum(ref.counts.values())
    assert state.server["serving"].tolist() == [len(served) for served in ref.serving]
    for n in range(sim.cluster.num_servers):
        v = state.server[n]
        for mine, theirs in ((v["local_s"], ref.local), (v["remote_s"], ref.remote)):
            assert mine == pytest.approx(theirs[n][0], rel=1e-9, abs=1e-12)
        assert (v["local_tokens"], v["remote_tokens"]) == (ref.local[n][1], ref.remote[n][1])
        assert [v["layer_steps"], v["remote_layer_steps"]] == ref.steps[n]
    assert state.meta["network_bytes"][0] == pytest.approx(ref.bytes)
    if sim.cache is None:
        compare_calls(sim, ref)
    else:
        compare_caches(sim, ref)


def compare_calls(sim, ref):
    """What servers that help each other have besides."""
    gpu = sim.state.gpu
    np.testing.assert_array_equal(gpu["promised_calls"], [g.queue.coming for g in ref.gpus])
    np.testing.assert_allclose(gpu["promised"], [g.queue.promised for g in ref.gpus], atol=1e-12)
    np.testing.assert_array_equal(gpu["used"], [g.used for g in ref.gpus])
    shape = sim.cluster.layers, sim.cluster.experts
    for g in ref.gpus:
        layers = sim.state.resident[g.number].reshape(shape).tolist()
        sets = [sum(on << e for e, on in enumerate(layer)) for layer in layers]
        assert sim.state.held[:, g.number].tolist() == sets


def compare_caches(sim, ref):
    """What servers that cache experts have besides."""
    gpu, ready = sim.state.gpu, sim.cache.ready
    np.testing.assert_array_equal(gpu["channel_free"], [c.channel for c in ref.caches])
    for g, cache in zip(ref.gpus, ref.caches, strict=True):
        coming = {int(i): ready[g.number, i] for i in np.flatnonzero(ready[g.number])}
        assert coming == cache.coming
        assert gpu["used"][g.number] == len(g.holds) + len(coming) <= g.slots


def build_pair(seed, link_model, messages, choice, source, span=0.3, **options):
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, link_model=link_model, messages=messages)
    prompts = random_prompts(rng, cluster)
    requests = random_requests(rng, cluster, prompts, 25, span)
    placement = random_placement(rng, cluster)
    candidates = int(rng.integers(1, 5))
    if options:
        options["forecast"] = random_forecast(rng, prompts)
    if options.get("execution") == "forward":
        room = np.full(cluster.num_gpus, cluster.layers * cluster.experts)
        cluster = dataclasses.replace(cluster, slots=room)
        placement = random_layers(rng, cluster)
    chosen = {"replica_choice": choice, "replica_candidates": candidates}
    sim = Simulator(cluster, prompts, migration_source=source, **chosen, **options)
    sim.begin(requests, placement)
    options |= {"choice": choice, "candidates": candidates, "source": source}
    ref = Reference(cluster, prompts, requests, placement, **options)
    ref.path_of = lambda number: sim.state.path[number].tolist()
    return rng, cluster, sim, ref


@settings(max_examples=30 if COMPILED else 6, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["nic", "pairwise"]),
    st.sampled_from(["per_expert", "per_server"]),
    st.sampled_from(["least_finish", "nearest", "random", "consolidate"]),
    st.sampled_from(["host", "network"]),
)
def test_equal_to_the_reference_at_every_look(seed, link_model, messages, choice, source):
    messages = "per_server" if choice == "consolidate" else messages
    run_beside(*build_pair(seed, link_model, messages, choice, source))


@settings(max_examples=24 if COMPILED else 6, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["nic", "pairwise"]),
    st.sampled_from(["per_expert", "per_server"]),
    st.sampled_from(list(ROUTERS)),
    st.sampled_from(list(EXECUTIONS)),
)
def test_requests_that_leave_their_server(seed, link_model, messages, router, execution):
    options = {"router": router, "execution": execution}
    pair = build_pair(seed, link_model, messages, "least_finish", "host", **options)
    run_beside(*pair)


def run_beside(rng, cluster, sim, ref, span=1.0):
    """Run both to the end and compare at every look; without caches placements change."""
    for until in np.sort(rng.uniform(0, span, 6)):
        sim.run(until)
        ref.run(until)
        compare(sim, ref)
        if sim.cache is None and rng.random() < 0.6:
            draw = random_layers if sim.state.path.size else random_placement
            placement = draw(rng, cluster)
            sim.adopt(placement)
            ref.adopt(placement)
            compare(sim, ref)
    sim.run()
    ref.run()
    compare(sim, ref)
    assert not ref.heap and not np.isnan(sim.latencies()).any()
    if sim.cache is None:
        np.testing.assert_array_equal(sim.placement(), sim.target())
        assert sim.state.meta["fewest_copies"][0] >= 1
    assert (sim.state.gpu["promised"] == 0).all() and (sim.state.link["returning"] == 0).all()
    total = sum(r.finish - r.arrival for r in ref.requests)
    assert sim.state.server["area"].sum() == pytest.approx(total)
    assert (sim.state.gpu["peak"] <= cluster.slots + (sim.cache is None)).all()


def test_more_messages_than_places_lose_nothing():
    rng = np.random.default_rng(0)
    cluster = random_cluster(rng)
    prompts = random_prompts(rng, cluster)
    requests = random_requests(rng, cluster, prompts, 200, 0.01)
    few, many = Simulator(cluster, prompts), Simulator(cluster, prompts)
    many._places = 5000
    for sim in (few, many):
        sim.begin(requests, uniform_placement(cluster))
        sim.run()
    assert len(few.state.free) > 4 * cluster.experts, "the pool was meant to grow"
    np.testing.assert_array_equal(few.latencies(), many.latencies())
    assert few.state.meta["free"][0] == len(few.state.free)


def test_a_copied_state_goes_on_alike():
    options = {"router": "affinity", "execution": "forward"}
    rng, cluster, sim, _ = build_pair(11, "nic", "per_server", "least_finish", "network", **options)
    sim.run(0.1)
    sim.adopt(random_placement(rng, cluster))
    sim.run(0.15)
    copy = sim.clone()
    sim.run()
    first = sim.latencies()
    sim.restore(copy)
    sim.run()
    np.testing.assert_array_equal(first, sim.latencies())


def one_prompt(cluster, tokens, sets):
    """One prompt whose tokens all take the experts ``sets[layer]``."""
    counts = np.zeros((1, cluster.layers, cluster.experts), np.int32)
    bank = np.zeros((1, cluster.layers), np.uint64)
    for layer, chosen in enumerate(sets):
        counts[0, layer, list(chosen)] = tokens
        bank[0, layer] = sum(1 << e for e in chosen)
    return make_prompts([tokens], counts, bank, [0, 1], cluster.top_k)


def requests_at(times, home=0, outputs=1):
    count = len(times)
    zero = np.zeros(count, np.int64)
    return Requests(zero + home, np.asarray(times, float), zero, zero + outputs, zero)


def test_what_arrives_at_an_instant_comes_before_what_ends_then():
    """The second request arrives when the first one's first layer ends, and goes before it."""
    cluster = build_cluster(sizes=small_model(), gpus=(1,), slots=(18,))
    prompts = one_prompt(cluster, 10, [(0, 1), (2, 3), (4, 5)])
    sim = Simulator(cluster, prompts)
    z = np.ones((1, 3, 6), np.uint8)

    def latencies(at, until=np.inf):
        sim.begin(requests_at([0.0, at]), z)
        sim.run(until)
        return sim.latencies()

    layer = latencies(9.0)[0] / 3
    sim.begin(requests_at([0.0]), z)
    end = 0.0
    sim.run(end)
    for _ in range(9):  # the time at which the layer ends, to the last bit
        if sim.state.request["layer"][0] == 0:
            end = float(sim.state.event_time[:1].view(np.float64)[0])
            sim.run(end)
    assert end == pytest.approx(layer)
    before, same, after = (
        latencies(at) for at in (np.nextafter(end, 0), end, np.nextafter(end, 1))
    )
    assert same == pytest.approx(before, rel=1e-9) and same != pytest.approx(after, rel=1e-3)
    latencies(0.5, until=0.5)
    assert sim.state.meta["next_request"][0] == 2, "an epoch has what comes exactly at its end"


SLOW = {"nic_bps": (8e6, 4e6), "latency_s": 0.5, "message_cost_s": 0.1}
SLOW |= {"gpus": (1, 1), "pcie_bytes_s": 1e6, "pcie_latency_s": 0.01}


@pytest.mark.parametrize("messages", ["per_expert", "per_server"])
def test_a_remote_call_by_hand(messages):
    """Token by token: out, latency, staging, GPU, staging, back, latency."""
    model = small_model(layers=1, experts=3)
    cluster = build_cluster(sizes=model, slots=(1, 2), messages=messages, **SLOW)
    prompts = one_prompt(cluster, 10, [(1, 2)])
    z = np.array([[[1, 0, 0]], [[0, 1, 1]]], np.uint8)
    sim = Simulator(cluster, prompts)
    sim.begin(requests_at([0.0]), z)
    sim.run()
    dense, call = 1e-3 + 10e-5, 2e-3 + 10e-4
    out, back = 10 * 1024 * 8 / 8e6 + 0.1, 10 * 1024 * 8 / 4e6 + 0.1
    stage = 10 * 1024 / 1e6 + 0.01
    if messages == "per_server":
        # One message with each token once; both experts one after the other.
        want = dense + out + 0.5 + stage + 2 * call + stage + back + 0.5
        assert sim.state.meta["messages"][0] == 1
    else:
        # The second message waits for the first on the way out, its answer on the way back.
        first_back = dense + out + 0.5 + stage + call + stage + back
        want = max(first_back, dense + 2 * out + 0.5 + stage + call + stage) + back + 0.5
        assert sim.state.meta["messages"][0] == 2
    assert sim.latencies()[0] == pytest.approx(want, rel=1e-12)


def test_a_queue_behind_the_staging_does_not_count():
    """The nearer of two GPUs is busy until the call's data are on it."""
    model = small_model(layers=1, experts=2, top_k=1, base=0.05, token=0.0, dense=0.0)
    far = [[0.0, 0.01, 0.02], [0.01, 0.0, 0.02], [0.02, 0.02, 0.0]]
    links = {"nic_bps": 1e9, "latency_s": np.array(far), "pcie_latency_s": 0.04}
    cluster = build_cluster(sizes=model, gpus=(1, 1, 1), slots=(1, 1, 1), **links)
    sim = Simulator(cluster, one_prompt(cluster, 1, [(1,)]))
    requests = requests_at([0.0, 0.0], home=np.array([1, 0]))
    sim.begin(requests, np.array([[[1, 0]], [[0, 1]], [[0, 1]]], np.uint8))
    sim.run()
    assert sim.latencies()[1] == pytest.approx(0.01 + 0.04 + 0.05 + 0.04 + 0.01, abs=5e-3)


def two_servers(layers=2, top_k=1, **options):
    """Two servers of one GPU, 8 Mbit/s one way and 4 the other, 0.5 s latency, 0.1 s a message."""
    model = small_model(layers=layers, experts=2, top_k=top_k)
    return build_cluster(sizes=model, slots=(2 * layers, 2 * layers), **SLOW, **options)


def before_requests(source, gpus, placement, **links):
    """A system with two experts of 3.3 MB in its one layer, long before its first request."""
    model = small_model(layers=1, experts=2, top_k=1)
    cluster = build_cluster(sizes=model, gpus=gpus, slots=(2,) * sum(gpus), **links)
    sim = Simulator(cluster, one_prompt(cluster, 1, [(0,)]), migration_source=source)
    sim.begin(requests_at([1000.0]), np.array(placement, np.uint8)[:, None])
    return sim


@pytest.mark.parametrize(("first", "second", "to"), list(itertools.permutations(range(3))))
@pytest.mark.parametrize("far", [None, 0, 1, 2])
def test_weights_come_from_the_nearest_server_and_of_equals_from_the_first(first, second, to, far):
    """A GPU has an expert from the start, another loads it from there, then the third one does."""
    latency = np.full((3, 3), 0.01)
    if far is not None:
        latency[far] = 0.02
    z = np.ones((3, 2), np.uint8)
    z[[second, to], 0] = 0
    sim = before_requests("network", (1, 1, 1), z, latency_s=latency)
    for k, expert in ((second, 0), (to, 0)):
        z[k, expert] = 1
        sim.adopt(z[:, None])
        sources = sim.state.gpu["source"].copy()
        sim.run(sim.state.meta["now"][0] + 10.0)
        if k == second:
            assert sources[k] == first
    assert sources[to] == min((first, second), key=lambda s: (latency[s, to], s))
    assert (sim.placement() == 1).all()


@pytest.mark.parametrize(("source", "sent"), [("host", 0), ("network", 2)])
def test_a_migration_moves_the_bytes_of_its_loads(source, sent):
    """Of three GPUs that load an expert one has it in its own server."""
    sim = before_requests(source, (2, 1, 1), [[1, 1], [0, 1], [0, 1], [0, 1]])
    for until in (10.0, 20.0):  # the second time there is nothing to do
        sim.adopt(np.ones((4, 1, 2), np.uint8))
        sim.run(until)
        assert (sim.placement() == 1).all() and sim.state.meta["loads"][0] == 3
        assert sim.state.meta["weight_bytes"][0] == 3 * 3_300_000
        assert sim.state.meta["network_bytes"][0] == sent * 3_300_000


def forecast_of(prompts, output_tokens=2.0):
    """What is predicted of a prompt is what it does."""
    share = prompts.counts / prompts.counts.sum(axis=(1, 2), keepdims=True)
    return Forecast(np.arange(len(share)), share, output_tokens)


def test_forwarding_by_hand():
    """Layer 0 on server 1, layer 1 on server 0: a prefill of ten tokens and one decode step."""
    cluster = two_servers()
    prompts = one_prompt(cluster, 10, [(1,), (0,)])
    z = np.zeros((2, 2, 2), np.uint8)
    z[1, 0] = z[0, 1] = 1
    sim = Simulator(cluster, prompts, execution="forward", forecast=forecast_of(prompts))
    sim.begin(requests_at([0.0], outputs=2), z)
    sim.run()
    first = 0.0
    for x in (10, 1):
        token_numbers = x * 4 * 8 / 8e6 + 0.1 + 0.5
        hidden_states = x * 1024 * 8 / 4e6 + 0.1 + 0.5 + x * 1024 / 1e6 + 0.01
        layer = 1e-3 + x * 1e-5 + 2e-3 + x * 1e-4
        first += token_numbers + layer + hidden_states + layer
        name = "first" if x == 10 else "finish"
        assert sim.state.request[name][0] == pytest.approx(first, rel=1e-12)
    assert sim.state.meta["messages"][0] == 4
    assert sim.state.meta["network_bytes"][0] == 11 * (4 + 1024)
    assert sim.state.server["all_remote_calls"].sum() == 0
    assert sim.counts()[0].sum() == 22 and sim.counts()[1].sum() == 0, "server 0 has taken it"


def test_prompts_must_fit_the_model_and_a_forecast_be_there():
    prompts = one_prompt(two_servers(), 1, [(1,), (0,)])
    for option in ({"execution": "forward"}, {"router": "affinity"}):
        with pytest.raises(ValueError, match="forecast"):
            Simulator(two_servers(), prompts, **option)
    for other in (two_servers(layers=1), two_servers(top_k=2)):
        with pytest.raises(ValueError, match="do not fit"):
            Simulator(other, prompts)


def test_ties_do_not_go_to_the_lowest_index():
    picks = np.bincount([scramble(r, e) % 4 for r in range(200) for e in range(20)])
    assert picks.min() > 800


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
def test_events_come_by_time_and_then_in_order_of_arrival(turns):
    """The heap's two ways in, with many equal times, against a sorted list."""
    heap_t, heap_k = np.zeros(64, np.int64), np.zeros(64, np.int64)
    waiting, size = [], 0
    for number, (time, out) in enumerate(turns):
        event = (np.float64(time / 4).view(np.int64), number)
        if waiting and out == 0:  # the new event in place of the first one
            assert (heap_t[0], heap_k[0]) == waiting.pop(0)
            sink(heap_t, heap_k, size, *event)
        else:
            rise(heap_t, heap_k, size, *event)
            size += 1
        waiting = sorted([*waiting, event])
        if out == 1:  # the first one leaves, the last one takes its place
            assert (heap_t[0], heap_k[0]) == waiting.pop(0)
            size -= 1
            sink(heap_t, heap_k, size, heap_t[size], heap_k[size])
    while size:
        assert (heap_t[0], heap_k[0]) == waiting.pop(0)
        size -= 1
        sink(heap_t, heap_k, size, heap_t[size], heap_k[size])
    assert not waiting
