"""Expected loads and outcomes: of known requests exact, of predicted ones the mean."""

import dataclasses

import numpy as np
import pytest

from servegym.baselines.serverless_moe.loads import Load, predict
from servegym.envs.serverless_moe import equations as eq

from .synthetic import draw_sets, make_request, remote_set, tiny


@pytest.mark.parametrize("invocation", eq.DECODE_INVOCATIONS)
@pytest.mark.parametrize("bill", [False, True])
@pytest.mark.parametrize("fees", [(0.0, 0.0), (3e-7, 2e-3)])
def test_known_load_gives_the_true_outcome(system, invocation, bill, fees):
    system = dataclasses.replace(system, invocation_usd=fees[0], granularity_s=fees[1])
    request, frequency = make_request(system)
    for seed, ratio in enumerate((0.0, 0.3, 1.0)):
        rng = np.random.default_rng(seed)
        remote = remote_set(frequency, ratio)
        plan = eq.make_plan(system, remote, request.prefill_counts, request.n_out)
        plan.replicas = np.where(plan.replicas > 0, rng.integers(1, 5, plan.replicas.size), 0)
        plan.assignment = np.where(remote, rng.integers(0, 9, remote.shape), -1)
        plan.assignment = np.where(remote, plan.assignment % plan.replicas.clip(1)[:, None], -1)
        options = {"decode_invocation": invocation, "bill_cold_start": bill}
        limits = {"ttft_limit_s": 5.0, "tpot_limit_s": 0.05}
        true = eq.evaluate_plan(system, request, plan, **options, **limits)
        same = predict(system, Load.known(request), plan, **options, **limits)
        for field in dataclasses.fields(true):
            a, b = getattr(true, field.name), getattr(same, field.name)
            assert a == b if field.name == "violations" else a == pytest.approx(b, rel=1e-12)


def test_predicted_load_is_the_mean_of_known_ones(system):
    system = tiny(system, experts=np.array([32, 32]))
    # Of 32 experts: r is hypergeometric, which the binomial law comes close to.
    rng = np.random.default_rng(0)
    logits = np.zeros((2, 32))
    frequency = np.full((2, 32), 1 / 32)
    load = Load.predicted(system, frequency, 20, 30, 2e-4)
    assert load.tokens.sum(axis=1) == pytest.approx([40, 40])
    remote = remote_set(frequency, 0.5)
    plan = eq.make_plan(system, remote, load.tokens, 30)
    costs = []
    for _ in range(300):
        prefill = draw_sets(rng, logits, 20, 2).sum(axis=0)
        decode = eq.bit_sets(draw_sets(rng, logits, 30, 2))
        request = eq.Request(prefill, decode, np.full(2, 2e-4), 20)
        costs.append(eq.evaluate_plan(system, request, plan).cost_usd)
    expected = predict(system, load, plan).cost_usd
    assert expected == pytest.approx(np.mean(costs), rel=0.02)
    assert load.histogram(remote, 2) == pytest.approx(30 * np.array([[0.25, 0.5, 0.25]] * 2))
    with pytest.raises(ValueError, match="frequency"):
        Load.predicted(system, frequency[:1], 20, 30, 2e-4)
