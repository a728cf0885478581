"""Trainings whose jobs run on Ray: logs and weights equal to those without, bit for bit."""

import pytest

pytest.importorskip("ray.exceptions", reason="Ray is not installed: pip install '.[ray]'")
pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import cem  # noqa: E402
from servegym.agents.lib.parallel import Workers  # noqa: E402

from ..agents.runs import lines  # noqa: E402

pytestmark = [pytest.mark.usefixtures("two_workers"), pytest.mark.slow, pytest.mark.timeout(300)]


def weights(run):
    from safetensors.numpy import load_file

    return {key: value.tobytes() for key, value in load_file(run / "last.safetensors").items()}


def test_a_search_of_an_index_is_the_same(tmp_path):
    def run(**changes):
        fleets = 'fleet_kwargs={"num_experts": [2, 3], "running_capacity": 5}'
        changes |= {"set": ("fleet=random", "episode_requests=20", fleets)}
        changes |= {"total_timesteps": 400, "population": 10, "worlds": 8, "episodes": 2}
        changes |= {"eval_every": 400, "eval_worlds": 1, "eval_episodes": 1}
        return cem.train(cem.Args(out_dir=str(tmp_path), **changes))

    here, there = run(run_name="here"), run(run_name="there", ray="auto")
    assert lines(here) == lines(there) and weights(here) == weights(there)


def test_an_error_of_a_job_is_raised_here_and_both_kinds_of_workers_are_refused():
    workers = Workers(ray="auto")
    assert dict(workers(pow, [(2, 3), (3, 2)])) == {0: 8, 1: 9}
    with pytest.raises(ZeroDivisionError):
        list(workers(divmod, [(1, 0)]))
    workers.close()
    with pytest.raises(ValueError, match="workers is 2 and ray 'auto'"):
        Workers(2, "auto")
