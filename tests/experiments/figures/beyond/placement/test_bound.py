"""The bound on what controllers of placements gain: what it plays is what the environment plays."""

import numpy as np
import pytest

pytest.importorskip("torch")

from servegym.baselines.expert_placement.heuristics import uniform, whole_layer  # noqa: E402
from servegym.envs.expert_placement.env import ExpertPlacementEnv  # noqa: E402
from servegym.experiments.figures.beyond.placement import bound as placement_bound  # noqa: E402
from servegym.experiments.figures.beyond.placement.bound import main, play  # noqa: E402


def test_a_placement_is_played_as_in_the_environment():
    env = ExpertPlacementEnv(model="toy", action_mode="placement", epochs=2, epoch_s=100.0)
    c, seconds = env.problem.cluster, []
    for place in (whole_layer, uniform):
        held = c.server_view(place(np.ones((3, 4, 8)), c.slots, c.gpu_server))
        want = []
        for seed in (5, 6):
            env.system.begin(np.random.default_rng(seed))
            counts = env.system.counts().sum(axis=0)
            none = np.zeros((4, 4, 8), np.uint8)
            plan = placement_bound.assign_gpus(c, held, counts, none)
            env.system.step(True, plan)
            env.system.step(False, plan)
            want.append(env.episode_kpis()["mean_latency_s"])
        seconds.append(play(env.problem, held, 2, seed=5))
        assert seconds[-1].tolist() == pytest.approx(want)
    assert (seconds[0] != seconds[1]).all()


def test_bad_budgets_are_named(tmp_path):
    with pytest.raises(ValueError, match="climb_calls is 0"):
        main(["--climb-calls", "0", "--out", str(tmp_path)])
