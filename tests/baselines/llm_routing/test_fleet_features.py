"""Features of drawn fleets and their index, against slow references."""

import numpy as np
import pytest

from servegym.baselines.llm_routing import fleet_features
from servegym.baselines.llm_routing.features import impact_features
from servegym.baselines.llm_routing.fleet_features import CONTEXT, INDEX, Fleet, fleet_of
from servegym.baselines.llm_routing.latency import ExpectedQos, LatencyModel
from servegym.baselines.llm_routing.system import FleetSystem, RoutingSystem
from servegym.envs.llm_routing.config import build_problem, setting_problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.kernel import layout

from .test_lengths import at_mean_lengths

SOURCE = build_problem(view=layout.GRAPH, fleet="random").fleets


def played(stream, steps=80, rows=2):
    """Systems of a drawn fleet after some requests, routed by chance."""
    drawn = fleet_of(stream, SOURCE)["setting"]
    problem = setting_problem(drawn, view=layout.GRAPH, episode_requests=200)
    batch, rng = RoutingBatch(problem, rows), np.random.default_rng(stream)
    for row in range(rows):
        batch.draw(row, np.random.default_rng([stream, row]))
    every = np.ones(rows, dtype=np.int8)
    batch.begin(every)
    for _ in range(steps):
        chance = np.where(batch.action_mask > 0, rng.random(batch.action_mask.shape), -1.0)
        chance[:, 0] = 0.0
        batch.step(chance.argmax(1), every)
    return drawn, RoutingSystem.from_problem(problem), batch


def test_what_an_expert_serves_within_the_requirement_is_the_best_of_its_batches():
    for stream in (1, 3):
        _, system, _ = played(stream, 1)
        fleet = Fleet(system)
        limits = np.array([0.01, 0.03, 0.2])
        batch, rate, feasible = fleet.within(limits)
        prompt, limit_of = system.train.prompt_tokens.mean(), system.batch_limit()
        for k, limit in enumerate(limits):
            for n in range(0, system.num_experts, 4):
                length = system.mean_output_tokens[n]
                prefill = np.interp(prompt, system.prefill_tokens, system.prefill_s[n])
                best = (0.0, 1)
                for b in range(1, limit_of[n] + 1):
                    decode = np.interp(
                        prompt + length / 2, system.context_tokens, system.decode_s[n, b]
                    )
                    latency = decode + b * prefill / length
                    if latency <= limit:
                        best = max(best, (b / (length * latency), b))
                assert feasible[k, n] == (best[0] > 0)
                if feasible[k, n]:
                    assert rate[k, n] == pytest.approx(best[0]) and batch[k, n] == best[1]


