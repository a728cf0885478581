"""Systems of drawn fleets: what the estimator says of them, alone and side by side."""

import numpy as np
import pytest

from servegym.baselines.llm_routing.latency import ExpectedQos, LatencyModel
from servegym.baselines.llm_routing.system import FleetSystem, RoutingSystem
from servegym.envs.llm_routing.config import build_problem, setting_problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.kernel import layout

SOURCE = build_problem(view=layout.GRAPH, fleet="random").fleets


def test_the_estimator_says_what_experts_serve_within_the_requirement():
    for stream in (1, 3):
        drawn = SOURCE.draw(np.random.default_rng(stream))
        system = RoutingSystem.from_problem(setting_problem(drawn, view=layout.GRAPH))
        limits = np.array([0.01, 0.03, 0.2])
        model = LatencyModel(system)
        most, rate, lone_s = model.within(limits, system.placed({"request": limits}))
        library, limit_of = system.library, system.batch_limit()
        prompt = library.train.prompt_tokens.mean()
        for k, limit in enumerate(limits):
            for n in range(0, system.num_experts, 4):
                length = system.mean_output_tokens[n]
                prefill = np.interp(prompt, library.prefill_tokens, library.prefill_s[n])
                latency = []
                for b in range(1, limit_of[n] + 1):
                    decode = np.interp(
                        prompt + length / 2, library.context_tokens, library.decode_s[n, b]
                    )
                    latency.append(decode + b * prefill / length)
                within = max(1, sum(x <= limit for x in latency))
                serves = [b / (length * latency[b - 1]) for b in range(1, within + 1)]
                assert most[k, n] == within and lone_s[k, n] == pytest.approx(latency[0])
                assert rate[k, n] == pytest.approx(max(serves))


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
        problem = setting_problem(batch.fleets[row], view=layout.GRAPH)
        system = RoutingSystem.from_problem(problem)
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
