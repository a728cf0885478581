"""Every rule against examples worked by hand, on both sides of its thresholds."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from servegym.baselines.prefix_routing import NOWHERE, RULES, View
from servegym.baselines.prefix_routing.gateways import (
    AibrixLoadBalance,
    LMetric,
    ProductionStackKvAware,
    ProductionStackPrefix,
    RayPrefixAware,
)
from servegym.baselines.prefix_routing.llm_d_latency import FEATURES, LlmdPredicted, OnlineTrees
from servegym.baselines.prefix_routing.papers import Mooncake, Preble
from servegym.baselines.prefix_routing.plugins import AIBRIX, GatewayRule, sticky
from servegym.baselines.prefix_routing.simple import (
    HashRing,
    LeastLoad,
    RoundRobin,
    SessionHash,
    VllmDp,
    WeightedLoad,
)


def view(replicas: int = 3, seed: int = 0, **given: Any):
    """A request of 160 tokens, ten blocks, before idle replicas; ``given`` says what differs."""
    arrays = (
        "match_tokens",
        "in_flight",
        "prefill_tokens",
        "context_tokens",
        "decode_blocks",
        "waiting",
        "running",
        "kv",
    )
    fields = {name: np.zeros(replicas, np.int64) for name in arrays}
    fields |= {
        "prompt_tokens": 160,
        "predicted_output": 50.0,
        "block_size": 16,
        "capacity_tokens": np.full(replicas, 100_000),
        "speed": np.full(replicas, 1000.0),
        "decode_speed": np.full(replicas, 1000.0),
        "last_replica": -1,
        "session": 0,
        "tenant": 0,
        "up": np.ones(replicas, np.bool_),
        "now_s": 0.0,
        "rng": np.random.default_rng(seed),
    }
    for name, value in given.items():
        fields[name] = np.asarray(value) if isinstance(value, (list, tuple)) else value
    return View(**fields)


def costs(rule, v):
    """The cost of every replica by a gateway's rule, which looks at those that are up."""
    return rule.gateway.decide(v, v.up, rule.setting)[0]


def chosen(rule, count=60, **given):
    """What a rule without memory chooses, over many streams of chance."""
    return {rule.choose(view(seed=seed, **given)) for seed in range(count)}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_to_the_replicas_that_are_up(name):
    rule = RULES[name][0]()
    # Replica 1 is the best in every respect, but it is down; so is all of the last view.
    better = {"match_tokens": [0, 160, 0], "in_flight": [3, 0, 4], "waiting": [2, 0, 2]}
    for seed in range(20):
        answer = rule.choose(view(seed=seed, up=[True, False, True], session=seed, **better))
        assert answer in (0, 2)
    assert rule.choose(view(up=[True, False, False])) == 0
    assert rule.choose(view(up=[False, False, False])) == NOWHERE


@pytest.mark.parametrize("name", RULES)
def test_every_rule_forgets_at_an_episodes_start(name):
    rng = np.random.default_rng(3)
    episode = []
    for j in range(40):
        loads = {field: rng.integers(0, 6, 4) for field in ("in_flight", "waiting", "running")}
        loads["kv"] = rng.random(4)
        match = 16 * rng.integers(0, 11, 4)
        when = {"now_s": 0.1 * j, "session": int(rng.integers(-1, 5)), "scrape_age_s": 0.35}
        episode.append({"match_tokens": match, "replicas": 4, **loads, **when})
    rule = RULES[name][0]()
    runs = []
    for _ in range(2):
        rule.reset()
        runs.append([rule.choose(view(seed=j, **given)) for j, given in enumerate(episode)])
    fresh = RULES[name][0]()
    assert runs[0] == runs[1]
    assert runs[0] == [fresh.choose(view(seed=j, **given)) for j, given in enumerate(episode)]


def test_round_robin_takes_turns_and_passes_over_what_is_down():
    rule = RoundRobin()
    assert [rule.choose(view()) for _ in range(4)] == [0, 1, 2, 0]
    assert rule.choose(view(up=[True, False, True])) == 2
    assert rule.choose(view(up=[False, True, True])) == 1


def test_random_and_least_load_draw_among_equals():
    assert chosen(RULES["random"][0]()) == {0, 1, 2}
    assert chosen(LeastLoad(), in_flight=[2, 1, 1]) == {1, 2}


