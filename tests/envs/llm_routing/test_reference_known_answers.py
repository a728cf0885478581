"""The slow reference against numbers worked out by hand.

Every expected number is derived in the comment beside it. Laws use dyadic coefficients, so most
comparisons are exact.
"""

import math

import pytest

from .reference import (
    ExpertConfig,
    ReferenceConfig,
    ReferenceSimulator,
    TableLaw,
    linear_law,
    simulate,
)

UNIT_LAW = linear_law(1.0)  # every iteration takes 1 s
DROP, SEND = 0, 1


class Tables:
    """Stands in for the profile tables: attributes of the same names."""

    # dense(t) = 1 + t/8
    dense_tokens = [0.0, 8.0]
    dense_s = [1.0, 2.0]
    # chunk_attention(c, ctx) = c/16 + c*ctx/128
    chunk_tokens = [0.0, 16.0]
    context_tokens = [0.0, 16.0]
    chunk_attention_s = [[0.0, 0.0], [1.0, 3.0]]
    # decode_attention(b, x) = b*x/32
    decode_sequences = [0.0, 4.0]
    decode_context_tokens = [0.0, 32.0]
    decode_attention_s = [[0.0, 0.0], [0.0, 4.0]]
    # head(n) = n/8
    head_sequences = [0.0, 8.0]
    head_s = [0.0, 1.0]


def one_expert(law, requests, *, capacity_tokens=1600, k1=0.0, k2=0.0, predicted=None, **config):
    """A simulator of one expert from (arrival, prompt, output, score) rows, without network."""
    defaults = {
        "router_delay_s": 0.0,
        "bytes_per_token": 0.0,
        "max_output_tokens": 16,
        "record_iterations": True,
    }
    defaults.update(config)
    predicted = predicted or [(row[3], row[2]) for row in requests]
    return ReferenceSimulator(
        ReferenceConfig(experts=(ExpertConfig(law, capacity_tokens, k1, k2),), **defaults),
        arrivals=[row[0] for row in requests],
        prompt_tokens=[row[1] for row in requests],
        scores=[[row[3]] for row in requests],
        output_tokens=[[row[2]] for row in requests],
        predicted_scores=[[score] for score, _ in predicted],
        predicted_lengths=[[length] for _, length in predicted],
    )


# prefill(P) = 1 + P/8; decode(b, T) = 1 + b/2 + T/16. Two slots.
#   A: t=0, p=8, d=3, s=0.5; B: t=1, p=16, d=2, s=0.75; C: t=2.5, p=4, d=1, s=0.25;
#   D: t=9, dropped.
# tau=0       A admitted, prefill 1 + 8/8 = 2                                  -> 2
# tau=2       A has 1 token; B admitted, prefill 1 + 16/8 = 3                  -> 5
# tau=5       B has 1 token; no slot for C; decode of A, B: T = 9 + 17 = 26,
#             1 + 1 + 26/16 = 3.625                                            -> 8.625
# tau=8.625   A has 2, B has 2 and leaves; C admitted, prefill 1 + 4/8 = 1.5   -> 10.125
# tau=10.125  C has 1 and leaves; decode of A: 1 + 0.5 + 10/16 = 2.125         -> 12.25
# tau=12.25   A has 3 and leaves
ORCA_LAW = linear_law(1.0, k1=1 / 8, kb=1 / 2, k2=1 / 16)
ORCA_REQUESTS = [(0.0, 8, 3, 0.5), (1.0, 16, 2, 0.75), (2.5, 4, 1, 0.25), (9.0, 4, 1, 1.0)]
ORCA_ACTIONS = [SEND, SEND, SEND, DROP]
# l_A = 12.25/3 = 4.083.., l_B = (8.625 - 1)/2 = 3.8125, l_C = 10.125 - 2.5 = 7.625.


def orca_example(**config):
    defaults = {"running_capacity": 2, "k1": 0.25, "k2": 0.125}
    defaults.update(config)
    return one_expert(ORCA_LAW, ORCA_REQUESTS, capacity_tokens=160, **defaults)


