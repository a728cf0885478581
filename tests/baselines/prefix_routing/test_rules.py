"""Every rule against examples worked by hand, on both sides of its thresholds."""

import numpy as np
import pytest

from servegym.baselines.prefix_routing.policy import View
from servegym.baselines.registry import list_policies, make_policy

from .states import observation_of, system_of

NAMES = [info.name for info in list_policies("prefix_routing") if info.name != "rollout"]
ROWS = 60


def policy_of(name, system=None, **kwargs):
    system = system or system_of(3)
    policy = make_policy(name, system, family="prefix_routing", **kwargs)
    policy.reset(ROWS, 0)
    return policy


def chosen(policy, up=(1, 1, 1), **columns):
    """What a policy chooses of 160 tokens, ten blocks, before replicas, over many rows."""
    policy = policy_of(policy) if isinstance(policy, str) else policy
    actions = policy.act(observation_of(len(up), rows=ROWS, **columns), np.tile(up, (ROWS, 1)))
    return set(actions.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_keeps_to_the_replicas_that_are_up(name):
    # Replica 1 is the best in every respect, but it is down.
    better = {"match_tokens": [0, 160, 0], "in_flight": [3, 0, 4], "waiting": [2, 0, 2]}
    assert chosen(name, up=(1, 0, 1), **better) <= {0, 2}
    assert chosen(name, up=(1, 0, 0)) == {0}
    assert chosen(name, up=(0, 0, 0)) == {0}
    admission = policy_of(name, system_of(3, admission=True))
    nowhere = admission.act(observation_of(3, rows=ROWS), np.tile([0, 0, 0, 1], (ROWS, 1)))
    assert (nowhere == 3).all()


def test_round_robin_takes_turns_and_passes_over_what_is_down():
    rule = policy_of("round_robin")
    assert [chosen(rule) for _ in range(4)] == [{0}, {1}, {2}, {0}]
    assert chosen(rule, up=(1, 0, 1)) == {2}
    assert chosen(rule, up=(0, 1, 1)) == {1}
    rule.episode_start(np.arange(ROWS) < 9)
    assert chosen(rule) == {0, 2}


def test_random_and_least_load_draw_among_equals():
    assert chosen("random") == {0, 1, 2}
    assert chosen("least_load", in_flight=[2, 1, 1]) == {1, 2}


def test_weighted_load_counts_requests_by_the_speed_of_the_card():
    slow = system_of(3, decode_speed=[1000.0, 250.0, 1000.0])
    rule = policy_of("weighted_load", slow, load_s=0.01)
    # 160 tokens at 1,000/s take .16 s everywhere; 4 requests at a quarter of the speed count 16.
    assert chosen(rule, in_flight=[14, 3, 20]) == {0}
    assert chosen(rule, in_flight=[16, 3, 20]) == {1}
    even = policy_of("weighted_load", slow, load_s=0.01, power=0.0)
    assert chosen(even, in_flight=[14, 3, 20]) == {1}
    # A prefix of 100 tokens is worth .1 s, ten requests.
    assert chosen(rule, in_flight=[14, 3, 20], match_tokens=[0, 0, 100]) == {2}
    blind = policy_of("weighted_load", load_s=0.0)
    assert chosen(blind, in_flight=[0, 9, 0], match_tokens=[0, 16, 0]) == {1}
    for bad in ({"load_s": -1.0}, {"power": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            policy_of("weighted_load", **bad)


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
    assert chosen("lmetric", in_flight=load, match_tokens=match) == {expected}


def test_preble_exploits_what_is_mostly_cached():
    rule = policy_of("preble")
    # 80 of 160 are no majority: .08 against .16 s; then .08 of load + .08; then .16 + .08.
    assert [chosen(rule, match_tokens=[80, 0, 0]) for _ in range(3)] == [{0}, {0}, {1}]
    rule.episode_start(np.full(ROWS, True))
    chosen(rule, match_tokens=[80, 0, 0])
    # 96 > 64: exploited on replica 0 although its load is .08 s; both match: the less loaded one.
    assert chosen(rule, match_tokens=[96, 0, 0]) == {0}
    assert chosen(rule, match_tokens=[96, 96, 0]) == {1}
    with pytest.raises(ValueError, match="window_s"):
        policy_of("preble", window_s=0)


def test_mooncake_takes_the_least_time_to_first_token():
    given = {"prefill_tokens": [300, 100, 0], "match_tokens": [160, 0, 0]}
    assert chosen("mooncake", **given) == {2}  # .300, .260 and .160 s
    speed = [2000.0, 1000.0, 500.0]
    assert chosen("mooncake", prefill_tokens_per_s=speed, **given) == {0}  # .15, .26, .32
    assert chosen("mooncake") == {0}


def test_production_stack_prefix_is_blind_to_load():
    given = {"in_flight": [500, 500, 0], "waiting": [90, 90, 0]}
    assert chosen("production_stack_prefix", match_tokens=[16, 0, 0], **given) == {0}
    assert chosen("production_stack_prefix", match_tokens=[16, 16, 0], **given) == {0, 1}
    assert chosen("production_stack_prefix", **given) == {0, 1, 2}


def test_ray_takes_the_best_match_or_the_smallest_tree():
    rule = policy_of("ray_prefix_aware")
    assert chosen(rule, match_tokens=[16, 0, 0], in_flight=[9, 0, 0]) == {0}  # 10 % is enough
    tree = {"index_tokens": [70, 50, 50], "in_flight": [0, 3, 2]}
    assert chosen(rule, match_tokens=[15, 0, 0], **tree) == {2}
    assert chosen(rule, match_tokens=[15, 0, 0], in_flight=[1, 1, 2]) == {0, 1}
    assert chosen(rule, match_tokens=[80, 80, 0], in_flight=[5, 4, 0]) == {1}


def test_llm_d_scores():
    given = {"waiting": [0, 2, 4], "kv_usage": [0.75, 0.5, 0.0], "match_tokens": [80, 160, 0]}
    # queue 1, .5, 0; kv .25, .5, 1; prefix .5, 1, 0, with the weights 2, 2 and 3.
    rule = policy_of("llm_d")
    cost, _ = rule.decide(View(observation_of(3, **given), rule.system), np.ones((1, 3), bool))
    assert cost[0].tolist() == [-(2 + 0.5 + 1.5), -(1 + 1 + 3), -(0 + 2 + 0)]


def test_llm_d_affinity_takes_the_least_token_load_of_what_is_kept():
    # 18 s at 15,928 tokens/s are 286,704 tokens.
    keep = {"match_tokens": [160, 128, 0], "prefill_tokens": [286_704, 286_705, 0]}
    assert chosen("llm_d_affinity", **keep) == {0}
    # One token more and all are kept: 286,705 + 0 against 0 + 160 uncached.
    keep["prefill_tokens"] = [286_705, 286_705, 0]
    assert chosen("llm_d_affinity", **keep) == {2}
    # Both have it, 8 of 10 blocks are .8; 40 in flight + 32 uncached are less than 90 + 0.
    keep["prefill_tokens"] = [90, 40, 0]
    assert chosen("llm_d_affinity", **keep) == {1}
    # Loads above the limit are alike.
    assert chosen("llm_d_affinity", prefill_tokens=[10**7, 9 * 10**6, 10**8]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "load", "match", "expected"),
    [
        ("sglang_cache_aware", [40, 8, 9], [96, 0, 0], {0}),  # 40 - 8 = 32 is in balance
        ("sglang_cache_aware", [41, 8, 9], [96, 0, 0], {1}),
        ("sglang_cache_aware", [440, 400, 401], [96, 0, 0], {0}),  # 440 is not above 1.1 x 400
        ("sglang_cache_aware", [9, 8, 8], [80, 0, 0], {1}),  # 80 of 160 is not above half
        ("sglang_cache_aware_cli", [72, 8, 9], [49, 0, 0], {0}),
        ("sglang_cache_aware_cli", [73, 8, 9], [49, 0, 0], {1}),
        ("sglang_cache_aware_cli", [9, 8, 8], [48, 0, 0], {1}),
        # Mean 2, deviation 1.73: 4 is beyond 3.73, so the next match is taken.
        ("aibrix", [4, 1, 1], [160, 80, 0], {1}),
        # Out of balance, 24 > 2 (8 + 1), 24 - 0 >= 8: only the least loaded may match.
        ("aibrix", [24, 0, 0], [160, 0, 0], {1, 2}),
        ("aibrix_documented", [16, 16, 0], [160, 80, 16], {0}),
        ("aibrix_documented", [17, 17, 0], [160, 80, 16], {2}),
    ],
)
def test_published_settings(name, load, match, expected):
    assert chosen(name, in_flight=load, match_tokens=match) == expected
