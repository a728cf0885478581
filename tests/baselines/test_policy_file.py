"""Policies that a user's file defines, in the evaluator."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from servegym.baselines.policy_file import policy_from_file
from servegym.experiments.cli import app
from servegym.experiments.evaluation.evaluate import evaluate

ENV_ID = "servegym/LLMRouting-v1"
SMALL = {"rate": 8.0, "episode_requests": 40}

STATEFUL = """
import numpy as np
from servegym.baselines.protocol import BasePolicy

class Policy(BasePolicy):
    name = "turns"

    def __init__(self, system):
        self.experts = system.num_experts

    def episode_start(self, mask):
        self.turn = np.zeros(len(mask), int) if not hasattr(self, "turn") else self.turn
        if len(self.turn) != len(mask):
            self.turn = np.zeros(len(mask), int)
        self.turn[mask] = 0

    def act(self, observation, action_mask):
        self.turn = self.turn % self.experts + 1
        return self.turn.copy()
"""


def test_a_class_agrees_with_the_same_baseline(tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text(STATEFUL)
    ours = evaluate(ENV_ID, [str(tmp_path / "turns.py")], 3, 5, SMALL, in_process=True)
    theirs = evaluate(ENV_ID, ["round_robin"], 3, 5, SMALL)
    assert [r["avg_qos"] for r in ours] == [r["avg_qos"] for r in theirs]
    assert ours[0]["policy"] == "turns"
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="neither act"):
        policy_from_file(tmp_path / "empty.py", None)


def test_a_class_without_init_finds_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.py").write_text(
        "import numpy as np\nfrom servegym.baselines.protocol import BasePolicy\n\n"
        "class Policy(BasePolicy):\n    def act(self, observation, action_mask):\n"
        "        return np.full(len(action_mask), self.system.num_experts)\n"
    )
    rows = evaluate(ENV_ID, ["last.py"], 2, env_kwargs=SMALL, in_process=True)
    (used,) = (key for key in rows[0] if key.startswith("share_") and rows[0][key] > 0)
    assert used == [key for key in rows[0] if key.startswith("share_")][-1]
    assert rows[0]["policy"] == "last"
    for text, said in (
        ("class Policy(BasePolicy):\n    pass\n", "has no act"),
        (
            "class Policy:\n    def __init__(self, system): pass\n"
            "    def act(self, observation, mask): pass\n",
            "must derive from",
        ),
        ("x = 1\nimport no_such_module\n", "line 3.*no_such_module"),
    ):
        head = "from servegym.baselines.protocol import BasePolicy\n"
        (tmp_path / "bad.py").write_text(head + text)
        with pytest.raises(ValueError, match=said):
            policy_from_file("bad.py", None)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ("observation['reqest']", "KeyError: 'reqest'", []),
        ("np.zeros(2) @ np.zeros(3)", "ValueError: matmul", ["--in-process"]),
        (
            "__import__('no_such_module')",
            "ModuleNotFoundError: No module named 'no_such_module'",
            ["--in-process"],
        ),
    ],
)
def test_an_error_in_a_policys_file_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, error: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "act.py").write_text(
        f"import numpy as np\n\ndef act(observation, action_mask):\n    {wrong}\n    return 1\n"
    )
    (tmp_path / "class.py").write_text(
        "import numpy as np\nfrom servegym.baselines.protocol import BasePolicy\n\n"
        "class Policy(BasePolicy):\n    name = 'mine'\n\n"
        f"    def act(self, observation, action_mask):\n        {wrong}\n"
    )
    for file, line, name in (("act.py", 4, "act"), ("class.py", 8, "mine")):
        result = CliRunner().invoke(app, ["evaluate", ENV_ID, "--policy", file, *words])
        assert result.exit_code == 2
        (message,) = result.stderr.splitlines()
        assert f"policy '{name}' failed at {file}:{line}: {error}" in message


def test_a_fraction_is_no_action(tmp_path: Path) -> None:
    (tmp_path / "float.py").write_text("def act(observation, action_mask):\n    return 0.5\n")
    with pytest.raises(ValueError, match="^policy 'float' must return integers"):
        evaluate(ENV_ID, [str(tmp_path / "float.py")], 1, env_kwargs=SMALL, in_process=True)