def test_orca_trace_of_three_requests():
    sim = orca_example()
    _, (a, b, c, d) = simulate(sim, ORCA_ACTIONS)
    assert (a.admitted, a.first_token, a.finish) == (0.0, 2.0, 12.25)
    assert (b.admitted, b.first_token, b.finish) == (2.0, 5.0, 8.625)
    assert (c.admitted, c.first_token, c.finish) == (8.625, 10.125, 10.125)
    assert (a.ttft, a.tpot, a.e2e) == (2.0, 5.125, 12.25)
    assert (b.ttft, b.tpot, b.latency_per_token) == (4.0, 3.625, 3.8125)
    assert math.isnan(c.tpot)
    assert (c.waiting_s, c.inference_s) == (6.125, 1.5)
    assert [r.outcome for r in (a, b, c, d)] == ["completed"] * 3 + ["dropped"]
    assert d.expert == -1 and a.expert == 0
    assert [(i.start, i.end) for i in sim.experts[0].history] == [
        (0.0, 2.0),
        (2.0, 5.0),
        (5.0, 8.625),
        (8.625, 10.125),
        (10.125, 12.25),
    ]


def test_orca_observation_shows_starts_but_not_the_iteration_in_flight():
    sim = orca_example()
    sim.step(SEND)
    sim.step(SEND)
    # t = 2.5, inside B's prefill (2..5). A holds blocks(8+1) = 1, B blocks(16) = 1, of 10.
    observation, mask = sim.observe()
    assert observation["experts"].tolist() == [[0.2, 2.0, 0.0]]
    assert observation["running"][0].tolist() == [
        [8.0, 0.5, 3.0, 0.1, 1.0, 2.5],  # one token after 2.5 s
        [16.0, 0.75, 2.0, 0.1, 0.0, 1.5],  # none after 1.5 s: divided by 1
    ]
    assert observation["request"].tolist() == [[4.0, 0.25, 1.0]]
    assert observation["waiting"].sum() == 0
    assert mask.tolist() == [1, 1]
    sim.step(SEND)
    # t = 9, inside C's prefill (8.625..10.125): A has 2 tokens, B is gone.
    observation, _ = sim.observe()
    assert observation["running"][0].tolist() == [
        [8.0, 0.5, 3.0, 0.1, 2.0, 4.5],
        [4.0, 0.25, 1.0, 0.1, 0.0, 6.5],
    ]
    assert observation["running_mask"].tolist() == [[1, 1]]
    _, _, terminated = sim.step(DROP)
    observation, mask = sim.observe()
    assert terminated
    assert all(observation[k].sum() == 0 for k in observation if k != "latency_requirement")
    assert mask.tolist() == [1, 1]


def test_a_request_joins_the_iteration_that_starts_at_its_arrival():
    # Both arrive at 0 without delay, and are in one prefill [0, 1].
    requests = [(0.0, 4, 1, 1.0), (0.0, 4, 1, 1.0)]
    _, log = simulate(one_expert(UNIT_LAW, requests), [SEND] * 2)
    assert [r.finish for r in log] == [1.0, 1.0]
    # An iteration ends at 1, where the next request arrives: its prefill [1, 2], A's decode [2, 3].
    requests = [(0.0, 4, 2, 1.0), (1.0, 4, 1, 1.0)]
    _, log = simulate(one_expert(UNIT_LAW, requests), [SEND] * 2)
    assert [r.finish for r in log] == [3.0, 2.0]


def test_network_delay_reorders_and_counts_as_waiting():
    # 1 byte per token at 16 bit/s is p/2 seconds, plus 0.5 s of routing.
    #   A: t=0, p=8 -> available 0 + 0.5 + 4 = 4.5; B: t=1, p=2 -> 1 + 0.5 + 1 = 2.5.
    # B is served in [2.5, 3.5], A in [4.5, 5.5]; the idle expert wakes for each.
    requests = [(0.0, 8, 1, 1.0), (1.0, 2, 1, 1.0), (2.0, 1, 1, 1.0)]
    sim = one_expert(
        UNIT_LAW, requests, router_delay_s=0.5, bytes_per_token=1.0, bandwidth_bps=16.0
    )
    sim.step(SEND)
    sim.step(SEND)
    observation, _ = sim.observe()
    assert observation["experts"].tolist() == [[0.0, 0.0, 2.0]]
    assert observation["waiting"][0, :2].tolist() == [
        [2.0, 1.0, 1.0, 0.0, 0.0, 1.0],
        [8.0, 1.0, 1.0, 0.0, 0.0, 2.0],
    ]
    assert observation["waiting_mask"].tolist() == [[1, 1, 0, 0, 0]]
    sim.step(DROP)
    a, b, _ = sim.log
    assert (a.available, a.admitted, a.finish) == (4.5, 4.5, 5.5)
    assert (b.available, b.admitted, b.finish) == (2.5, 2.5, 3.5)
    assert (a.communication_s, a.routing_s, a.waiting_s, a.inference_s) == (4.0, 0.5, 0.0, 1.0)
    assert a.latency_per_token == 5.5


