"""Rules and learners on fleets that nobody trained on: what is played, and what is said of it."""

import json
import shlex

import numpy as np

from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.studies.routing import unseen_fleets as study


def test_the_forty_fleets_are_of_the_ranges_and_no_training_draws_them(monkeypatch):
    problems = [study.fleet(number) for number in range(6)]
    again = study.fleet(3)
    assert again.arguments.rate == problems[3].arguments.rate and again.models == problems[3].models
    for problem in problems:
        assert 3 <= problem.num_experts <= 16 and 1 <= problem.arguments.running_capacity <= 64
    assert len({problem.arguments.rate for problem in problems}) == 6
    words = shlex.split(study.DRAWN)
    assert words[:2] == ["--set", "fleet=random"]
    drawn = json.loads(words[2].partition("=")[2])
    assert drawn.items() >= study.RANGES.items()


def test_the_qos_is_the_evaluators(monkeypatch):
    monkeypatch.setattr(study, "REQUESTS", 60)
    setting = study.SETTINGS["3 experts, 5/s"]
    problem = study.build_problem(view=study.layout.GRAPH, **study._every(), **setting)
    system = RoutingSystem.from_problem(problem)
    found = study.qos(problem, make_policy("least_outstanding", system), 2)
    seed, given = study.FIRST_EPISODE, {**setting, "episode_requests": 60}
    rows = evaluate(
        "servegym/LLMRouting-v1", ["least_outstanding"], 2, seed, given | {"split": "eval"}
    )
    assert found.shape == (2,) and (found > 0).all()
    assert np.abs(found - [row["avg_qos"] for row in rows]).max() < 0.3  # other episodes


def test_gains_are_over_fleets_and_trainings():
    rows = []
    for k in range(4):
        at = {"setting": f"fleet {k + 1}"}
        rows += [{**at, "policy": name, "training": None, "qos": 0.5} for name in study.RULES]
        rows += [
            {**at, "policy": "sac_rows", "training": t + 1, "qos": 0.5 + 0.01 * (k - t)}
            for t in range(2)
        ]
    notes = [one for one in study.findings(None, rows) if not isinstance(one, str)]
    gain = next(n for n in notes if n.get("over") == "expected_qos" and n["policy"] == "sac_rows")
    assert np.isclose(gain["gain"], 0.01) and gain["low"] < 0.01 < gain["high"]
    assert "above in 3 of 4" in gain["text"]