def test_vllm_dp_weighs_waiting_four_to_one():
    assert VllmDp().choose(view(waiting=[1, 0, 0], running=[0, 5, 4])) == 0  # 4, 5, 4
    assert VllmDp().choose(view(waiting=[1, 0, 0], running=[0, 3, 4])) == 1


def test_weighted_load_counts_requests_by_the_speed_of_the_card():
    slow = {"decode_speed": [1000.0, 250.0, 1000.0]}
    rule = WeightedLoad(load_s=0.01)
    # 160 tokens at 1,000/s take .16 s everywhere; 4 requests at a quarter of the speed count 16.
    assert chosen(rule, in_flight=[14, 3, 20], **slow) == {0}
    assert chosen(rule, in_flight=[16, 3, 20], **slow) == {1}
    assert chosen(WeightedLoad(0.01, power=0.0), in_flight=[14, 3, 20], **slow) == {1}
    # A prefix of 100 tokens is worth .1 s, ten requests.
    assert chosen(rule, in_flight=[14, 3, 20], match_tokens=[0, 0, 100], **slow) == {2}
    assert chosen(WeightedLoad(0.0), in_flight=[0, 9, 0], match_tokens=[0, 16, 0]) == {1}
    for bad in ({"load_s": -1.0}, {"power": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            WeightedLoad(**bad)


def test_the_hash_ring_moves_only_the_keys_of_a_replica_that_is_down():
    ring = HashRing(4)
    all_up, one_down = np.ones(4, np.bool_), np.array([True, True, False, True])
    before = np.array([ring.owner(key, all_up) for key in range(400)])
    after = np.array([ring.owner(key, one_down) for key in range(400)])
    assert (before == after)[before != 2].all() and not (after == 2).any()
    assert np.bincount(before).min() > 60  # 160 points a replica spread 400 keys evenly
    assert set(after[before == 2]) == {0, 1, 3}
    assert ring.owner(0, np.zeros(4, np.bool_)) == NOWHERE


def test_session_hash_holds_a_session_and_counts_rates_without_one():
    rule = SessionHash(window_s=10.0)
    assert len({rule.choose(view(session=7, in_flight=[9, 9, 9], now_s=t)) for t in range(5)}) == 1
    rule.reset()
    # No session: the lowest rate of the last 10 s, ties to the lowest index.
    assert [rule.choose(view(session=-1, now_s=t)) for t in (0, 1, 2, 3)] == [0, 1, 2, 0]
    assert rule.choose(view(session=-1, now_s=4.0)) == 1
    # At 11.5 s replicas 0 and 1 have one request each, 2 has one; at 13.5 s only 1 has one.
    assert rule.choose(view(session=-1, now_s=11.5)) == 0
    assert rule.choose(view(session=-1, now_s=13.5)) == 2


def test_llm_d_scores():
    rule = RULES["llm_d"][0]()
    v = view(waiting=[0, 2, 4], kv=[0.9, 0.5, 0.0], match_tokens=[80, 160, 0])
    # queue 1, .5, 0; kv .1, .5, 1; prefix .5, 1, 0, with the weights 2, 2 and 3.
    np.testing.assert_allclose(costs(rule, v), [-(2 + 0.2 + 1.5), -(1 + 1 + 3), -(0 + 2 + 0)])
    assert rule.choose(v) == 1
    # Without replica 2 the queues range from 0 to 2 only.
    v = dataclasses.replace(v, up=np.array([True, True, False]))
    np.testing.assert_allclose(costs(rule, v)[:2], [-(2 + 0.2 + 1.5), -(0 + 1 + 3)])


@pytest.mark.parametrize(
    ("match", "prefill", "kept"),
    [
        ([128, 112, 0], [0, 0, 0], [0]),  # 8 of 10 blocks are .80: at the threshold
        ([112, 112, 0], [0, 0, 0], [0, 1, 2]),  # none has .80
        ([160, 160, 160], [9e9, 9e9, 9e9], [0, 1, 2]),  # all have it: no others to compare
        ([128, 128, 0], [30_000, 28_000, 10_000], [0, 1]),  # best 28 s against 10: a penalty of 18
        ([128, 128, 0], [30_000, 28_001, 10_000], [0, 1, 2]),
    ],
)
def test_llm_d_affinity_filter(match, prefill, kept):
    v = view(match_tokens=match, prefill_tokens=prefill)
    found = sticky(v, v.up, v.prefill_tokens / 1000, threshold=0.8, max_penalty_s=18.0)
    assert np.flatnonzero(found).tolist() == kept


def test_llm_d_affinity_takes_the_least_token_load_of_what_is_kept():
    rule = RULES["llm_d_affinity"][0]()
    # 18 s at 15,928 tokens/s are 286,704 tokens.
    keep = {"match_tokens": [160, 144, 0], "prefill_tokens": [286_704, 286_705, 0]}
    assert rule.choose(view(**keep)) == 0
    # One token more and all are kept: 286,705 + 0 against 0 + 160 uncached.
    keep["prefill_tokens"] = [286_705, 286_705, 0]
    assert rule.choose(view(**keep)) == 2
    # Both have it; 40 in flight + 16 uncached are less than 60 + 0.
    assert rule.choose(view(match_tokens=[160, 144, 0], prefill_tokens=[60, 40, 0])) == 1
    # Loads above the limit are alike.
    full = {"match_tokens": [0, 0, 0], "prefill_tokens": [10**7, 9 * 10**6, 10**8]}
    assert chosen(rule, **full) == {0, 1, 2}


class Fixed:
    """A predictor of given latencies, which keeps what it is told."""

    def __init__(self, ttft, tpot):
        self.answer = np.array(ttft, float), np.array(tpot, float)
        self.learned = []

    def reset(self):
        self.learned.clear()

    def predict(self, features):
        return self.answer

    def learn(self, *sample):
        self.learned.append(sample)


@pytest.mark.parametrize(
    ("ttft", "tpot", "fields", "kept", "scores"),
    [
        # Headroom .9, .5 and .1 s and .03, .02 and .01: ranges .8 and .02. Shares of the ranges
        # 1, .5 and 0 in both: 100 (1 - 1) + 1 = 1, 51 and 101 hundredths.
        ([0.1, 0.5, 0.9], [0.01, 0.02, 0.03], {}, [0, 1, 2], [0.01, 0.51, 1.01]),
        # All alike in TPOT: TTFT counts alone. .25 of the range is 76 hundredths.
        ([0.1, 0.3, 0.9], [0.02] * 3, {}, [0, 1, 2], [0.01, 0.26, 1.01]),
        ([0.5] * 3, [0.02] * 3, {}, [0, 1, 2], [0.51, 0.51, 0.51]),
        # Only those with headroom in both are kept.
        ([0.5, 1.1, 0.9], [0.02, 0.02, 0.05], {}, [0], [0.51]),
        # Nobody has headroom: idle ones first, then TPOT alone missed, then TTFT alone.
        ([1.2, 1.6, 1.4], [0.05] * 3, {"in_flight": [1, 0, 0]}, [0, 1, 2], [0, 0.01, 1.01]),
        ([0.9, 1.6, 1.4], [0.05, 0.03, 0.05], {"in_flight": [1] * 3}, [0, 1, 2], [0.51, 0, 0]),
        ([1.9, 1.6, 1.4], [0.05, 0.03, 0.05], {"in_flight": [1] * 3}, [0, 1, 2], [0, 0.51, 0]),
        ([1.2, 1.6, 1.4], [0.05] * 3, {"in_flight": [1] * 3}, [0, 1, 2], [1.01, 0.01, 0.51]),
        # The strict filter before the tiers, the loose one after them.
        ([1.2, 0.1, 0.1], [0.01] * 3, {"match_tokens": [160, 0, 0]}, [0], [0.51]),
        ([0.2, 0.1, 1.1], [0.01] * 3, {"match_tokens": [128, 0, 128]}, [0], [0.51]),
        ([6.2, 0.1, 1.1], [0.01] * 3, {"match_tokens": [160, 0, 0]}, [1], [0.51]),
    ],
)
def test_llm_d_predicted_latency(ttft, tpot, fields, kept, scores):
    v = view(ttft_slo_s=1.0, tpot_slo_s=0.04, **fields)
    rule = LlmdPredicted(Fixed(ttft, tpot), explore=0.0)
    found, score = rule.scored(v, np.arange(3), *rule.predictor.answer)
    assert found.tolist() == kept
    np.testing.assert_allclose(score, scores, atol=0.0101)  # whole hundredths, rounded down
    assert rule.choose(v) in found[score > 0]


def test_llm_d_predicted_learns_what_it_saw_of_the_chosen_replica():
    rule = LlmdPredicted(Fixed([0.1, 0.2], [0.01, 0.01]))
    first = rule.choose(view(2, waiting=[1, 0], match_tokens=[80, 0], prefill_tokens=[7, 9]))
    rule.choose(view(2))
    rule.outcome(0, 0.3, 0.02)
    rule.outcome(0, 9.0, 9.0)  # told twice, learned once
    ((features, *latencies),) = rule.predictor.learned
    both = [[1, 0, 160, 1, 0, 7, 0, 0.5, 80], [0, 0, 160, 0, 0, 9, 0, 0, 160]]
    assert features.tolist() == both[first] and latencies == [0.3, 0.02]
    assert len(features) == len(FEATURES)
    rule.reset()
    assert rule.predictor.learned == []


RUST = {"cache-threshold": 0.5, "balance-abs-threshold": 32, "balance-rel-threshold": 1.1}


@pytest.mark.parametrize(
    ("setting", "load", "match", "expected"),
    [
        (RUST, [40, 8, 9], [96, 0, 0], 0),  # 40 - 8 = 32 is in balance
        (RUST, [41, 8, 9], [96, 0, 0], 1),
        (RUST, [440, 400, 401], [96, 0, 0], 0),  # 440 is not above 1.1 x 400
        (RUST, [441, 400, 401], [96, 0, 0], 1),
        (RUST, [9, 8, 8], [80, 0, 0], 1),  # 80 of 160 is not above half
        (RUST, [9, 8, 8], [81, 0, 0], 0),
        (RUST, [9, 8, 8], [96, 96, 0], 0),  # equal matches: the lowest index
        ({}, [72, 8, 9], [49, 0, 0], 0),
        ({}, [73, 8, 9], [49, 0, 0], 1),
        ({}, [9, 8, 8], [48, 0, 0], 1),
        ({}, [600, 401, 400], [160, 0, 0], 0),
    ],
)
def test_sglang_cache_aware(setting, load, match, expected):
    rule = GatewayRule("sglang", setting)
    assert rule.choose(view(in_flight=load, match_tokens=match)) == expected


@pytest.mark.parametrize(
    ("load", "match", "expected"),
    [
        ([3, 0, 0], [120, 0, 0], 1),  # 40 x 4 = 160 = 160 x 1: the lower load
        ([2, 0, 0], [120, 0, 0], 0),  # 120 < 160
        ([4, 1, 1], [160, 160, 0], 1),  # 0, 0 and 320
        ([1, 1, 1], [0, 0, 0], 0),
        ([20, 0, 0], [150, 0, 0], 1),  # 210 > 160
    ],
)
def test_lmetric(load, match, expected):
    assert LMetric().choose(view(in_flight=load, match_tokens=match)) == expected


def test_dynamo_costs():
    rule = GatewayRule("dynamo", {})
    v = view(match_tokens=[160, 80, 0], prefill_tokens=[320, 0, 0], decode_blocks=[3, 4, 5])
    # (320 + 160 - 160) / 16 + 3, (160 - 80) / 16 + 4, 160 / 16 + 5
    assert costs(rule, v).tolist() == [23, 9, 15]
    assert rule.choose(v) == 1
    assert chosen(rule, decode_blocks=[2, 2, 9]) == {0, 1}
    # Half the credit, prefill twice as dear, a block a request in flight.
    v = view(match_tokens=[160, 80, 0], decode_blocks=[3, 4, 5], in_flight=[2, 0, 1])
    half = {"prefill_load_scale": 2, "overlap_score_credit": 0.5, "decode_active_request_weight": 1}
    found = costs(GatewayRule("dynamo", half), v)
    assert found.tolist() == [10 + 3 + 2, 15 + 4 + 0, 20 + 5 + 1]
    twice = GatewayRule("dynamo", {"overlap_score_credit": 2.0})
    assert costs(twice, v)[0] == 3  # prefill is at least 0
    # Ten blocks of prefill more than the least are the prompt's ten: the credit is half of 1.
    v = view(match_tokens=[160, 80, 0], prefill_tokens=[160, 0, 0])
    decay = GatewayRule("dynamo", {"overlap_score_credit_decay": 1.0})
    assert costs(decay, v).tolist() == [10 + 10 - 5, 10 - 5, 10]


def test_production_stack_prefix_is_blind_to_load():
    given = {"in_flight": [500, 500, 0], "waiting": [90, 90, 0]}
    assert chosen(ProductionStackPrefix(), match_tokens=[16, 0, 0], **given) == {0}
    assert chosen(ProductionStackPrefix(), match_tokens=[16, 16, 0], **given) == {0, 1}
    assert chosen(ProductionStackPrefix(), **given) == {0, 1, 2}


def test_production_stack_kv_needs_nearly_the_whole_prompt():
    home = SessionHash().choose(view(session=5))
    other = (home + 1) % 3
    for matched, expected in ((1999, home), (2000, other), (4000, other)):
        match = np.zeros(3, np.int64)
        match[other] = matched
        v = view(prompt_tokens=4000, match_tokens=match, session=5)
        assert ProductionStackKvAware().choose(v) == expected
    # Below the threshold any match will do, and none will not.
    match[other] = 1
    rule = ProductionStackKvAware()
    assert rule.choose(view(prompt_tokens=1999, match_tokens=match, session=5)) == other
    assert rule.choose(view(prompt_tokens=1999, session=5)) == home


SIGMA = f"{AIBRIX}STANDARD_DEVIATION_FACTOR"
CHART = {
    f"{AIBRIX}LOAD_IMBALANCE_FACTOR": 0,
    f"{AIBRIX}LOAD_IMBALANCE_MIN_GAP": 17,
    SIGMA: 2,
}


@pytest.mark.parametrize(
    ("setting", "load", "match", "expected"),
    [
        # Mean 2, deviation 1: a load of 3 is within one deviation, so the best match stands.
        ({}, [3, 2, 1], [160, 80, 0], {0}),
        # Mean 2, deviation 1.73: 4 is beyond 3.73, so the next match is taken.
        ({}, [4, 1, 1], [160, 80, 0], {1}),
        ({SIGMA: 2}, [4, 1, 1], [160, 80, 0], {0}),
        # The only match is overloaded: the least load of all.
        ({}, [4, 1, 1], [160, 0, 0], {1, 2}),
        ({}, [4, 1, 2], [0, 0, 0], {1}),
        # Equal percentages: the lower load, then chance. 112 of 160 are 70 %.
        ({}, [2, 1, 2], [112, 112, 112], {1}),
        ({}, [1, 1, 2], [112, 112, 112], {0, 1}),
        # Out of balance: only the least loaded may match. 10 > 2 (3.67 + 1), 10 - 0 >= 8.
        ({SIGMA: 9}, [10, 1, 0], [160, 80, 16], {2}),
        # 10 is not above 2 (4 + 1); 9 - 2 is below 8.
        ({SIGMA: 9}, [10, 1, 1], [160, 80, 16], {0}),
        ({SIGMA: 9}, [7, 0, 0], [160, 80, 16], {0}),
        (CHART, [16, 16, 0], [160, 80, 16], {0}),
        (CHART, [17, 17, 0], [160, 80, 16], {2}),
        # Out of balance and no match among the least loaded.
        ({}, [40, 0, 0], [160, 0, 0], {1, 2}),
    ],
)
def test_aibrix(setting, load, match, expected):
    rule = GatewayRule("aibrix", setting)
    assert chosen(rule, in_flight=load, match_tokens=match) == expected


def test_aibrix_load_balance_divides_by_what_ended_in_the_last_minute():
    rule = AibrixLoadBalance()
    # One by one to the least of 0, 1 and 2 requests in flight, with a rate of 1/s each.
    first = [rule.choose(view(in_flight=load)) for load in ([0, 1, 1], [1, 0, 1], [1, 1, 0])]
    assert first == [0, 1, 2]
    for decision in (0, 1, 1):
        rule.outcome(decision, 0.1, 0.01)
    # From now on 1 and 2 a minute ended at replicas 0 and 1, none at 2, which counts as 1 a second:
    # 1 / (1/60) = 60, 3 / (2/60) = 90 and 61.
    assert rule.choose(view(in_flight=[1, 3, 61], now_s=10.0)) == 0
    assert rule.choose(view(in_flight=[2, 3, 91], now_s=70.0)) == 1  # 120, 90, 91
    assert rule.choose(view(in_flight=[2, 3, 89], now_s=70.0)) == 2
    # After that minute all count as 1 a second: 2, 3 and 1.
    assert rule.choose(view(in_flight=[2, 3, 1], now_s=70.1)) == 2
    rule.reset()
    assert chosen(AibrixLoadBalance(), in_flight=[1, 1, 2]) == {0, 1}


def test_ray_takes_the_best_match_or_the_smallest_tree():
    rule = RayPrefixAware()
    assert chosen(rule, match_tokens=[16, 0, 0], in_flight=[9, 0, 0]) == {0}  # 10 % is enough
    tree = {"index_tokens": [70, 50, 50], "in_flight": [0, 3, 2]}
    assert chosen(rule, match_tokens=[15, 0, 0], **tree) == {2}
    assert chosen(rule, match_tokens=[15, 0, 0], in_flight=[1, 1, 2]) == {0, 1}
    assert chosen(rule, match_tokens=[80, 80, 0], in_flight=[5, 4, 0]) == {1}


def test_preble_exploits_what_is_mostly_cached():
    busy = {"tpot_s": [0.0, 0.0, 0.0]}
    rule = Preble()
    # 80 of 160 are no majority: .08 against .16 s; then .08 of load + .08; then .16 + .08.
    assert [rule.choose(view(match_tokens=[80, 0, 0], **busy)) for _ in range(3)] == [0, 0, 1]
    rule.reset()
    rule.choose(view(match_tokens=[80, 0, 0], **busy))
    # 96 > 64: exploited on replica 0 although its load is .08 s; both match: the less loaded one.
    assert rule.choose(view(match_tokens=[96, 0, 0], **busy)) == 0
    assert rule.choose(view(match_tokens=[96, 96, 0], **busy)) == 1


def test_mooncake_takes_the_least_time_to_first_token():
    given = {"prefill_tokens": [300, 100, 0], "match_tokens": [160, 0, 0]}
    assert Mooncake().choose(view(**given)) == 2  # .300, .260 and .160 s
    assert Mooncake().choose(view(speed=[2000.0, 1000.0, 500.0], **given)) == 0  # .15, .26, .32
    assert Mooncake().choose(view()) == 0


@pytest.mark.parametrize(
    ("rule", "argument", "value"),
    [
        (AibrixLoadBalance, "window_s", 0.0),
        (Preble, "window_s", 0),
        (RayPrefixAware, "match_rate_threshold", 2.0),
        (SessionHash, "points", 0),
        (LlmdPredicted, "explore", 1.5),
        (OnlineTrees, "quantile", 2.0),
        (ProductionStackKvAware, "threshold_tokens", -1),
    ],
)
def test_arguments_out_of_range_are_refused(rule, argument, value):
    with pytest.raises(ValueError, match=argument):
        rule(**{argument: value})


def test_online_trees_learn_latencies_in_the_order_of_their_causes():
    pytest.importorskip("lightgbm")
    rng = np.random.default_rng(0)
    trees = OnlineTrees(quantile=0.5, min_samples=200)
    columns = rng.uniform(0, 1, (400, len(FEATURES)))
    for i, row in enumerate(columns):
        assert (trees.predict(columns) is None) == (i < 200)
        trees.learn(row, 2 * row[5], np.nan if i % 5 == 0 else 0.01 + 0.05 * row[4])
    tests = np.full((5, len(FEATURES)), 0.5)
    tests[:, 5] = tests[:, 4] = np.linspace(0.1, 0.9, 5)
    ttft, tpot = trees.predict(tests)
    np.testing.assert_allclose(ttft, 2 * tests[:, 5], atol=0.2)
    np.testing.assert_allclose(tpot, 0.01 + 0.05 * tests[:, 4], atol=0.006)
    trees.reset()
    assert trees.predict(tests) is None