def test_boundary_at_the_arrival_time_is_to_come():
    # A is at the expert at 0.5 + 0.5 = 1, where B arrives: A still waits.
    requests = [(0.5, 4, 1, 1.0), (1.0, 4, 1, 1.0), (2.0, 4, 1, 1.0)]
    sim = one_expert(UNIT_LAW, requests, router_delay_s=0.5)
    sim.step(SEND)
    observation, _ = sim.observe()
    assert observation["experts"][0].tolist() == [0.0, 0.0, 1.0]
    # It finishes at 2, where C arrives: C finds it running, and its end pays the action at 2.
    assert sim.step(DROP)[0] == 0.0
    observation, _ = sim.observe()
    assert observation["experts"][0].tolist() == [1 / 100, 1.0, 0.0]
    reward, _, _ = sim.step(DROP)
    assert reward == 0.0 and sim.log[0].finish == 2.0  # late: 1.5 s > 0.03 s
    slow = one_expert(UNIT_LAW, requests, router_delay_s=0.5, latency_requirement_s=1.5)
    slow.step(SEND)
    slow.step(DROP)
    assert slow.step(DROP)[0] == 1.0  # l = 1.5 = L is in time


def test_chunked_prefill_splits_a_prompt():
    # step = 1 + tokens/8 + sum(c/16 + c*ctx/128) + T/32 + n/8; budget 8.
    #   A: t=0, p=4, d=3; B: t=0.5, p=12, d=2.
    # tau=0          A: chunk 4: 1.5 + 0.25 + 0 + 0.125 = 1.875                -> 1.875
    # tau=1.875      A has 1, decodes (T=5); B: chunk 7 of 12, context 0:
    #                2 + 0.4375 + 0.15625 + 0.25 = 2.84375                     -> 4.71875
    # tau=4.71875    A has 2, decodes (T=6); B: chunk 5, context 7:
    #                1.75 + (0.3125 + 35/128) + 0.1875 + 0.25 = 2.7734375      -> 7.4921875
    # tau=7.4921875  A has 3, leaves; B has 1, decodes (T=13):
    #                1.125 + 0.40625 + 0.125 = 1.65625                         -> 9.1484375
    sim = one_expert(
        TableLaw(Tables()),
        [(0.0, 4, 3, 1.0), (0.5, 12, 2, 1.0)],
        scheduler="chunked_prefill",
        prefill_token_budget=8,
    )
    _, (a, b) = simulate(sim, [SEND, SEND])
    assert (a.admitted, a.first_token, a.finish) == (0.0, 1.875, 7.4921875)
    assert (b.admitted, b.first_token, b.finish) == (1.875, 7.4921875, 9.1484375)
    history = sim.experts[0].history
    assert [i.decodes for i in history] == [[], [0], [0], [1]]
    assert [i.chunks for i in history] == [[(0, 4, 0)], [(1, 7, 0)], [(1, 5, 7)], []]


