"""Prefix search: features against a slow reference, cells, runs that go on, saved policies."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import load_policy, prefix_search  # noqa: E402
from servegym.agents.lib import prefix_cells  # noqa: E402
from servegym.agents.lib.checkpoint import shipped  # noqa: E402
from servegym.agents.lib.prefix_cells import KINDS, begin_alike, draw_cell, problem_of  # noqa: E402
from servegym.baselines.prefix_routing.dynamo import Dynamo, DynamoRows  # noqa: E402
from servegym.baselines.prefix_routing.policy import view_of  # noqa: E402
from servegym.baselines.prefix_routing.system import PrefixSystem  # noqa: E402
from servegym.envs.prefix_routing.core import PrefixBatch  # noqa: E402
from servegym.envs.prefix_routing.kernel.observation import (  # noqa: E402
    REPLICA_FEATURES,
    REQUEST_FEATURES,
)

from .runs import lines  # noqa: E402

SMALL = {
    "workload": "tenants",
    "workload_kwargs": {
        "groups": 20,
        "prefix_tokens": 2000,
        "question_tokens": [100, 600],
        "output_tokens": [20, 100],
        "questions": "fresh",
        "order": "random",
    },
    "profiles": [{"card": card, "model": "llama-3.1-8b"} for card in ("h100", "l40s", "l40s")],
    "kv_tokens": 60_000,
    "max_num_seqs": 16,
    "scrape_s": 1.0,
    "rate": 30.0,
    "warmup_requests": 40,
    "episode_requests": 60,
}


@pytest.fixture
def small_cells(monkeypatch):
    def cell(stream):
        return SMALL | {"rate": 20.0 + stream % 7}

    monkeypatch.setattr(prefix_search, "cell_of", cell)


def tiny(tmp_path, **changes):
    settings = {
        "total_timesteps": 2400,
        "population": 10,
        "cells": 4,
        "cells_per_generation": 2,
        "eval_every": 1200,
        "eval_cells": 2,
        "eval_episodes": 2,
        "memory": 8,
        "out_dir": str(tmp_path),
        "run_name": "run",
    }
    return prefix_search.Args(**(settings | changes))


def batch_of(rows=3, **changes):
    batch = PrefixBatch(problem_of(SMALL | changes), rows)
    for row in range(rows):
        batch.draw(row, np.random.default_rng(row))
    batch.begin(np.ones(rows, np.int8))
    return batch


def slow_features(seen, row, n, block_size):
    """The features of a replica one by one, from their descriptions."""
    of = dict(zip(REPLICA_FEATURES, seen["replicas"][row, n].astype(float), strict=True))
    asked = dict(zip(REQUEST_FEATURES, seen["request"][row].astype(float), strict=True))
    objective = asked["ttft_slo_s"]
    per_s = of["prefill_tokens_per_s"]
    prefill = min((asked["prompt_tokens"] - of["match_tokens"]) / per_s / objective, 8)
    backlog = min(of["prefill_tokens"] / per_s / objective, 8)
    blocks = min(of["decode_blocks"] * block_size / of["kv_tokens"], 8)
    share = of["match_share"]
    return {
        "prefill": prefill,
        "matched": min(of["match_tokens"] / per_s / objective, 8),
        "backlog": backlog,
        "late": max(prefill + backlog - 1, 0),
        "context": min(of["context_tokens"] / of["kv_tokens"], 8),
        "blocks": blocks,
        "full": min(max(blocks + asked["prompt_tokens"] / of["kv_tokens"] - 1, 0), 8),
        "in_flight": of["in_flight"] / 32,
        "queue": max(of["in_flight"] - of["max_num_seqs"], 0) / 32,
        "waiting": min(of["waiting"] / 8, 8),
        "kv_usage": of["kv_usage"],
        "session": of["session_replica"],
        "share": share,
        "old_match": share * np.log1p(of["match_age_s"]),
        "full_match": share * blocks,
        "hot_match": share * asked["tenant_heat"],
        "index_fill": of["index_fill"],
        "ttft": min(of["ttft_s"] / objective, 8),
        "ttft_error": np.clip(of["ttft_error_s"] / objective, -8, 8),
        "tpot": min(of["tpot_s"] / asked["tpot_slo_s"], 8),
        "lmetric": prefill * of["in_flight"] / 32,
        "log_prefill": np.log(prefill + 0.01),
        "log_in_flight": np.log1p(of["in_flight"]),
    }


def test_features_are_what_they_say():
    batch, every = batch_of(rate=200.0, scrape_s=0.05, kv_tokens=12_000), np.ones(3, np.int8)
    rng, met = np.random.default_rng(0), np.zeros(prefix_search.F)
    for _ in range(50):
        seen = batch.observation
        found, load = prefix_search.features(seen, batch.problem.block_size)
        row, n = rng.integers(3, size=2)
        slow = slow_features(seen, row, n, batch.problem.block_size)
        assert tuple(slow) == prefix_search.FEATURES
        np.testing.assert_allclose(found[row, n], list(slow.values()), rtol=2e-5, atol=2e-6)
        up = [slow_features(seen, row, k, batch.problem.block_size) for k in range(3)]
        mean = np.mean([one["backlog"] + one["blocks"] for one in up])
        assert load[row] == pytest.approx(min(mean, 2.0), rel=1e-4)
        met += found[row, n] != 0
        batch.step(rng.integers(3, size=3), every)
    assert (met > 0).all(), dict(zip(prefix_search.FEATURES, met, strict=True))


def slow_statistics(seen, row, block_size):
    """The centred statistics of a row's request, from their descriptions."""
    each = [slow_features(seen, row, n, block_size) for n in range(3)]
    of = [dict(zip(REPLICA_FEATURES, replica, strict=True)) for replica in seen["replicas"][row]]
    up = [n for n in range(3) if of[n]["up"]] or [0, 1, 2]
    best = max(up, key=lambda n: each[n]["share"])
    top = each[best]["share"]
    near = [n for n in up if top > 0 and each[n]["share"] >= top / 2]
    load = np.mean([of[n]["up"] * (each[n]["backlog"] + each[n]["blocks"]) for n in up])
    found = {
        "shared": top,
        "copies": len(near) / len(up),
        "short": -np.log(min(each[n]["prefill"] for n in up) + 0.01) / 4,
        "age": np.log1p(of[best]["match_age_s"]) / 4,
        "loaded": min(load, 2.0),
    }
    assert tuple(found) == prefix_search.STATISTICS
    return np.array(list(found.values())) - prefix_search.CENTRES


