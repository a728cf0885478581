"""Policies that a user's file defines, in the evaluator."""

import sys
import zipfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from servegym.baselines.policy_file import policy_from_file
from servegym.baselines.registry import from_callable
from servegym.envs.families import FAMILIES, family_of
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import IN_PROCESS

from ..runner import servegym

ENV_ID, FLAT = "servegym/LLMRouting-v1", "servegym/LLMRoutingFlat-v3"
SMALL = {"rate": 8.0, "episode_requests": 40}

STATEFUL = """
import numpy as np
from servegym.baselines.protocol import BasePolicy

class Policy(BasePolicy):
    name = "turns"

    def __init__(self, system):
        self.experts = system.num_experts

    def reset(self, num_envs, seed=None):
        self.turn = np.zeros(num_envs, int)

    def act(self, observation, action_mask):
        self.turn = self.turn % self.experts + 1
        return self.turn.copy()
"""


def test_a_class_agrees_with_the_same_baseline(tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text(STATEFUL)
    ours = evaluate(ENV_ID, [str(tmp_path / "turns.py")], 3, 5, SMALL, guests=IN_PROCESS)
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
    rows = evaluate(ENV_ID, ["last.py"], 2, env_kwargs=SMALL, guests=IN_PROCESS)
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
        result = servegym("evaluate", ENV_ID, "--policy", file, *words)
        assert result.exit_code == 2
        (message,) = result.stderr.splitlines()
        assert f"policy '{name}' failed at {file}:{line}: {error}" in message


HEAD = "import numpy as np\nfrom servegym.baselines.protocol import BasePolicy\n"
ACT = "def act(observation, action_mask):\n    assert observation.shape == ({}), 'shape'\n"
CLASS = "class Policy(BasePolicy):\n    {}\n    def act(self, observation, action_mask):\n"


@pytest.mark.parametrize(
    ("text", "env_id"),
    [
        (ACT.format("406,") + "    return 1", FLAT),
        (ACT.format("18,") + "    return 1", "servegym:servegym/LLMRoutingExperts-v3"),
        ("env_view = 'summary'\n" + ACT.format("6, 44") + "    return 1", FLAT),
        ("env_view = 'summary'\n" + ACT.format("6, 44") + "    return 1", ENV_ID),
        (CLASS.format("") + "        return np.full(len(observation[:, 405]), 1)", FLAT),
        (
            CLASS.format("env_view = 'graph'")
            + "        return np.full(len(observation['load']), 1)",
            FLAT,
        ),
    ],
)
def test_a_file_gets_the_observation_of_the_id_unless_it_names_another(
    tmp_path: Path, text: str, env_id: str
) -> None:
    (tmp_path / "mine.py").write_text(HEAD + text + "\n")
    words = ["--set", "episode_requests=5", "--episodes", "1"]
    words += ["--in-process"] * text.startswith("class")  # the others in a process of their own
    result = servegym("evaluate", env_id, "--policy", tmp_path / "mine.py", *words)
    assert result.exit_code == 0, result.output


def test_objects_get_it_as_well_and_the_packages_rules_read_the_dict() -> None:
    def act(observation: np.ndarray, _: Any) -> np.ndarray:
        return np.ones(len(observation[:, 405]), dtype=int)

    policies = [from_callable(act, "mine"), "least_outstanding"]
    rows = evaluate(FLAT, policies, 1, 5, SMALL, guests=IN_PROCESS)
    assert rows[1]["avg_qos"] == evaluate(ENV_ID, policies[1:], 1, 5, SMALL)[0]["avg_qos"]


PREDICT = """
import numpy as np
calls = []

def predict(observation, state=None, episode_start=None, deterministic=False, action_masks=None):
    assert observation.shape == (1, 406) and deterministic
    assert action_masks.shape == (1, 7) and action_masks.dtype == bool
    assert episode_start.tolist() == [state is None]
    return np.array([state + 1 if state else 1]), 0 if state == 5 else (state or 0) + 1
"""


def test_predict_is_a_policy_too(tmp_path: Path) -> None:
    """State, starts and masks by the names that Stable-Baselines3 has for them."""
    (tmp_path / "turns.py").write_text(PREDICT)
    (tmp_path / "object.py").write_text(
        PREDICT + "\nclass Policy:\n    env_view = 'flat'\n\n"
        "    def __init__(self, system):\n        self.predict = predict\n"
    )
    files = [str(tmp_path / name) for name in ("turns.py", "object.py")]
    rows = evaluate(FLAT, [*files, "round_robin"], 1, 5, SMALL)
    assert [row["source"] for row in rows] == ["guest", "guest", "servegym"]
    assert len({row["avg_qos"] for row in rows}) == 1

    class Model:
        def predict(self, observation: np.ndarray) -> np.ndarray:
            return np.ones(len(observation), dtype=int)

    (row,) = evaluate(FLAT, [Model()], 1, 5, SMALL)  # pyright: ignore[reportArgumentType]
    assert row["policy"] == "Model" and row["source"] == "guest"


# ------------------------------------------------------- what Stable-Baselines3 saved


CROWDED = {"rate": 60.0, "waiting_capacity": 1, "running_capacity": 1, "episode_requests": 60}


def saved(folder: Path, name: str, env_id: str, **kwargs: Any) -> Any:
    """An untrained model, saved in a folder."""
    sb3: Any = pytest.importorskip("stable_baselines3")
    if not hasattr(sb3, name):
        sb3 = pytest.importorskip("sb3_contrib")
    kinds = {"A2C": "MultiInputPolicy", "RecurrentPPO": "MlpLstmPolicy"}
    more = {"buffer_size": 10} if "DQN" in name else {"n_steps": 8}
    if "PPO" in name:
        more["batch_size"] = 8
    env = gymnasium.make(env_id, **kwargs)
    model = getattr(sb3, name)(kinds.get(name, "MlpPolicy"), env, seed=1, device="cpu", **more)
    model.save(folder / name.lower())
    return model


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("A2C", ENV_ID),
        ("QRDQN", "servegym/LLMRoutingExperts-v3"),
        ("RecurrentPPO", FLAT),
        ("PPO", "servegym/ServerlessMoEFlat-v1"),
    ],
)
def test_a_saved_model_plays_as_in_its_library(tmp_path: Path, name: str, env_id: str) -> None:
    """Whatever id is asked for: its space tells which observation it was trained on."""
    family = family_of(env_id)
    small = SMALL if family is FAMILIES[0] else {"model": "toy", "episode_requests": 10}
    model, state = saved(tmp_path, name, env_id, **small), None
    env = gymnasium.make(env_id, **small, split="eval")
    (observation, _), starts, paid, ended = env.reset(seed=7), np.ones(1, bool), 0.0, False
    while not ended:
        action, state = model.predict(observation, state, starts, deterministic=True)
        observation, reward, ended, _, info = env.step(action)
        starts, paid = np.zeros(1, bool), paid + float(reward)
    file = tmp_path / f"{name.lower()}.zip"
    (row,) = evaluate(family.env_id, [file], 1, 7, small, guests=IN_PROCESS)
    assert row["policy"] == name.lower() and row["source"] == "guest in process"
    kpis = {key: value for key, value in info["episode_kpis"].items() if value == value}
    assert {key: row[key] for key in kpis} == kpis


