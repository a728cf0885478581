"""Workloads: contents against token strings, known answers, and what a draw may change."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servegym.envs.prefix_routing.workloads import (
    LLM_D_STAGES,
    WORKLOADS,
    RecordedArguments,
    Tenants,
    _recorded,
    _Tree,
    make_prefix_workload,
)
from servegym.envs.workloads.prefix_traces import load_prefix_trace

from .reference import infinite_hits

VARIANTS = {
    "mooncake": ("mooncake", {}, 9.0),
    "synthetic": ("mooncake", {"trace": "synthetic", "output_reuse": False}, 2.0),
    "agents": ("agents", {"max_context": 131_072}, 10.0),
    "agents-warm": ("agents", {"max_context": 32_768, "warm_prefix": 0.5}, 10.0),
    "sessions": ("sessions", {}, 5.0),
    "tenants": ("tenants", {}, 30.0),
    "tenants-sharegpt": (
        "tenants",
        {"question_tokens": "sharegpt", "output_tokens": "sharegpt", "prefix_tokens": 300},
        30.0,
    ),
    "tenants-drift": (
        "tenants",
        {"questions": "fresh", "order": "random", "skew": 1.0, "drift_s": 3.0, "groups": 9},
        30.0,
    ),
}


def draw(variant, seed=0, num_requests=400, block_size=64, **options):
    name, kwargs, rate = VARIANTS[variant]
    rng = np.random.default_rng(seed)
    return make_prefix_workload(name, **kwargs).draw(rng, num_requests, rate, block_size, **options)


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_every_workload_is_drawn_here():
    assert {name for name, _, _ in VARIANTS.values()} == set(WORKLOADS)


@pytest.mark.parametrize("dispatch", ["think", "trace"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_are_well_formed_and_follow_the_seed(variant, dispatch):
    requests = draw(variant, dispatch=dispatch).check()
    assert requests.num_requests == 400
    assert same(requests, draw(variant, dispatch=dispatch))
    assert not same(requests, draw(variant, seed=1, dispatch=dispatch))
    assert (np.diff(requests.arrival_s) >= 0).all()
    if dispatch == "trace":
        assert (requests.parent == -1).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_block_size_changes_nothing_but_the_blocks(variant):
    fine, coarse = draw(variant, block_size=8), draw(variant, block_size=48)
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "session", "parent"):
        assert np.array_equal(getattr(fine, name), getattr(coarse, name))
    ratio = 48 // 8
    name_of = {}  # a block is named as the last small block in it
    for j in range(400):
        ends = fine.block_ids(j)[ratio - 1 :: ratio].tolist()
        for large, small in zip(coarse.block_ids(j).tolist(), ends, strict=True):
            assert name_of.setdefault(large, small) == small
    assert len(set(name_of.values())) == len(name_of)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_segments_equal_token_strings(data):
    """Every request's tokens are written out; blocks are named by all tokens up to their end."""
    count = data.draw(st.integers(1, 8))
    size = data.draw(st.integers(1, 5))
    length, source, shared, strings = [], [], [], []
    for v in range(count):
        of = data.draw(st.integers(-1, v - 1))
        most = length[of] if of >= 0 else 0
        take = data.draw(st.integers(0, most))
        total = take + data.draw(st.integers(0, 9))
        length.append(total)
        source.append(of)
        shared.append(take)
        inherited = strings[of][:take] if of >= 0 else []
        strings.append(inherited + [(v, k) for k in range(take, total)])
    common = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    for v in range(count):  # what others have in common must rest on what is common
        common[v] &= source[v] < 0 or common[source[v]]
    picks = data.draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 2)), min_size=1, max_size=8)
    )
    row, copy = (np.array(x, dtype=np.int64) for x in zip(*picks, strict=True))
    tree = _Tree(
        np.array(length),
        np.array(source),
        np.array(shared),
        common,
        np.array(data.draw(st.permutations(range(count)))),
    )
    first, segments = tree.segments(row, copy, size)
    names: dict[tuple, int] = {}
    seen: dict[int, tuple] = {}
    for j, (v, c) in enumerate(picks):
        tokens = [(t, 0 if common[t[0]] else c) for t in strings[v]]
        ids = [
            base + k
            for base, blocks in segments[first[j] : first[j + 1]].tolist()
            for k in range(blocks)
        ]
        assert len(ids) == length[v] // size
        for k, name in enumerate(ids):
            prefix = tuple(tokens[: (k + 1) * size])
            assert names.setdefault(prefix, name) == name
            assert seen.setdefault(name, prefix) == prefix


