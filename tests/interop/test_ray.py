"""Evaluations and the leaderboard on a local Ray of two workers, of which some are killed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("ray.exceptions", reason="Ray is not installed: pip install '.[ray]'")

import ray

from servegym.agents.lib import ray_cluster
from servegym.agents.lib.ray_cluster import run_jobs
from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation import leaderboard
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.executor import ray_executor

from .settings import PLACEMENT, ROUTING, SERVERLESS

pytestmark = [pytest.mark.usefixtures("two_workers"), pytest.mark.slow, pytest.mark.timeout(600)]


def same(one, other):
    """Rows of equal keys in equal order with values equal bit for bit, NaN included."""
    return [list(map(repr, row.items())) for row in one] == [
        list(map(repr, row.items())) for row in other
    ]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "policies"),
    [
        ("servegym/LLMRouting-v1", ROUTING, ["random", "linucb", "greedy_qos", "rollout"]),
        ("servegym/ServerlessMoEFlat-v1", SERVERLESS, ["random", "remoe"]),
        ("servegym/ExpertPlacement-v0", PLACEMENT, ["random", "latency_dp", "prism"]),
    ],
)
def test_rows_and_logs_equal_the_local_run(env_id, kwargs, policies):
    """Blocks of two, the last one cut; what a randomised policy draws depends on its block."""
    settings = {"episodes": 5, "seed": 7, "env_kwargs": kwargs, "num_envs": 2}
    wanted = evaluate(env_id, policies, **settings)
    found = evaluate(env_id, policies, executor=ray_executor("auto"), **settings)
    assert len(found) == 5 * len(policies) and same(found, wanted)
    assert list(found.logs) == list(wanted.logs)
    for name, logs in wanted.logs.items():
        assert [log.tobytes() for log in found.logs[name]] == [log.tobytes() for log in logs]


def test_a_trained_policy_and_a_file_travel_to_the_workers(tmp_path):
    pytest.importorskip("torch")
    guest = tmp_path / "guest.py"
    guest.write_text(
        "import numpy as np\n"
        "WEIGHT = 3\n"
        "def act(observation, mask):\n"
        "    return int(np.flatnonzero(mask)[-1] if WEIGHT == 3 else 0)\n"
    )
    policies = ["sac_han", guest]
    settings = {
        "episodes": 4,
        "seed": 7,
        "env_kwargs": {**ROUTING, "num_experts": 6},
        "num_envs": 2,
    }
    wanted = evaluate("servegym/LLMRouting-v1", policies, **settings)
    on_ray = ray_executor("auto")
    found = evaluate("servegym/LLMRouting-v1", policies, executor=on_ray, **settings)
    assert same(found, wanted)
    assert {row["policy"] for row in found} == {"sac_han", "guest"}


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

    settings = {"episodes": 6, "seed": 7, "env_kwargs": ROUTING, "num_envs": 2, "in_process": True}
    found = evaluate(
        "servegym/LLMRouting-v1", [Deadly(), "random"], executor=ray_executor("auto"), **settings
    )
    assert (tmp_path / "killed").exists()
    begun = (tmp_path / "blocks").read_text().split()
    assert sorted(begun, key=int) == ["0", "2", "2", "4"]  # one block ran again, no other
    wanted = evaluate("servegym/LLMRouting-v1", [Deadly(), "random"], **settings)
    assert same(found, wanted)
    assert [row["seed"] for row in found] == [*range(7, 13), *range(7, 13)]


def test_a_worker_killed_from_outside_costs_no_job(tmp_path):
    def job(number):
        with open(tmp_path / f"pids_{number}", "a") as log:
            log.write(f"{os.getpid()}\n")
        while number == 1 and not (tmp_path / "go").exists():
            time.sleep(0.01)
        return number * number

    ended = []
    for index, result in run_jobs(job, [(number,) for number in range(6)], ["job"] * 6):
        if not ended:
            while not (pids := tmp_path / "pids_1").exists() or not pids.read_text().endswith("\n"):
                time.sleep(0.01)
            os.kill(int(pids.read_text()), signal.SIGKILL)
            (tmp_path / "go").touch()
        ended.append((index, result))
    assert sorted(ended) == [(number, number * number) for number in range(6)]
    assert len((tmp_path / "pids_1").read_text().split()) == 2


def test_an_error_of_a_job_is_raised_as_it_is_and_not_tried_again(tmp_path):
    def job(number):
        with open(tmp_path / "calls", "a") as log:
            log.write("x")
        raise ValueError(f"number is {number}; allowed is another")

    with pytest.raises(ValueError, match="^number is 3; allowed is another$"):
        list(run_jobs(job, [(3,)], ["job"]))
    assert (tmp_path / "calls").read_text() == "x"


def test_other_versions_on_a_machine_are_refused(monkeypatch):
    monkeypatch.setattr(ray_cluster, "versions", lambda packages: {"serve-gym": "9.9"})
    with pytest.raises(RuntimeError, match=r"of the cluster has serve-gym .* and not 9\.9"):
        list(run_jobs(print, [()], ["job"]))


def test_bad_arguments_stop_before_any_job(monkeypatch):
    asked = "servegym.experiments.evaluation.executor.cluster"
    monkeypatch.setattr(asked, lambda where: pytest.fail("a cluster was asked"))
    on_ray = ray_executor("auto")
    with pytest.raises(ValueError, match="did you mean 'greedy_qos'"):
        evaluate("servegym/LLMRouting-v1", ["greedy_qoss"], env_kwargs=ROUTING, executor=on_ray)
    with pytest.raises(ValueError, match="num_envs=0"):
        evaluate("servegym/LLMRouting-v1", ["random"], num_envs=0, executor=on_ray)


def test_the_leaderboard_is_the_same_table(tmp_path, monkeypatch):
    point = leaderboard.POINTS[0]._replace(env_kwargs=ROUTING, episodes=3)
    serverless = (one for one in leaderboard.POINTS if one.family.name == "serverless_moe")
    other = next(serverless)._replace(env_kwargs=SERVERLESS, episodes=3)
    monkeypatch.setattr(leaderboard, "POINTS", (point, other))
    monkeypatch.setattr(leaderboard, "SHIPPED_BOARD", tmp_path / "none.csv")
    monkeypatch.setattr(leaderboard, "fresh_seed", lambda: 7)
    monkeypatch.chdir(tmp_path)
    guest = tmp_path / "mine.py"
    guest.write_text("def act(observation, mask):\n    return int(mask.nonzero()[0][0])\n")

    def table(name, *words):
        for chosen, policies in ((point, ["random", str(guest)]), (other, ["mix", "random"])):
            leaderboard.main(
                ["--run", "--point", chosen.name, "--policy", *policies, "--out", name, *words]
            )
        with open(name, newline="") as stream:
            rows = list(csv.DictReader(stream))
        return [{k: v for k, v in row.items() if k not in ("cpu_s", "date")} for row in rows]

    wanted = table("local.csv")
    assert table("ray.csv", "--ray", "auto") == wanted
    assert [row["policy"] for row in wanted] == ["random", "mine", "mix", "random"]


@pytest.mark.parametrize("where", ["local:1", "auto"])
def test_the_command_has_its_own_cluster_or_joins_one(where, tmp_path):
    """In a process of its own: a cluster beside this module's, or this module's."""
    out = tmp_path / "rows.json"
    words = ["evaluate", "servegym/LLMRouting-v1", "--policy", "random", "--episodes", "3"]
    words += ["--num-envs", "2", "--set", "num_experts=3", "--set", "episode_requests=30"]
    start = "from servegym.experiments.cli import app; app()"
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