def test_a_saved_model_that_takes_masks_gets_them_in_a_process_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, "MaskablePPO", FLAT, **CROWDED)
    file = tmp_path / "maskableppo.zip"
    (row,) = evaluate(ENV_ID, [file], 1, 7, CROWDED)
    assert row["source"] == "guest" and row["reject_rate"] == 0.0
    with pytest.raises(ValueError, match="trained on observations of shape .118.; .* flat .406."):
        evaluate(ENV_ID, [file], 1, 7, SMALL, guests=IN_PROCESS)


def test_what_is_no_saved_model_or_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'gone.zip': no such file"):
        evaluate(FLAT, ["gone.zip"], 1, 7, SMALL)
    Path("bad.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="'bad.zip' is no model that Stable-Baselines3 saved"):
        policy_from_file("bad.zip", None)
    with zipfile.ZipFile("bad.zip", "w") as archive:
        archive.writestr("mine.py", "")
    result = servegym("evaluate", FLAT, "--policy", "bad.zip")
    assert result.exit_code == 2 and "no model that Stable-Baselines3 saved" in result.stderr
    saved(tmp_path, "QRDQN", FLAT)
    for library in ("sb3_contrib", "stable_baselines3"):
        for name in [name for name in sys.modules if name.startswith(library)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ValueError, match=f"'qrdqn.zip' needs {library}: pip install"):
            policy_from_file("qrdqn.zip", None)
