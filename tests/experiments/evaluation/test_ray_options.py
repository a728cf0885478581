"""What ``--ray`` takes, and what is said where Ray is missing; no cluster is started here."""

import sys

import pytest

from servegym.agents.lib.ray_cluster import check_ray
from servegym.experiments.evaluation import evaluate, leaderboard

from ...runner import servegym

WORDS = {
    "evaluate": ["evaluate", "servegym/LLMRouting-v1", "--policy", "random"],
    "leaderboard": ["leaderboard", "--run"],
}


@pytest.fixture
def no_work(monkeypatch):
    for module, name in ((evaluate, "evaluate"), (leaderboard, "measure")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("work was begun"))


def test_other_values_are_refused():
    for where in ("", "local:", "local:0", "local:two", "auto:2", "Local", "local:2:3"):
        with pytest.raises(ValueError, match="allowed are 'auto' .* 'local' .* 'local:N'"):
            check_ray(where)


@pytest.mark.parametrize("command", WORDS)
def test_a_command_is_stopped_before_any_work(command, no_work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for where, message in (
        ("remote", "ray is 'remote'; allowed are 'auto'"),
        ("local", "ray is not installed; in a checkout of servegym: pip install '.[ray]'"),
    ):
        result = servegym(*WORDS[command], "--ray", where)
        assert result.exit_code == 2 and message in result.output
    assert not list(tmp_path.iterdir())