FAILURES = {"mean_time_to_failure_s": 0.5, "mean_time_to_repair_s": 0.5}


def random_index(rows, memory, seed=0):
    weights = np.random.default_rng(seed).standard_normal((rows, 81)).astype(np.float32)
    return prefix_search.Index(weights, 16, memory)


@pytest.mark.parametrize("failures", [None, FAILURES])
@pytest.mark.parametrize("memory", [1, 4])
def test_averages_are_of_the_rows_own_requests_so_far(memory, failures):
    batch, every = batch_of(failures=failures), np.ones(3, np.int8)
    index, known, down = random_index(3, memory), [[], [], []], 0
    for step in range(50):
        begins = np.array([step % 7 == 3, False, step % 11 == 5])  # episodes end at their own times
        index.forget(begins)
        action = index(batch.observation, batch.action_mask)
        down += (batch.observation["replicas"][:, :, 1] == 0).sum()
        for row in range(3):
            known[row] = [] if begins[row] else known[row]
            known[row].append(slow_statistics(batch.observation, row, 16))
            wanted = known[row][0]
            for count, one in enumerate(known[row][1:], start=2):
                wanted = wanted + (one - wanted) / min(count, memory)
            np.testing.assert_allclose(index.average[row], wanted, rtol=1e-4, atol=1e-5)
        batch.step(action, every)
    assert (down > 0) == (failures is not None)