@pytest.mark.parametrize("name", ["mooncake-conversation", "mooncake-synthetic"])
def test_a_whole_trace_hits_what_its_ids_say(name):
    """In the recorded order a full block hits if its recorded id came before."""
    trace = load_prefix_trace(name)
    row = np.arange(trace.num_requests)
    options = (row, np.zeros_like(row), trace.time_s, (trace.num_requests, 512, "trace"))
    recorded, _ = _recorded(trace, RecordedArguments(output_reuse=False))
    hits = infinite_hits(recorded.episode(*options).check(), recompute_last=False)
    assert np.array_equal(hits, trace.shared_tokens // 512)
    reused, _ = _recorded(trace, RecordedArguments())
    more = infinite_hits(reused.episode(*options).check(), recompute_last=False)
    at = trace.repeats_output
    assert (more[at] == trace.stream_shared()[at] // 512).all()
    assert more.sum() > hits.sum()


@pytest.mark.parametrize("variant", ["mooncake", "agents", "sessions", "tenants"])
def test_the_mean_rate_is_the_one_asked_for(variant):
    name, kwargs, rate = VARIANTS[variant]
    workload = make_prefix_workload(name, **kwargs)
    spans = [
        workload.draw(np.random.default_rng(seed), 600, rate, 512).arrival_s[-1]
        for seed in range(12)
    ]
    assert 600 / np.mean(spans) == pytest.approx(rate, rel=0.12)


def test_load_is_superposed_and_time_is_not_compressed():
    """Think times are those of the recording at any rate, and copies share only the first block."""
    for rate in (2.0, 30.0):
        workload = make_prefix_workload("mooncake")
        requests = workload.draw(np.random.default_rng(0), 3000, rate, 512)
        follow = requests.parent >= 0
        gap = requests.arrival_s[follow] - requests.arrival_s[requests.parent[follow]]
        assert np.allclose(gap, requests.think_s[follow])
    first = {int(requests.block_ids(j)[0]) for j in range(3000)}
    assert len(first) == 1
    second = {
        int(requests.block_ids(j)[1]) for j in range(3000) if requests.prompt_tokens[j] > 1023
    }
    assert len(second) > 1000


@pytest.mark.parametrize("variant", ["mooncake", "agents", "sessions"])
def test_a_session_waits_for_itself_and_repeats_its_prompt(variant):
    requests = draw(variant, num_requests=1500, block_size=64)
    hits = infinite_hits(requests)
    follow = np.flatnonzero(requests.parent >= 0)
    parent = requests.parent[follow]
    assert follow.size > 50
    assert (requests.session[follow] == requests.session[parent]).all()
    assert (requests.turn[follow] == requests.turn[parent] + 1).all()
    if variant == "sessions":
        repeated = (requests.prompt_tokens[parent] + requests.output_tokens[parent]) // 64
        assert (hits[follow] == repeated).all()
        new = requests.turn == 0
        assert (hits[new][1:] == 512 // 64).all()
    if variant == "mooncake":
        whole = requests.prompt_tokens[parent] // 512 * 8
        lookup = (requests.prompt_tokens[follow] - 1) // 64
        assert (hits[follow] >= np.minimum(whole, lookup)).all()


def test_llm_d_benchmark():
    """150 x (6,000 + 5 x 1,200) tokens = 1.8 million, all 750 prompts before one comes again."""
    tenants = Tenants(stages=LLM_D_STAGES)
    requests = tenants.draw(np.random.default_rng(0), 2250, 1.0, 16, "trace").check()
    hits = infinite_hits(requests)
    # 7,200 tokens are 450 blocks: the last one is computed again.
    assert (hits[750:] == 449).all()
    assert hits[:750].sum() == (750 - 150) * 375
    prompts = {tuple(requests.block_ids(j)[:450].tolist()) for j in range(2250)}
    assert len(prompts) == 750
    assert len({i for prompt in prompts for i in prompt}) * 16 == 1_800_000
    at = requests.arrival_s
    assert ((at > 50) & (at <= 70)).sum() == pytest.approx(60, abs=25)
    assert ((at > 110) & (at <= 148)).sum() == pytest.approx(760, abs=90)


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("moonkake", {}, "workload='moonkake'.*mooncake"),
        ("mooncake", {"max_context": 10}, "max_context=10 leaves no request"),
        ("agents", {"warmprefix": 1}, "warm_prefix"),
        ("tenants", {"order": "cycle", "hot_factor": 2.0}, "order='cycle'"),
        ("tenants", {"stages": [(3.0, 1.0), (0.0, 1.0)]}, "must end with a stage"),
    ],
)
def test_bad_arguments_are_named(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_prefix_workload(name, **kwargs)


def test_a_users_trace_is_replayed(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1700, "output_length": 9, "hash_ids": [7, 8, 1, 2]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    requests = make_prefix_workload("mooncake", trace=path).draw(
        np.random.default_rng(0), 40, 1.0, 16
    )
    follow = requests.check().parent >= 0
    assert follow.sum() > 5
    assert (requests.think_s[follow] == 2.0).all()
    # The second turn repeats the first prompt and output: 1,105 tokens, 69 blocks of 16.
    assert (infinite_hits(requests)[follow] == 69).all()
