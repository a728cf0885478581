"""Evaluations and the leaderboard on a local Ray of two workers, of which some are killed."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("ray.exceptions", reason="Ray is not installed: pip install '.[ray]'")

import ray

from servegym.agents.lib.parallel import Workers
from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import IN_PROCESS

from .settings import PLACEMENT, ROUTING, SERVERLESS

pytestmark = [pytest.mark.usefixtures("two_workers"), pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "policies"),
    [
        ("servegym/LLMRouting-v1", ROUTING, ["random", "greedy_qos", "rollout"]),
        ("servegym/ServerlessMoEFlat-v1", SERVERLESS, ["random", "remoe"]),
        ("servegym/ExpertPlacement-v0", PLACEMENT, ["random", "proxy_optimum", "prism"]),
    ],
)
def test_rows_and_logs_equal_the_local_run(env_id, kwargs, policies):
    """Blocks of two, the last one cut; what a randomised policy draws depends on its block."""
    settings = {"episodes": 5, "seed": 7, "env_kwargs": kwargs, "num_envs": 2}
    wanted = evaluate(env_id, policies, **settings)
    found = evaluate(env_id, policies, executor=Workers(ray="auto"), **settings)
    assert len(found) == 5 * len(policies) and repr(found) == repr(wanted)
    assert list(found.logs) == list(wanted.logs)
    for name, logs in wanted.logs.items():
        assert [log.tobytes() for log in found.logs[name]] == [log.tobytes() for log in logs]


def test_an_evaluation_outlives_a_killed_worker(tmp_path):
    class Deadly(BasePolicy):
        """Kills its process in the middle of one block, once."""

        name = "deadly"

        def reset(self, num_envs, seed=None):
            super().reset(num_envs, seed)
            self.seed, self.steps = seed, 0
            with open(tmp_path / "blocks", "a") as log:
                log.write(f"{seed}\n")

        def act(self, observation, action_mask):
            self.steps += 1
            if self.seed == 2 and self.steps == 10 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return self.rng.integers(action_mask.shape[1], size=len(action_mask))

    settings = {"episodes": 6, "seed": 7, "env_kwargs": ROUTING, "num_envs": 2}
    settings |= {"guests": IN_PROCESS}
    policies = [Deadly(), "random"]
    found = evaluate("servegym/LLMRouting-v1", policies, executor=Workers(ray="auto"), **settings)
    assert (tmp_path / "killed").exists()
    begun = (tmp_path / "blocks").read_text().split()
    assert sorted(begun, key=int) == ["0", "2", "2", "4"]  # one block ran again, no other
    wanted = evaluate("servegym/LLMRouting-v1", policies, **settings)
    assert repr(found) == repr(wanted)
    assert [row["seed"] for row in found] == [*range(7, 13), *range(7, 13)]


@pytest.mark.parametrize("where", ["local:1", "auto"])
def test_the_command_has_its_own_cluster_or_joins_one(where, tmp_path):
    """In a process of its own: a cluster beside this module's, or this module's."""
    out = tmp_path / "rows.json"
    words = ["evaluate", "servegym/LLMRouting-v1", "--policy", "random", "--episodes", "3"]
    words += ["--num-envs", "2", "--set", "num_experts=3", "--set", "episode_requests=30"]
    start = "from servegym.experiments.cli import main; main()"
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if where == "auto" else {}
    done = subprocess.run(
        [sys.executable, "-c", start, *words, "--ray", where, "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **address},
    )
    assert done.returncode == 0, done.stderr
    assert "servegym/LLMRouting-v1" in done.stdout and "random" in done.stdout
    rows = json.loads(out.read_text())
    kwargs = {"num_experts": 3, "episode_requests": 30}
    wanted = evaluate("servegym/LLMRouting-v1", ["random"], 3, env_kwargs=kwargs, num_envs=2)
    assert [row["avg_qos"] for row in rows] == [row["avg_qos"] for row in wanted]
    assert np.isfinite([row["return"] for row in rows]).all()
    assert len(ray.nodes()) == 1 and ray.nodes()[0]["Alive"]  # this module's lives on