def test_values_are_linear_in_features_load_and_averages():
    batch = batch_of()
    index = random_index(3, 4)
    found = index.values(batch.observation)
    x, load = prefix_search.features(batch.observation, 16)
    for row in range(3):
        weights, k = index.weights[row], len(prefix_search.FEATURES)
        wanted = x[row] @ (weights[:k] + load[row] * weights[k : 2 * k])
        rest = iter(weights[2 * k :])
        for average in index.average[row]:
            for name in prefix_search.CONDITIONED:
                column = x[row, :, prefix_search.FEATURES.index(name)]
                wanted = wanted + average * next(rest) * column
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-4)


def test_without_weights_of_its_own_memory_changes_nothing():
    plain = prefix_search.first_weights().astype(np.float32)[None]
    first = prefix_search.first_weights(64).astype(np.float32)[None]
    batch, every = batch_of(), np.ones(3, np.int8)
    indexes = prefix_search.Index(plain, 16), prefix_search.Index(first, 16, 64)
    for _ in range(30):
        one, other = (index(batch.observation, batch.action_mask) for index in indexes)
        np.testing.assert_array_equal(one, other)
        batch.step(one, every)


def test_rows_do_not_influence_one_another_and_a_copy_goes_on_alike():
    batch, every = batch_of(), np.ones(3, np.int8)
    weights = random_index(1, 8).weights
    index, alone = (prefix_search.Index(weights, 16, 8) for _ in range(2))
    for step in range(40):
        if step == 20:
            index = copy.deepcopy(index)
        own = {name: part[1:2] for name, part in batch.observation.items()}
        values = index.values(batch.observation)
        np.testing.assert_allclose(values[1:2], alone.values(own), rtol=1e-5, atol=1e-6)
        batch.step(values.argmax(1), every)


def test_dynamos_cost_by_rows_is_the_rule():
    batch, every = batch_of(), np.ones(3, np.int8)
    constants = np.array([[1.0, 1.0, 0.0], [5.4, 2.6, 0.2], [20.0, 2.0, 100.0]])
    system = PrefixSystem.from_problem(batch.problem)
    rows = DynamoRows(constants, system.block_size)
    rules = [Dynamo(a, b, request_weight=c) for a, b, c in constants]
    for _ in range(60):
        seen, mask = batch.observation, batch.action_mask
        action = rows(seen, mask)
        for row, rule in enumerate(rules):
            view = view_of(seen, row, mask[row], system, np.random.default_rng(0))
            cost = rule.costs(view)
            assert cost[action[row]] == cost.min()
        batch.step(action, every)


def test_the_first_index_is_dynamos_cost_where_cards_are_alike():
    cards = [{"card": "h100", "model": "llama-3.1-8b"}] * 3
    batch, every = batch_of(profiles=cards, kv_tokens=455_000), np.ones(3, np.int8)
    index = prefix_search.Index(np.float32(prefix_search.first_weights())[None], 16)
    dynamo = DynamoRows(np.array([[5.4, 2.6, 0.2]]), 16)
    same = []
    for _ in range(60):
        action = dynamo(batch.observation, batch.action_mask)
        same += (index(batch.observation, batch.action_mask) == action).tolist()
        batch.step(action, every)
    assert np.mean(same) > 0.9


def test_rows_begin_alike():
    batch = PrefixBatch(problem_of(SMALL), 3)
    begin_alike(batch, np.random.default_rng(7))
    alone = PrefixBatch(problem_of(SMALL), 1)
    alone.draw(0, np.random.default_rng(7))
    alone.begin(np.ones(1, np.int8))
    for name, part in batch.observation.items():
        for row in range(3):
            np.testing.assert_array_equal(part[row], alone.observation[name][0])


