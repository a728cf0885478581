"""The kernel against the slow literal reference: times, hits, preemptions and cache contents."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servegym.envs.llm_routing.kernel.iterations import sojourn_s
from servegym.envs.prefix_routing import kernel
from servegym.envs.prefix_routing.kernel import layout
from servegym.envs.prefix_routing.kernel.cache import used_blocks
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.prefix_routing.tables import (
    EngineArguments,
    engine_tables,
    put_replicas,
    put_requests,
)
from servegym.hardware_profiles import LawTables
from servegym.hardware_profiles.host import put_api

from ..llm_routing.reference import Api, TableLaw
from ..llm_routing.test_kernel_reference import (
    linear_law,
    no_surplus,
    profile_of,
    random_law,
    random_surplus,
)
from .reference import ReferenceSystem, Replica, requests_with

OUTCOMES = {layout.COMPLETED: "completed", layout.REJECTED: "rejected", layout.FAILED: "failed"}


def exact_law(rng: np.random.Generator) -> LawTables:
    """Times that are multiples of 2**-20 s, in whatever order they are summed: ties happen."""
    unit = 2.0**-14
    base, dense, chunk, decode, head = rng.integers(1, 4, 5) * unit
    axis = np.array([0.0, 4096.0])
    return LawTables(
        dense_tokens=axis,
        dense_s=base * 16 + dense * axis / 16,
        chunk_tokens=axis,
        context_tokens=axis,
        chunk_attention_s=chunk * (axis[:, None] + axis) / 64,
        decode_sequences=axis,
        decode_context_tokens=axis,
        decode_attention_s=np.repeat(decode * axis[:, None] / 8, 2, axis=1),
        head_sequences=axis,
        head_s=head * axis / 8,
    )


def make_requests(rng: np.random.Generator, count: int, size: int, **choices) -> PrefixRequests:
    """Prompts that share prefixes, extend one another, or are the same; few distinct contents."""
    known: dict[tuple[int, int], int] = {}
    chains: list[list[int]] = []
    prompts, outputs, parents = [], [], []
    longest = int(choices.get("longest", 12))  # blocks
    closed = choices.get("closed", rng.random() < 0.6)
    symbols = int(rng.integers(1, 4))
    for j in range(count):
        base: list[int] = []
        parent = -1
        if j and rng.random() < 0.75:
            other = int(rng.integers(max(0, j - 6), j))
            base = chains[other]
            whole = rng.random() < 0.5
            base = base[: len(base) if whole else int(rng.integers(0, len(base) + 1))]
            if closed and rng.random() < 0.7:
                parent = other
        most = int(rng.integers(1, longest + 1)) * size
        tokens = max(len(base) * size + int(rng.integers(0, 2 * size + 1)), 2)
        tokens = min(max(tokens, int(rng.integers(2, most + 2))), longest * size + size)
        if rng.random() < 0.3:
            tokens = max(tokens // size * size, 2)
        output = int(rng.integers(1, min(tokens, choices.get("output", 3 * size + 2)) + 1))
        output = min(output, tokens - 1)
        chain = base[: tokens // size]
        while len(chain) < tokens // size:
            key = (chain[-1] if chain else -1, int(rng.integers(symbols)))
            # Ids leave gaps, as renumbered ones of many sessions do.
            chain.append(known.setdefault(key, len(known) + 3 * (len(known) // 5)))
        chains.append(chain)
        prompts.append(tokens - output)
        outputs.append(output)
        parents.append(parent)
    rate = float(choices.get("rate", rng.choice([5.0, 50.0, 1000.0])))
    tick = 2.0**-10
    arrivals = np.floor(np.cumsum(rng.exponential(1 / rate, count)) / tick) * tick
    thinks = np.floor(rng.exponential(1 / rate, count) / tick) * tick
    segments = []
    for chain in chains:
        segments.append([])
        start = 0
        for k in range(1, len(chain) + 1):
            if k == len(chain) or chain[k] != chain[k - 1] + 1 or rng.random() < 0.1:
                segments[-1].append((chain[start], k - start))
                start = k
    times = {"arrival_s": arrivals, "think_s": thinks}
    return requests_with(prompts, outputs, segments, size, parent=parents, **times)


def memory_of(systems, b, n):
    """Free blocks in order of eviction, and the references of every cached one, as labelled."""
    e = systems.replica[b, n]
    capacity, first = int(e["capacity"]), int(e["first_block"])
    block = systems.block[first : first + capacity + 1]
    labels = {}
    for entry in systems.lists[int(e["first_entry"]) : int(e["first_place"])]:
        head = int(entry)
        while head >= 0:
            k, rank = head, 0
            while k != head or rank == 0:
                assert k not in labels
                labels[k] = (int(block["id"][k]), rank)
                k, rank = int(block["twin_after"][k]), rank + 1
            head = int(block["chained"][head])
    order = []
    k = int(block["after"][capacity])
    while k != capacity:
        assert block["references"][k] == 0
        order.append(labels.get(k, (-1, 0)))
        k = int(block["after"][k])
    assert len(order) == e["free"]
    return order, {label: int(block["references"][k]) for k, label in labels.items()}


def members(systems, b, start, e):
    """A linked list of requests."""
    found = []
    i = int(start)
    while i >= 0:
        found.append(i)
        i = int(systems.lists[int(e["first_link"]) + 2 * i])
    return found


def assert_same_state(systems, b, reference, where):
    for n, replica in enumerate(reference.replicas):
        e = systems.replica[b, n]
        running = members(systems, b, e["oldest"], e)
        waiting = members(systems, b, e["head"], e)
        assert running == [r.index for r in replica.running], where
        arrived = replica.waiting + [request for _, request in replica.api.passing]
        assert waiting == [r.index for r in arrived], where
        assert (e["running"], e["waiting"]) == (len(running), len(waiting)), where
        assert e["down"] == replica.down, where
        order, references = replica.memory()
        mine = memory_of(systems, b, n)
        assert mine[0] == order, where
        assert mine[1] == references, where
        assert used_blocks(e) == replica.pool.capacity - len(order)


def outages(tables, seed, n, count=400):
    """Times at which replica n goes down and comes back, in turn."""
    c = tables.config[0]
    if c["uptime_s"] == 0:
        return []
    return np.cumsum([sojourn_s(c, seed % 2**32, n, k) for k in range(count)]).tolist()


def run_case(seed: int, requests: int = 40, **choices) -> Counter:
    """One random system in the kernel and in the reference; what happened in it."""
    rng = np.random.default_rng(seed)
    pick = lambda name, options: choices.get(name, options[rng.integers(len(options))])  # noqa: E731
    n = int(pick("num_replicas", [1, 1, 2, 3]))
    size = int(pick("block_size", [1, 2, 3, 4, 7, 16]))
    running = int(pick("max_num_seqs", [1, 2, 4, 8]))
    budget = int(pick("budget", [running, running + 5, 4 * size + running, 500]))
    law = pick("law", ["exact", "exact", "linear", "random"])
    ahead = bool(choices.get("async_scheduling", False))
    host = choices.get("host", {})
    given = make_requests(rng, requests, size, **choices).check()
    need = -(-(given.prompt_tokens + given.output_tokens - 1) // size)
    profiles, laws, capacities = [], [], []
    for _ in range(n):
        tables = {"exact": exact_law, "linear": linear_law, "random": random_law}[law](rng)
        # From one request and a bit to many; with 0.8 the longest are rejected.
        room = float(pick("memory", [0.8, 1.0, 1.3, 2.0, 5.0]))
        capacity = max(int(need.max() * room), 1) + int(rng.integers(0, 3))
        mixed = 1.0 if law == "exact" else float(rng.choice([1.0, 1.7]))
        surplus = no_surplus
        if law != "exact":
            surplus = random_surplus(np.random.default_rng([seed, len(laws)]))
        room = capacity * size + int(rng.integers(0, size))
        profiles.append(profile_of(tables, room, mixed, surplus, host=host))
        laws.append(TableLaw(tables, tables.decode_attention_s * mixed, surplus))
        capacities.append(capacity)
    engine = EngineArguments(
        max_num_seqs=running,
        max_num_batched_tokens=budget,
        block_size=size,
        async_scheduling=ahead,
        failures=choices.get("failures"),
    )
    tables, capacity = engine_tables(profiles, engine, requests)
    assert capacity.tolist() == capacities
    # The second of two rows, so that every offset counts.
    b = int(rng.integers(0, 2))
    events = 50_000 if rng.random() < 0.3 else 0
    systems = layout.allocate(tables.config[0], 2, given.segments, events)
    put_replicas(systems, profiles, capacity)
    put_api(systems.replica, profiles)
    put_requests(systems, b, given)
    systems.env["failure_seed"] = seed % 2**32
    which = np.zeros(2, dtype=np.int8)
    which[b] = 1
    actions = rng.integers(-1 if rng.random() < 0.3 else 0, n, requests)
    watch = rng.random(requests) < rng.choice([0.0, 0.3, 1.0])
    exact = law == "exact" and not host
    states = []
    kernel.begin(tables, systems, which)

    def look(system, j):
        """The reference is about to route request j: so is the kernel."""
        v = systems.env[b]
        assert int(v["index"]) == j, (seed, j)
        assert v["now"] == system.now if exact else math.isclose(v["now"], system.now)
        if watch[j]:
            kernel.bring(tables, systems, b, np.nextafter(v["now"], -np.inf))
            if not ahead and not host:  # the reference's lists are those of the next step
                assert_same_state(systems, b, system, (seed, j))
            states.append(j)
        n = int(actions[j])
        sent = kernel.route(tables, systems, b, n)
        assert sent == (n >= 0 and need[j] <= capacities[n] and not replicas[n].down)

    replicas = [
        Replica(
            k,
            laws[k],
            capacities[k],
            size,
            running,
            budget,
            outages(tables, seed, k),
            ahead,
            Api(*(host.get(name, 0.0) for name in API)),
        )
        for k in range(n)
    ]
    reference = ReferenceSystem(replicas, given, lambda system, j: int(actions[j]), look)
    reference.run()
    assert systems.env["index"][b] == -1
    kernel.bring(tables, systems, b, np.inf)
    if not choices.get("failures"):  # an empty replica's failures after the end are not played
        assert_same_state(systems, b, reference, (seed, "end"))
    found = systems.request[b * requests : (b + 1) * requests]
    # The times of a run in one piece differ in their last digits, save where sums are exact.
    compare = np.testing.assert_array_equal if exact else close
    for mine, theirs in (
        ("arrived", "arrival"),
        ("admitted", "admitted"),
        ("first", "first"),
        ("finish", "finish"),
    ):
        expected = [getattr(r, theirs) for r in reference.requests]
        compare(found[mine], expected, err_msg=f"{seed}: {mine}")
    for name in ("hit", "recomputed", "preemptions"):
        expected = [getattr(r, name) for r in reference.requests]
        np.testing.assert_array_equal(found[name], expected, err_msg=f"{seed}: {name}")
    assert [OUTCOMES[int(x)] for x in found["outcome"]] == [r.outcome for r in reference.requests]
    check_news(systems, b, found)
    if events:
        told = systems.events[b, : int(systems.env["events"][b])]
        for k, replica in enumerate(replicas):
            mine = told[told["replica"] == k]
            close(mine["time"], [t for t, _, _ in replica.events], err_msg=str(seed))
            # Within an iteration the kernel looks at who takes a block before who fills one.
            assert Counter(zip(mine["id"].tolist(), mine["change"].tolist(), strict=True)) == (
                Counter((i, change) for _, i, change in replica.events)
            )
    happened: Counter = Counter(watched=len(states))
    for replica in replicas:
        happened["evictions"] += replica.pool.evictions
        happened["twins"] += replica.pool.twins
        happened["blocked"] += replica.blocked
        happened["full_hits"] += replica.full_hits
        happened["same_step_hits"] += replica.same_step_hits
    happened["preemptions"] = int(found["preemptions"].sum())
    happened["recomputed"] = int(found["recomputed"].sum())
    happened["hits"] = int((found["hit"] > 0).sum())
    happened["children"] = int((given.parent >= 0).sum())
    happened["rejected"] = int((found["outcome"] == layout.REJECTED).sum())
    happened["failed"] = int((found["outcome"] == layout.FAILED).sum())
    return happened


def close(mine, theirs, err_msg=""):
    np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12, err_msg=err_msg)


def check_news(systems, b, found):
    """First tokens, ends and losses, each told once and with its time."""
    news = systems.news[b, : int(systems.env["news"][b])]
    for kind, outcome, name in (
        (layout.FIRST_TOKEN, None, "first"),
        (layout.COMPLETION, layout.COMPLETED, "finish"),
        (layout.LOSS, layout.FAILED, None),
    ):
        entries = news[news["kind"] == kind]
        told = found["first"] > 0 if outcome is None else found["outcome"] == outcome
        assert sorted(entries["request"].tolist()) == np.flatnonzero(told).tolist()
        if name is not None:
            np.testing.assert_array_equal(entries["time"], found[name][entries["request"]])


def rounds(count):
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


SEEDS = st.integers(0, 2**32 - 1)
FAILING = {"mean_time_to_failure_s": 0.5, "mean_time_to_repair_s": 0.1}
BINDING = {"num_replicas": 1, "max_num_seqs": 8, "memory": 1.0, "rate": 1000.0}


@rounds(60)
@given(SEEDS)
def test_equal_to_the_reference(seed):
    run_case(seed)


@rounds(60)
@given(SEEDS)
def test_equal_when_memory_binds(seed):
    run_case(seed, **BINDING)


@rounds(40)
@given(SEEDS)
def test_equal_with_failing_replicas(seed):
    run_case(seed, failures=FAILING)


AHEAD = {"async_scheduling": True}
API = {"api_in_s": 0.0045, "api_request_s": 0.0011, "api_out_s": 0.003}


@rounds(60)
@given(SEEDS)
def test_equal_when_iterations_are_planned_ahead(seed):
    """Times, hits and the caches that are left: of vLLM's loop with two batches in flight."""
    run_case(seed, **AHEAD)