@pytest.mark.parametrize("stream", [2, 5])
def test_the_features_of_queues_are_the_slow_sums(stream):
    _, system, batch = played(stream)
    seen = batch.observation
    experts, context = Fleet(system).features(seen)
    assert experts.shape == (2, system.num_experts, INDEX) and context.shape == (2, CONTEXT)
    assert np.isfinite(experts).all() and np.isfinite(context).all()
    model = ExpectedQos(system)
    gain, harm, *_ = model(seen)
    np.testing.assert_allclose(experts[..., 0], 10 * gain - 6.5, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(experts[..., 1], 10 * harm, rtol=1e-5, atol=1e-5)
    # At mean lengths, as `impact_features` has them from the observation with these.
    of_expert, of_queued = impact_features(at_mean_lengths(model.lengths, seen), model.model)
    np.testing.assert_allclose(experts[..., 4], 4 * of_expert[..., 0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(experts[..., 6], 8 * of_expert[..., 2], rtol=1e-4, atol=1e-4)
    scores = np.concatenate(
        [seen[key][..., 1] * seen[f"{key}_mask"] for key in ("running", "waiting")], -1
    )
    nearer = (scores * (of_queued[..., 1] - of_queued[..., 0])).sum(-1)
    np.testing.assert_allclose(experts[..., 7], 4 * nearer, rtol=1e-4, atol=1e-4)
    assert experts[..., 6].any() or experts[..., 7].any()


@pytest.mark.parametrize("stream", [1, 4, 6])
def test_the_features_of_loads_prices_and_the_fleet_are_the_slow_formulas(stream):
    _, system, batch = played(stream, steps=120)
    fleet, seen, most = Fleet(system), batch.observation, system.max_output_tokens
    found = fleet.features(seen)
    for again, part in zip(fleet.features(seen), found, strict=True):
        assert (again == part).all()
    assert len(getattr(fleet_features._features, "signatures", [1])) == 1
    experts, context = (part.astype(np.float64) for part in found)
    model = ExpectedQos(system)
    gain, *_, estimate = model(seen)
    limit = seen["latency_requirement"][:, 0].astype(np.float64)
    size, rate, feasible = fleet.within(limit)
    memory, *held = np.moveaxis(seen["experts"].astype(np.float64), -1, 0)
    loads, total = sum(held), (rate * feasible).sum(-1, keepdims=True)
    load = 2 * loads / (size + loads)
    of_all = (loads * feasible).sum(-1, keepdims=True) / (size * feasible).sum(-1, keepdims=True)
    of_all = 2 * of_all / (1 + of_all)
    work = np.minimum(estimate.work_s * rate, 5.0)
    prompt, score, predicted = np.moveaxis(seen["request"].astype(np.float64), -1, 0)
    near = np.tanh(9 * (estimate.with_new[..., -1] / limit[:, None] - 1))
    slow = {2: 10 * score - 6.5, 3: 8.0 * (near > 0), 5: 4 * near, 9: 3 * work}
    slow |= {10: 5 * work * load, 11: 5 * work * load**2, 12: 4 * work * load**4, 15: 3 * load}
    slow |= {13: 5 * work * of_all**2, 14: 4 * work * of_all**4, 17: 3 * memory}
    slow |= {16: 3 * held[1] / (size + held[1]), 18: 2 * (prompt + most) / fleet.kv}
    slow |= {19: 6.0 * (feasible - 1.0), 21: np.log(rate / total * rate.shape[1])}
    slow |= {20: 10 * (system.mean_score - system.mean_score.mean()) + 0 * load}
    slow |= {22: predicted / fleet.length - 1}
    slow |= {23: np.clip(np.log(limit[:, None] / fleet.latency[:, 0]), -2, 3)}
    for k, wanted in slow.items():
        np.testing.assert_allclose(experts[..., k], wanted, rtol=1e-5, atol=1e-5, err_msg=str(k))
    queued = estimate.now[..., :-1] * np.maximum(
        np.concatenate([seen[key][..., 4] for key in ("running", "waiting")], -1), 1.0
    )
    young = (~np.isnan(estimate.without[..., :-1]) & (queued < 60 * limit[0])).sum((1, 2))
    np.testing.assert_allclose(context[:, 0], 3 * of_all[:, 0] - 2.5, rtol=1e-5, atol=1e-6)
    arriving = np.minimum(young / (60 * limit) / total[:, 0], 3.0)
    np.testing.assert_allclose(context[:, 1], arriving, rtol=1e-5)
    np.testing.assert_allclose(context[:, 2], np.log(limit) + 3.5, rtol=1e-5)
    np.testing.assert_allclose(context[:, 3], 5 * gain.max(-1) - 3, rtol=1e-5, atol=1e-6)


def test_an_index_is_linear_and_a_drop_has_its_own_constant():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, fleet_features.SIZE)).astype(np.float32)
    experts = rng.standard_normal((2, 3, INDEX)).astype(np.float32)
    context = rng.standard_normal((2, CONTEXT)).astype(np.float32)
    found = fleet_features.index_values(weights, experts, context)
    for b in range(2):
        scale = 10 * max(abs(weights[b, 0]), 0.05)
        load = context[b, 0] / 2
        drop = 5 * weights[b, -3] + 2 * load * weights[b, -2] + weights[b, -1] * context[b, 1]
        assert found[b, 0] == pytest.approx((drop - 6.5 * weights[b, 0]) / scale, rel=1e-4)
        for n in range(3):
            own = weights[b, :INDEX] + load * weights[b, INDEX : 2 * INDEX]
            assert found[b, n + 1] == pytest.approx(experts[b, n] @ own / scale, rel=1e-4, abs=1e-4)


def test_a_batch_of_drawn_fleets_is_estimated_as_each_fleet_alone():
    problem = build_problem(view=layout.GRAPH, fleet="random", episode_requests=200)
    drawn, rows = FleetSystem(problem), 4
    batch, rng = RoutingBatch(problem, rows), np.random.default_rng(0)
    for row in range(rows):
        batch.draw(row, np.random.default_rng(row))
    every = np.ones(rows, dtype=np.int8)
    batch.begin(every)
    for _ in range(60):
        chance = np.where(batch.action_mask > 0, rng.random(batch.action_mask.shape), -1.0)
        batch.step(chance.argmax(1), every)
    seen = {key: np.array(value) for key, value in batch.observation.items()}
    together, load = LatencyModel(drawn).estimate(seen), ExpectedQos(drawn).fleet(seen)
    for row in range(rows):
        system = drawn.of(seen["fleet"][row])
        count = system.num_experts
        own = {key: value[row : row + 1] for key, value in seen.items()}
        whole = ("load", "latency_requirement")
        own = {key: v if key in whole else v[:, :count] for key, v in own.items()}
        alone, found = LatencyModel(system).estimate(own), ExpectedQos(system).fleet(own)
        # The library's grids are the union of all cards' grids.
        for name in ("latency", "work_s", "running_tokens", "waiting_tokens"):
            got, wanted = getattr(together, name)[row], getattr(alone, name)[0]
            np.testing.assert_allclose(got[:count], wanted[:count], rtol=1e-9, err_msg=name)
        assert np.isnan(together.latency[row, count:]).all()
        for name in ("batch", "served", "outstanding"):
            got, wanted = getattr(load, name)[row], getattr(found, name)[0]
            np.testing.assert_allclose(got[:count], wanted, rtol=1e-9, err_msg=name)
            assert (got[count:] == 0).all()
        for name in ("number", "total", "load", "rate"):
            np.testing.assert_allclose(getattr(load, name)[row], getattr(found, name)[0], rtol=1e-9)
