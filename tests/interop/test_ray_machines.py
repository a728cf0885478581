"""Two machines of a Ray cluster (two node managers here), one of which is lost in mid-run."""

import os
import time

import pytest

pytest.importorskip("ray.exceptions", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster

from servegym.agents.lib.parallel import Workers
from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import IN_PROCESS

from .settings import ROUTING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_an_evaluation_outlives_a_lost_machine(tmp_path):
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={**small, "include_dashboard": False}, connect=False
    )
    try:
        second = cluster.add_node(**small)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        here = ray.get_runtime_context().get_node_id()

        class Slow(BasePolicy):
            """Notes where it runs; off the first machine it waits until that machine is lost, and
            on the first until the other one has a job."""

            name = "slow"

            def reset(self, num_envs, seed=None):
                super().reset(num_envs, seed)
                at_home = True
                if ray.is_initialized():
                    at_home = ray.get_runtime_context().get_node_id() == here
                with open(tmp_path / "blocks", "a") as log:
                    log.write(f"{seed} {'first' if at_home else 'second'}\n")
                limit = time.monotonic() + 200
                while not at_home or "second" not in (tmp_path / "blocks").read_text():
                    assert time.monotonic() < limit, "the other machine has no job, or is not lost"
                    time.sleep(0.05)

            def act(self, observation, action_mask):
                return self.rng.integers(action_mask.shape[1], size=len(action_mask))

        lost = []

        def losing(function, jobs, names):
            """Ends the other machine when a job has ended on the first, while it is in one."""
            for job in Workers(ray="auto")(function, jobs, names):
                if not lost:
                    lost.append(job)
                    cluster.remove_node(second, allow_graceful=False)
                yield job

        settings = {"episodes": 16, "seed": 7, "env_kwargs": ROUTING, "num_envs": 1}
        settings["guests"] = IN_PROCESS  # where it knows of the cluster
        found = evaluate("servegym/LLMRouting-v1", [Slow()], executor=losing, **settings)
        begun = [line.split() for line in (tmp_path / "blocks").read_text().splitlines()]
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert lost
    away = {seed for seed, machine in begun if machine == "second"}
    home = [seed for seed, machine in begun if machine == "first"]
    assert away and away <= set(home)  # what was lost ran again on the machine that is left
    assert sorted(home, key=int) == [str(start) for start in range(16)]
    wanted = evaluate("servegym/LLMRouting-v1", [Slow()], **settings)
    assert [list(map(repr, row.items())) for row in found] == [
        list(map(repr, row.items())) for row in wanted
    ]