TOGETHER = {
    "memory binds, planned ahead": BINDING | AHEAD,
    "an API": {"host": API},
    "an API, planned ahead": {"host": API} | AHEAD,
}


@pytest.mark.parametrize("what", TOGETHER)
@rounds(30)
@given(seed=SEEDS)
def test_equal_with_several_of_these(what, seed):
    run_case(seed, **TOGETHER[what])


@pytest.mark.slow
@rounds(1500)
@given(SEEDS)
def test_equal_to_the_reference_at_length(seed):
    count = int(np.random.default_rng(seed).integers(1, 120))
    run_case(seed, requests=count)
    run_case(seed, requests=count, host=API if seed % 2 else {}, **AHEAD)


def test_random_systems_reach_what_they_are_made_for():
    """Most of the random systems have each of the events that the rules are about."""
    cases = [run_case(seed, **(BINDING if seed % 2 else {})) for seed in range(20)]
    reached = Counter(name for case in cases for name, count in case.items() if count)
    for name in ("evictions", "twins", "hits", "full_hits", "same_step_hits", "preemptions"):
        assert reached[name] >= len(cases) / 2, (name, reached)
    for name in ("recomputed", "blocked", "children", "watched"):
        assert reached[name] >= len(cases) / 2, (name, reached)
    assert reached["rejected"] >= len(cases) / 5, reached
    assert sum(run_case(seed, failures=FAILING)["failed"] > 0 for seed in range(12)) >= 4
