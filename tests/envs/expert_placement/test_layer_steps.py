"""Layer steps that wait for another server, against a recount from the recorded rows."""

import numpy as np
import pytest

from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode

from .reference import COMPILED

pytestmark = pytest.mark.skipif(not COMPILED, reason="thousands of requests")


def served(place, **kwargs):
    """The system after an epoch with a placement from the start, and who holds what."""
    problem = build_problem(split="eval", action_mode="placement", epochs=1, **kwargs)
    system = PlacementEpisode(problem)
    system.begin(np.random.default_rng(0))
    c = problem.cluster
    z = place(system.counts(), c.slots, c.gpu_server).astype(np.uint8)
    assert system.advance(z)[2]
    return system, c.server_view(z)


def recount(system, held):
    """Layer steps of each server with a remote expert, and all of them, row by row."""
    prompts, requests = system.problem.prompts, system.requests
    servers, layers, _ = held.shape
    remote, steps = np.zeros(servers, np.int64), np.zeros(servers, np.int64)
    for r, (n, p) in enumerate(zip(requests.home, requests.prompt, strict=True)):
        remote[n] += ((prompts.counts[p] > 0) & ~held[n]).any(axis=1).sum()
        a, b = prompts.bank_start[p : p + 2]
        for k in range(requests.outputs[r] - 1):
            row = prompts.chosen[a + (requests.offset[r] + k) % (b - a)].astype(np.int64)
            remote[n] += (~np.take_along_axis(held[n], row, 1)).any(axis=1).sum()
        steps[n] += layers * requests.outputs[r]
    return remote, steps


@pytest.mark.parametrize("scenario", ["edge_hetero", "paper_testbed"])
def test_remote_layer_steps_are_those_of_the_rows(scenario):
    system, held = served(proxy_optimum, scenario=scenario)
    remote, steps = recount(system, held)
    server = system.simulator.state.server
    np.testing.assert_array_equal(server["remote_layer_steps"], remote)
    np.testing.assert_array_equal(server["layer_steps"], steps)
    assert system.kpis()["remote_layer_ratio"] == pytest.approx(remote.sum() / steps.sum())
