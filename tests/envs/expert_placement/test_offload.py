"""Servers that cache experts: equal to the slow reference, and known answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servegym.envs.expert_placement.cluster import build_cluster
from servegym.envs.expert_placement.simulator import (
    CACHES,
    ROUTERS,
    Requests,
    Simulator,
    make_prompts,
)

from .reference import COMPILED
from .reference_offload import Offload
from .test_kernel_reference import (
    random_cluster,
    random_forecast,
    random_placement,
    random_prompts,
    random_requests,
    run_beside,
    small_model,
)


@settings(max_examples=24 if COMPILED else 6, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["nic", "pairwise"]),
    st.sampled_from(list(CACHES)),
    st.sampled_from(list(ROUTERS)),
    st.booleans(),
)
def test_equal_to_the_reference_at_every_look(seed, link_model, cache, router, tight):
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, link_model=link_model)
    prompts = random_prompts(rng, cluster)
    requests = random_requests(rng, cluster, prompts, 25, 0.3)
    placement = random_placement(rng, cluster)
    options = {"cache": cache, "router": router, "forecast": random_forecast(rng, prompts)}
    sim = Simulator(cluster, prompts, serving="offload", **options)
    sim.begin(requests, placement)
    ref = Offload(cluster, prompts, requests, placement, **options)
    run_beside(rng, cluster, sim, ref, 0.1 if tight else 1.0)
    assert (sim.cache.ready == 0).all() and sim.state.meta["free"][0] == len(sim.state.free)
    server = sim.state.server
    assert server["in_system"].sum() == server["serving"].sum() == 0
    outputs = requests.outputs - 1
    tokens = (prompts.tokens[requests.prompt] + outputs).sum() * cluster.layers * cluster.top_k
    assert server["all_local_tokens"].sum() + server["all_remote_tokens"].sum() == tokens
    if router == "home":
        assert sim.state.meta["messages"][0] == 0, "servers have nothing to say to each other"


DENSE, CALL = 1e-3 + 1e-5, 2e-3 + 1e-4


def run(sets, times, cache="lru", **options):
    """Requests of one token at server 0, each for an expert; GPU 0 begins with experts 0 and 1."""
    cluster = build_cluster(
        sizes=small_model(layers=1, experts=4, top_k=1),
        gpus=(1, 1),
        slots=(2, 2),
        message_cost_s=0.1,
        latency_s=0.5,
        nic_bps=32.0,
    )
    counts = np.zeros((4, 1, 4), np.int32)
    counts[np.arange(4), 0, np.arange(4)] = 1
    bank = (np.uint64(1) << np.arange(4, dtype=np.uint64)).reshape(4, 1)
    prompts = make_prompts(np.ones(4, int), counts, bank, np.arange(5), 1)
    ones = np.ones(len(sets), int)
    requests = Requests(0 * ones, np.array(times, float), np.array(sets), ones, 0 * ones)
    sim = Simulator(cluster, prompts, serving="offload", cache=cache, **options)
    sim.begin(requests, np.array([[[1, 1, 0, 0]], [[0, 0, 0, 0]]], np.uint8))
    sim.run()
    load = cluster.expert_bytes / cluster.pcie_bytes_s + 0.1
    return sim, sim.latencies(), load


def test_a_miss_costs_a_fetch():
    sim, latency, load = run([0, 2, 2], [0.0, 10.0, 20.0])
    np.testing.assert_allclose(latency, [DENSE + CALL, DENSE + load + CALL, DENSE + CALL])
    assert np.flatnonzero(sim.state.resident[0]).tolist() == [0, 2], "1 was never used"
    assert sim.state.meta["loads"][0] == sim.state.meta["drops"][0] == 1
    server = sim.state.server[0]
    assert (server["all_local_calls"], server["all_remote_calls"]) == (2, 1)


def test_requests_go_to_the_server_that_serves_fewest():
    """The second finds its server busy; 4 bytes at 4 bytes/s, 0.1 s a message, 0.5 s latency."""
    sim, latency, load = run([0, 0, 0], [0.0, 0.0, 0.0], router="fewest_requests")
    away = 1.0 + 0.1 + 0.5 + DENSE + load + CALL + 1.0 + 0.1 + 0.5
    # With one request on each server the third stays and shares the GPU with the first.
    np.testing.assert_allclose(latency, [2 * DENSE + CALL, away, 2 * DENSE + 2 * CALL])
    assert sim.state.meta["messages"][0] == 2 and sim.state.meta["network_bytes"][0] == 8.0
    first = sim.state.request["first"][1]
    assert first == pytest.approx(away - 1.1)
    np.testing.assert_array_equal(sim.state.server["arrived"], [3, 0])