def test_chunked_prefill_serves_older_prefills_before_admission():
    # Budget 4, 1 s per iteration. A p=6 d=1, B p=3 d=1, C p=1 d=1; A at 0, B and C at 0.5.
    # [0,1] A 4; [1,2] A 2, B 2; [2,3] B 1, C 1. Finish: A 2, B 3, C 3.
    requests = [(0.0, 6, 1, 1.0), (0.5, 3, 1, 1.0), (0.5, 1, 1, 1.0)]
    sim = one_expert(UNIT_LAW, requests, scheduler="chunked_prefill", prefill_token_budget=4)
    _, log = simulate(sim, [SEND] * 3)
    assert [i.chunks for i in sim.experts[0].history] == [
        [(0, 4, 0)],
        [(0, 2, 4), (1, 2, 0)],
        [(1, 1, 2), (2, 1, 0)],
    ]
    assert [r.finish for r in log] == [2.0, 3.0, 3.0]
    # Budget 1: while A decodes nothing else is scheduled. A p=1 d=3 in [0,3], B p=1 d=2 after.
    requests = [(0.0, 1, 3, 1.0), (0.5, 1, 2, 1.0)]
    sim = one_expert(UNIT_LAW, requests, scheduler="chunked_prefill", prefill_token_budget=1)
    _, log = simulate(sim, [SEND] * 2)
    assert [r.finish for r in log] == [3.0, 5.0]
    assert log[1].admitted == 3.0


PAGED = {
    "capacity_tokens": 16,  # 4 blocks of 4
    "block_size": 4,
    "max_output_tokens": 8,
    "memory_policy": "paged",
}


def test_paged_preemption_recomputes_and_emits_the_next_token():
    # prefill(P) = 1 + P/8, decode 1. A: t=0, p=6, d=5; B: t=0.5, p=5, d=4.
    # tau=0      A admitted, blocks(6) = 2; prefill 1.75                        -> 1.75
    # tau=1.75   A has 1, blocks(7) = 2; B blocks(5) = 2 fits; prefill 1.625    -> 3.375
    # tau=3.375  B has 1; decode                                               -> 4.375
    # tau=4.375  A has 2 (8 tokens), B has 2 (7): 4 blocks; decode              -> 5.375
    # tau=5.375  A has 3 (9 tokens, 3 blocks), B has 3 (8, 2): 5 > 4, B goes; A decodes -> 6.375
    # tau=6.375  A has 4 (10, 3); B needs blocks(5 + 3) = 2: 5 > 4; A decodes   -> 7.375
    # tau=7.375  A has 5, leaves; B: prefill of 8 tokens = 2                    -> 9.375
    # tau=9.375  B has 4, leaves
    law = linear_law(1.0, k1=1 / 8)
    sim = one_expert(law, [(0.0, 6, 5, 1.0), (0.5, 5, 4, 1.0), (6.0, 1, 1, 1.0)], **PAGED)
    sim.step(SEND)
    sim.step(SEND)
    observation, _ = sim.observe()  # t = 6
    assert observation["experts"].tolist() == [[0.75, 1.0, 1.0]]
    assert observation["running"][0, 0].tolist() == [6.0, 1.0, 5.0, 0.75, 3.0, 2.0]
    assert observation["waiting"][0, 0].tolist() == [5.0, 1.0, 4.0, 0.0, 3.0, 5.5 / 3]
    sim.step(DROP)
    a, b, _ = sim.log
    assert (a.first_token, a.finish, a.preemptions) == (1.75, 7.375, 0)
    assert (b.admitted, b.first_token, b.finish, b.preemptions) == (1.75, 3.375, 9.375, 1)
    history = sim.experts[0].history
    assert [i.preempted for i in history] == [[], [], [], [], [1], [], []]
    assert history[-1].chunks == [(1, 8, 0)]


def test_a_preempted_request_goes_ahead_of_a_full_queue():
    # The same with C (t=4, p=1, d=1) in a waiting list of one and two slots. B is put before C;
    # at 6.375 B does not fit and C may not pass it; at 7.375 both: prefill 1 + 9/8 -> 9.5.
    law = linear_law(1.0, k1=1 / 8)
    requests = [(0.0, 6, 5, 1.0), (0.5, 5, 4, 1.0), (4.0, 1, 1, 1.0), (6.0, 1, 1, 1.0)]
    sim = one_expert(law, requests, running_capacity=2, waiting_capacity=1, **PAGED)
    for _ in range(3):
        assert sim.observe()[1].tolist() == [1, 1]
        sim.step(SEND)
    observation, mask = sim.observe()  # t = 6
    assert observation["experts"].tolist() == [[0.75, 1.0, 2.0]]  # two wait in a list of one
    assert observation["waiting"].shape == (1, 1, 6)
    assert observation["waiting"][0, 0, 0] == 5.0  # B, the preempted one
    assert mask.tolist() == [1, 0]
    sim.step(SEND)
    assert [r.outcome for r in sim.log] == ["completed"] * 3 + ["rejected"]
    assert [r.finish for r in sim.log[:3]] == [7.375, 9.5, 9.5]


