"""Times and costs of plans against a literal transcription and answers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from servegym.envs.serverless_moe.kernel.cost import Bill, main_usd_s, rounding_s
from servegym.envs.serverless_moe.outcomes import evaluate_plan, plan_start
from servegym.envs.serverless_moe.plans import lpt, make_plan, mix_plan, violated
from servegym.envs.serverless_moe.records import CONSTRAINTS, Cold, Plan, Request, recorded_request
from servegym.envs.serverless_moe.sets import least_used
from servegym.envs.serverless_moe.system import best_tpot_s, best_ttft_s, build_system
from servegym.envs.workloads.activations import load_activations, load_model, make_toy_activations
from servegym.envs.workloads.expert_sets import bit_sets, set_bits
from servegym.hardware_profiles.serverless import GPU_PROFILES

from . import reference

TOY = make_toy_activations(prompts=12, layers=3, experts=8, top_k=2)
GRID = {"main_specs_mb": (100.0, 3000.0, 100.0), "remote_specs_mb": (10.0, 1000.0, 10.0)}


def toy_system(**kwargs):
    system = build_system(TOY.model, **(GRID | kwargs))
    # A dense block in front, as DeepSeek-V2-Lite has one.
    return dataclasses.replace(
        system,
        layers=4,
        experts=np.array([0, 8, 8, 8]),
        non_expert_mb=np.array([30.0, 20.0, 21.0, 22.0]),
        kv_mb_per_token=np.full(4, 0.0011),
    )


def toy_request(rng, n_in=None, n_out=None):
    n_in = int(rng.integers(1, 60)) if n_in is None else n_in
    n_out = int(rng.integers(1, 20)) if n_out is None else n_out
    tokens = rng.choice(TOY.bank, n_in + n_out)
    counts = set_bits(tokens[:n_in], 8).sum(axis=0)
    return Request(counts, tokens[n_in:], rng.lognormal(-7.5, 0.5, 3), n_in)


def random_plan(system, rng):
    remote = rng.random((3, 8)) < rng.choice([0.0, 0.3, 0.8, 1.0])
    replicas = np.where(remote.any(axis=1), rng.integers(1, 5, 3), 0)
    assignment = np.where(remote, rng.integers(0, np.maximum(replicas, 1)[:, None], (3, 8)), -1)
    mb = np.where(remote.any(axis=1), rng.choice(system.remote_specs_mb[:15], 3), 0.0)
    return Plan(remote, float(rng.choice(system.main_specs_mb[:4])), mb, replicas, assignment)


def test_a_recorded_request_counts_tokens_one_by_one():
    book = load_activations("deepseek-v2-lite")
    prompt, offset, n_in, n_out = 3, 5, 200, 150
    request = recorded_request(book, prompt, offset, n_in, n_out, np.full(26, 3e-4))
    bank = book.bank[book.bank_start[prompt] : book.bank_start[prompt + 1]]
    assert n_in > len(bank)  # so that it begins anew
    counts = np.zeros_like(request.prefill_counts)
    for i in range(n_in):
        for layer, mask in enumerate(bank[(offset + i) % len(bank)].tolist()):
            for k in range(64):
                counts[layer, k] += mask >> k & 1
    assert (request.prefill_counts == counts).all()
    assert (request.decode_sets[0] == bank[(offset + n_in) % len(bank)]).all()
    assert request.n_out == n_out


@pytest.mark.parametrize("per_call", [True, False])
@pytest.mark.parametrize("billed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_random_plans_cost_what_the_loops_say(per_call, billed, shared):
    rng = np.random.default_rng([2, billed, shared])
    seen = set()
    for _ in range(25):
        system = dataclasses.replace(
            toy_system(
                gpu=str(rng.choice(list(GPU_PROFILES))),
                payload_mb=0.05,
                z_max=3,
                fees=["none", "aws_lambda", (3e-5, 0.01)][int(rng.integers(3))],
            ),
            per_call=per_call,
            bill_cold_start=billed,
            load_shared=shared,
        )
        request, plan = toy_request(rng), random_plan(system, rng)
        cold = Cold(bool(rng.random() < 0.5), rng.integers(0, plan.replicas + 1))
        got = evaluate_plan(system, request, plan, cold=cold)
        want = reference.serve(system, request, plan, cold.main, cold.replicas)
        for name in Bill._fields:
            true = getattr(want, name)
            assert getattr(got.bill, name) == pytest.approx(true, rel=1e-9, abs=1e-30), name
        assert got.ttft_s == pytest.approx(want.ttft_s, rel=1e-9)
        assert got.tpot_s == pytest.approx(want.tpot_s, rel=1e-9)
        assert {k for k in CONSTRAINTS if got.violations[k]} == want.bad
        assert got.feasible == (not want.bad)
        seen |= want.bad
    assert seen >= {"main_memory", "remote_memory", "payload", "replicas"}


def test_a_whole_number_of_steps_is_not_rounded():
    system = toy_system(fees="aws_lambda")
    assert (system.invocation_usd, system.granularity_s) == (2e-7, 1e-3)
    steps = np.arange(1, 5000) * 1e-3
    assert rounding_s(system, steps).max() < 1e-14
    assert rounding_s(system, steps + 1e-4) == pytest.approx(np.full(4999, 9e-4))


def test_made_plans_are_the_smallest_feasible_ones():
    rng = np.random.default_rng(2)
    for _ in range(40):
        system = toy_system(payload_mb=0.079)
        request = toy_request(rng, n_in=40)
        activations = rng.dirichlet(np.ones(8), 3)
        remote = least_used(activations, int(rng.integers(0, 9)))
        plan = make_plan(system, remote, request.prefill_counts, request.n_out)
        assert evaluate_plan(system, request, plan).feasible
        if plan.main_mb > system.main_specs_mb[0]:
            less = dataclasses.replace(plan, main_mb=plan.main_mb - 100.0)
            assert violated(system, request.prefill_counts, request.n_out, less)["main_memory"]
        for layer in np.flatnonzero(plan.remote_mb > system.remote_specs_mb[0]):
            mb = plan.remote_mb.copy()
            mb[layer] -= 10.0
            less = dataclasses.replace(plan, remote_mb=mb)
            assert violated(system, request.prefill_counts, request.n_out, less)["remote_memory"]
    more = {"main_headroom_mb": 250.0, "remote_headroom_mb": 1e9, "extra_replicas": 99}
    big = make_plan(system, remote, request.prefill_counts, 5, **more)
    assert big.main_mb == plan.main_mb + 300.0
    assert (big.remote_mb[remote.any(axis=1)] == 1000.0).all()
    assert big.replicas.max() == system.z_max


def test_nothing_remote_is_mix():
    """b = 0 has no remote term left: cost is (PT + GT) times the rate, and all of it local."""
    system, rng = toy_system(), np.random.default_rng(3)
    for _ in range(20):
        request = toy_request(rng)
        plan = make_plan(system, np.zeros((3, 8), bool), request.prefill_counts, request.n_out)
        mix = mix_plan(system, request.n_out)
        for field in dataclasses.fields(Plan):
            np.testing.assert_array_equal(getattr(plan, field.name), getattr(mix, field.name))
        got = evaluate_plan(system, request, plan)
        pt = sum(reference.tau_f(system, request.n_in) for _ in range(4))
        for layer in range(3):
            pt += 2 * reference.tau_sw(system, request.n_in)
            for n in request.prefill_counts[layer]:
                pt += reference.tau_c(system, mix.main_mb, n)
        step = 4 * reference.tau_f(system, 1) + 3 * (
            2 * reference.tau_sw(system, 2) + 2 * reference.tau_c(system, mix.main_mb, 1)
        )
        rate = main_usd_s(system, request.n_in + request.n_out, mix.main_mb)
        assert got.bill.prefill_s == pytest.approx(pt, rel=1e-12)
        assert got.tpot_s == pytest.approx(step, rel=1e-12)
        assert got.cost_usd == pytest.approx((pt + request.n_out * step) * rate, rel=1e-12)
        remote_and_cold = got.bill[4:7]
        assert remote_and_cold == (0.0, 0.0, 0.0)


def test_the_cold_start_of_deepseek_v2_lite_by_hand():
    system = build_system("deepseek-v2-lite")
    weights = 26 * 64 * 16.5
    assert system.all_non_expert_mb == pytest.approx(1701.0, abs=1.0)
    assert system.all_experts_mb == pytest.approx(weights, rel=1e-3)
    plan = mix_plan(system, 400)
    assert plan.main_mb == 27500.0  # 27,456 MB of experts and 400 tokens of 4 KiB: 27,458 MB
    start = plan_start(system, plan, Cold(True, np.zeros(26, int)))
    assert start.main_s == pytest.approx(1.0 + (1701.0 + weights) / 2600.0, rel=1e-3)
    assert start.remote_s == 0.0
    all_remote, once = np.ones((26, 64), bool), Cold(True, np.ones(26, int))
    plan = make_plan(system, all_remote, np.ones((26, 64)), 400)
    start = plan_start(system, plan, once)
    assert start.main_s == pytest.approx(1.0 + 1701.0 / 2600.0, rel=1e-3)
    assert start.remote_s == pytest.approx(1.0 + 64 * 16.5 / 2600.0, rel=1e-3)
    shared = plan_start(dataclasses.replace(system, load_shared=True), plan, once)
    assert shared.main_s == pytest.approx(1.0 + (1701.0 + weights) / 2600.0, rel=1e-3)


def test_the_law_of_expert_time():
    system = build_system("deepseek-v2-lite")
    assert system.expert_cpu_s(1024.0, 1) == pytest.approx(0.80e-3, rel=1e-3)
    assert system.expert_cpu_s(1024.0, 0) == 0.0
    assert system.expert_cpu_s(40000.0, 1) == pytest.approx(0.20e-3, rel=1e-3)
    step = system.expert_cpu_s(2048.0, 9) - system.expert_cpu_s(2048.0, 1)
    assert step == pytest.approx(8 * 0.148e-3 / 2)
    wide = system.expert_cpu_s(40 * 1024.0, 17) - system.expert_cpu_s(40 * 1024.0, 1)
    assert wide == pytest.approx(0.148e-3)
    larger = build_system("mixtral-8x7b").expert_cpu_s(1024.0, 1)
    assert larger == pytest.approx(0.80e-3 * 14336 * 4096 / (2048 * 1408), rel=1e-3)


def test_lpt_by_hand():
    assert lpt(np.array([7.0, 6.0, 5.0, 4.0, 3.0]), 2).tolist() == [0, 1, 1, 0, 0]
    assert lpt(np.array([1.0, 1.0, 1.0]), 3).tolist() == [0, 1, 2]
    assert least_used(np.array([[0.7, 0.1, 0.1, 0.1]]), 2).tolist() == [[0, 1, 1, 0]]
    members = np.random.default_rng(0).random((5, 64)) < 0.5
    np.testing.assert_array_equal(set_bits(bit_sets(members), 64), members)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model": "deepseek-v2-light"}, "deepseek-v2-lite"),
        ({"main_specs_mb": (1000.0, 20000.0, 100.0)}, "main_specs_mb.*cannot hold.*10f"),
        ({"remote_specs_mb": (100.0, 1000.0, 100.0)}, "remote_specs_mb.*cannot hold.*10e"),
        ({"payload_mb": 0.001}, "payload_mb=0.001 cannot carry one token vector.*10g"),
        ({"fees": "aws"}, "fees"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_system(**arguments)


@pytest.mark.parametrize("gpu", GPU_PROFILES)
def test_no_plan_beats_the_best_achievable_and_a_good_one_comes_near(gpu):
    system, rng = toy_system(gpu=gpu), np.random.default_rng(6)
    nearest = {"ttft": np.inf, "tpot": np.inf}
    for _ in range(60):
        request, plan = toy_request(rng), random_plan(system, rng)
        plan.remote_mb = np.where(plan.remote_mb > 0, system.remote_specs_mb[-1], 0.0)
        plan.main_mb = float(system.main_specs_mb[-1])
        for cold in (True, False):
            starts = Cold(cold, np.where(cold, plan.replicas, 0))
            got = evaluate_plan(system, request, plan, cold=starts)
            best = best_ttft_s(system, request.n_in, cold)
            assert got.ttft_s >= best * (1 - 1e-12)
            if cold:
                nearest["ttft"] = min(nearest["ttft"], got.ttft_s / best)
        best = best_tpot_s(system, float(request.trem_s.min()))
        assert got.tpot_s >= best * (1 - 1e-12)
        nearest["tpot"] = min(nearest["tpot"], got.tpot_s / best)
    assert nearest["ttft"] < 1.1 and nearest["tpot"] < 1.5, nearest


def test_every_model_has_a_system():
    for name in ("deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b", "gpt2-moe"):
        system, model = build_system(name), load_model(name)
        assert system.layers == model.layers and system.moe_layers == model.num_moe_layers
        assert system.num_experts == model.experts
        assert system.token_mb == model.token_bytes / 2**20
