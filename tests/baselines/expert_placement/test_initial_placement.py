"""The search for one good placement: the estimate by hand, what annealing keeps, fingerprints."""

import numpy as np
import pytest

from servegym.baselines.expert_placement.heuristics import uniform
from servegym.baselines.expert_placement.initial_placement import TOKENS, LinkQueueModel
from servegym.baselines.expert_placement.kernel.link_queues import (
    CALLS,
    anneal,
    count_bits,
    remote_calls,
)
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.workloads.expert_sets import bit_sets


def toy(**kwargs):
    problem = build_problem(**{"model": "toy", "action_mode": "placement", **kwargs})
    return PlacementSystem.from_problem(problem)


def cost(about, held, wait):
    """The estimate, which no step of annealing changes."""
    return anneal(about.tables, bit_sets(held), wait, 0, 1.0, 1.0, 0)


@pytest.mark.parametrize("messages", ["per_server", "per_expert"])
def test_what_tokens_do_elsewhere_is_what_sets_say(messages):
    about = LinkQueueModel(toy(cluster_kwargs={"messages": messages}))
    tables, rng = about.tables, np.random.default_rng(0)
    held = rng.random((3, 4, 8)) < 0.5
    held[2] |= ~held.any(axis=0)
    masks = bit_sets(held)
    for n in range(3):
        order = tables.near[n]
        assert order[0] == n
        for layer in range(4):
            want = np.zeros((3, 4))
            for row in tables.rows[n, layer]:
                missing = {e for e in range(8) if (int(row) >> e) & 1 and not held[n, layer, e]}
                for m in order[1:]:
                    there = {e for e in missing if held[m, layer, e]}
                    missing -= there
                    if there:
                        want[m, 0] += 1 / TOKENS
                        want[m, 1] += (len(there) if messages == "per_expert" else 1) / TOKENS
                        farthest = m
                if any((int(row) >> e) & 1 and not held[n, layer, e] for e in range(8)):
                    want[farthest, 2] += 1 / TOKENS
            out = np.empty(3, CALLS)
            remote_calls(tables, n, layer, masks, out)
            out = np.array(out.tolist())
            np.testing.assert_allclose(out[:, :3], want[:, :3])
    assert count_bits(np.uint64(0xFFFF_0000_0000_0001)) == 17


def test_one_remote_server_by_hand():
    """All of layer 0 of server 0 is at server 1: a round trip a step and no queue."""
    system = toy(
        cluster_kwargs={
            "gpus": [1, 1],
            "slots": [32, 32],
            "nic_bps": [3e8, 2e8],
            "latency_s": 0.002,
        }
    )
    about = LinkQueueModel(system)
    held = np.ones((2, 4, 8), bool)
    assert cost(about, held, 0.3) == 0
    held[0, 0] = False
    tables, (_, tokens, _, decodes) = about.tables, about.tables.load[0]
    both = tables.token[0, 1] + tables.token[1, 0]
    step = tables.delay[0, 1] + 2 * tables.cost
    want = decodes * (step + both) + step + tokens * both
    assert cost(about, held, 0.0) == pytest.approx(want / 2)  # half of the requests
    assert cost(about, held, 1.0) > cost(about, held, 0.3) > cost(about, held, 0.0)


@pytest.mark.slow
def test_annealing_lowers_the_estimate_and_keeps_memory_and_coverage():
    system = toy()
    about = LinkQueueModel(system)
    cluster = system.cluster
    start = cluster.server_view(uniform(about.counts, cluster.slots, cluster.gpu_server))
    found = about.anneal(start, 0.3, 4_000, 0)
    assert cost(about, found, 0.3) < 0.8 * cost(about, start, 0.3)
    assert (found.sum(axis=(1, 2)) == start.sum(axis=(1, 2))).all() and found.any(axis=0).all()
    np.testing.assert_array_equal(found, about.anneal(start, 0.3, 4_000, 0))


def test_fingerprints_differ_by_what_a_start_depends_on():
    problem = build_problem(scenario="edge_hetero", split="eval", epochs=3)

    def setting(problem):
        return PlacementSystem.from_problem(problem).setting

    digits = setting(build_problem(scenario="edge_hetero"))
    assert setting(problem) == digits
    here = {"scenario": "edge_hetero"}
    others = [
        {"scenario": "drift"},
        {"scenario": "paper_testbed"},
        {"scenario": "edge_decode"},
        {"mean_interarrival_s": 5.0},
        {"model": "toy"},
        here | {"tasks": ("law", "summary", "translation")},
        here | {"cluster_kwargs": {"link_model": "pairwise"}},
        here | {"cluster_kwargs": {"pcie_bytes_s": 24e9}},
        here | {"cluster_kwargs": {"gpu_speed": 0.5}},
    ]
    found = {setting(build_problem(**kwargs)) for kwargs in others}
    assert len({digits, *found}) == 1 + len(others)