def test_cells_are_drawn_of_every_kind_and_are_environments():
    for kind in KINDS:
        first, again, other = (draw_cell(kind, np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert first == again != other
        problem_of(first | {"rate": 1.0, "episode_requests": 5, "warmup_requests": 0})


def test_the_knee_is_where_the_best_reference_keeps_the_share(monkeypatch):
    met = {"calls": 0}

    def reference(cell, rate, seed):
        met["calls"] += 1
        return 0.9 * float(np.clip(1.5 - rate / 40.0, 0.0, 1.0))

    monkeypatch.setattr(prefix_cells, "best_reference", reference)
    cell = {"workload": "tenants", "profiles": [{}] * 4}
    found = prefix_cells.at_the_knee(cell, 0.75, 0)
    assert found["rate"] == pytest.approx(30.0, rel=0.1)
    assert met["calls"] < 12


def test_one_seed_one_log_and_a_run_that_goes_on(tmp_path, monkeypatch, small_cells):
    whole = lines(prefix_search.train(tiny(tmp_path, run_name="whole")))
    assert len(whole) == 2 and all("eval/attainment" in row for row in whole)
    assert lines(prefix_search.train(tiny(tmp_path, run_name="other", seed=2))) != whole
    save_snapshot = prefix_search.save_snapshot

    def killed(path, **content):
        save_snapshot(path, **content)
        raise KeyboardInterrupt

    monkeypatch.setattr(prefix_search, "save_snapshot", killed)
    with pytest.raises(KeyboardInterrupt):
        prefix_search.train(tiny(tmp_path, run_name="cut"))
    monkeypatch.setattr(prefix_search, "save_snapshot", save_snapshot)
    assert lines(prefix_search.train(tiny(tmp_path, run_name="cut", resume=True))) == whole


def test_a_saved_policy_routes_as_its_index(tmp_path):
    agent = prefix_search.Agent(memory=5)
    agent.weights.normal_(generator=torch.Generator().manual_seed(0))
    prefix_search.save_policy(agent, tiny(tmp_path, memory=5), tmp_path / "router.safetensors")
    batch = batch_of()
    system = PrefixSystem.from_problem(batch.problem)
    policy = load_policy(tmp_path / "router.safetensors", system)
    assert (policy.name, policy.env_view, policy.clairvoyant) == ("prefix_search", "graph", False)
    index = prefix_search.Index(agent.weights.numpy()[None], system.block_size, memory=5)
    every = np.ones(3, np.int8)
    policy.reset(3)
    for step in range(20):
        begins = np.array([False, step % 6 == 5, step == 9])
        policy.episode_start(begins)
        index.forget(begins)
        found = policy.act(batch.observation, batch.action_mask)
        np.testing.assert_array_equal(found, index(batch.observation, batch.action_mask))
        batch.step(found, every)
    one = batch_of(rows=1)  # a policy that was not reset takes another number of rows anew
    assert policy.act(one.observation, one.action_mask).shape == (1,)


def test_a_search_begins_with_a_given_index(tmp_path):
    agent, path = prefix_search.Agent(memory=0), str(tmp_path / "router.safetensors")
    agent.weights.normal_(generator=torch.Generator().manual_seed(0))
    prefix_search.save_policy(agent, tiny(tmp_path, memory=0), path)
    found = prefix_search.begin_with(tiny(tmp_path, start=path, memory=9))
    np.testing.assert_array_equal(found[:46], agent.weights.numpy())
    assert len(found) == 81 and not found[46:].any()
    prefix_search.save_policy(prefix_search.Agent(3), tiny(tmp_path, memory=3), path)
    with pytest.raises(ValueError, match="memory"):
        prefix_search.train(tiny(tmp_path, start=path, memory=0))


def test_the_shipped_index_plays_with_and_without_memory():
    path = shipped("prefix_routing")["prefix_search"]
    policy = load_policy(path, PrefixSystem.from_problem(batch_of().problem))
    assert len(policy.net.weights) == len(prefix_search.first_weights(policy.args.memory))


def test_where_nobody_takes_the_request_it_is_rejected():
    batch = batch_of(admission=True)
    index = prefix_search.Index(np.float32(prefix_search.first_weights())[None], 16)
    mask = np.zeros((3, 4), np.int8)
    mask[:, 3] = 1
    assert index(batch.observation, mask).tolist() == [3, 3, 3]
    assert index(batch.observation, mask[:, :3]).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"population": 5},
        {"cells": 0},
        {"cells_per_generation": 9},
        {"eval_cells": 0},
        {"total_timesteps": 0},
        {"workers": 0},
        {"memory": -1},
        {"spread": 0.0},
    ],
)
def test_wrong_arguments_are_refused_by_name(tmp_path, changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=name):
        prefix_search.train(tiny(tmp_path, **changes))
    assert not (tmp_path / "run").exists()
