"""The search by the simulator: feasible, never worse, blind to the future."""

import numpy as np

from servegym.baselines.expert_placement import PlacementSystem
from servegym.baselines.expert_placement.heuristics import uniform, whole_layer
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.simulation_search import (
    SimulatedLatency,
    latency_local_search,
)
from servegym.envs.expert_placement.cluster import check_placement
from servegym.envs.expert_placement.env import ExpertPlacementEnv


def make_env(**kwargs):
    arguments = {"model": "toy", "epochs": 3, "action_mode": "placement", "epoch_s": 60.0}
    return ExpertPlacementEnv(**(arguments | kwargs))


def make_system(**kwargs):
    env = make_env(**kwargs)
    observation, _ = env.reset(seed=0)
    return PlacementSystem.from_problem(env.problem), observation["counts"].astype(float)


def test_from_a_blind_start_it_finds_what_no_other_method_sees():
    """Room for every expert once: neither Eq. 2's optimum nor whole layers are what waits least."""
    system, counts = make_system(
        scenario="edge_decode", cluster_kwargs={"gpus": (1, 1), "slots": (16, 16)}
    )
    slots, home = system.slots, system.gpu_server
    objective = SimulatedLatency.of_counts(system, counts, 10)
    others = [f(counts, slots, home) for f in (uniform, whole_layer, prism, proxy_optimum)]
    found = latency_local_search(objective, counts, slots, home, others[:1], steps=400, seed=1)
    assert objective.latency_s(found) < 0.97 * min(objective.latency_s(z) for z in others)


def test_it_is_never_worse_than_its_starts_and_repeats_itself():
    system, counts = make_system()
    slots, home = system.slots, system.gpu_server
    starts = [uniform(counts, slots, home), prism(counts, slots, home)]
    objective = SimulatedLatency.of_counts(system, counts, 12)
    one = [objective.latency_s(z) for z in starts]
    found = [
        latency_local_search(objective, counts, slots, home, starts, steps=n) for n in (0, 20, 20)
    ]
    for z in found:
        assert objective.latency_s(z) <= min(one)
        check_placement(z, slots)
    np.testing.assert_array_equal(found[1], found[2])