def test_a_full_queue_rejects_and_the_mask_says_so():
    # One slot, one waiting place: A runs, B waits, C is rejected, D finds A done (t = 2.5) and
    # takes the place that B left.
    requests = [(0.0, 4, 2, 1.0), (0.25, 4, 1, 1.0), (0.5, 4, 1, 1.0), (2.5, 4, 1, 1.0)]
    sim = one_expert(
        UNIT_LAW,
        requests,
        running_capacity=1,
        waiting_capacity=1,
        latency_requirement_s=100.0,
        reward="paid_forward",
    )
    masks = []
    rewards = []
    for _ in requests:
        masks.append(sim.observe()[1].tolist())
        rewards.append(sim.step(SEND)[0])
    assert masks == [[1, 1], [1, 1], [1, 0], [1, 1]]
    assert [r.outcome for r in sim.log] == ["completed", "completed", "rejected", "completed"]
    assert [r.finish for r in sim.log[:2]] == [2.0, 3.0]
    assert sim.log[2].expert == 0 and math.isnan(sim.log[2].available)
    assert rewards == [1.0, 1.0, 0.0, 1.0]  # nothing is paid for the rejected one


def test_completed_qos_falls_into_the_interval_of_the_completion():
    # L = 4: only B (3.8125) is in time; it finishes at 8.625, between C (2.5) and D (9).
    rewards, _ = simulate(
        orca_example(reward="completed_qos", latency_requirement_s=4.0), ORCA_ACTIONS
    )
    assert rewards == [0.0, 0.0, 0.75, 0.0]


def test_paid_forward_pays_on_acceptance_and_takes_back_what_is_late():
    # Accepted: 0.5, 0.75, 0.25, nothing for the drop; A and C end late in the drain.
    sim = orca_example(reward="paid_forward", latency_requirement_s=4.0)
    rewards, log = simulate(sim, ORCA_ACTIONS)
    assert rewards == [0.5, 0.75, 0.25, -0.75]
    assert sum(rewards) == 0.75 == sum(r.qos(4.0) for r in log)


# Eq. 15/16 with k1 = 1/4, k2 = 1/8, by hand.
# Before B's action (t=1): A runs, g=0, l = 1/1 = 1; m = min(3 - 0, 2) = 2;
#   added = (16/4 + (17 + 18)/8)/3 = 8.375/3 = 2.7917; estimate 3.7917.
# Before C's action (t=2.5): p=4, d=1.
#   A: g=1, l = 2.5; m = min(2, 1) = 1; added = (1 + 5/8)/3 = 0.5417; estimate 3.0417.
#   B: g=0, l = 1.5; m = min(2, 1) = 1; added = 1.625/2 = 0.8125; estimate 2.3125.
@pytest.mark.parametrize(
    ("limit", "penalty", "at_b", "at_c"),
    [
        (3.0, "literal", 0.5, 0.5),  # A at both
        (3.0, "new_violations", 0.5, 0.5),
        (2.0, "literal", 0.5, 1.25),  # at C: A, late already, and B
        (2.0, "new_violations", 0.5, 0.75),  # at C: only B crosses
        (2.3125, "new_violations", 0.5, 0.75),  # an estimate equal to L counts (Eq. 16: >=)
        (2.3125, "literal", 0.5, 1.25),
        (2.5, "new_violations", 0.5, 0.0),  # A has l = L: not below it, so not new
        (2.5, "literal", 0.5, 0.5),
        (4.0, "literal", 0.0, 0.0),
    ],
)
def test_qos_aware_penalty(limit, penalty, at_b, at_c):
    sim = orca_example(reward="qos_aware", penalty=penalty, latency_requirement_s=limit)
    terms = []
    for action in ORCA_ACTIONS:
        reward, parts, _ = sim.step(action)
        assert reward == pytest.approx(sum(parts.values()))
        terms.append(-parts["penalty"])
    assert terms == [0.0, at_b, at_c, 0.0]
