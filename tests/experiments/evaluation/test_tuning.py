"""The tuning of the routing heuristics: spaces, search, choice, and its file."""

import inspect
import json

import numpy as np
import pytest

from servegym.baselines import llm_routing
from servegym.baselines.registry import make_policy
from servegym.experiments.evaluation import tuning
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.tuning import (
    CHOICE_SEED,
    SPACES,
    Budget,
    Choice,
    Real,
    Weights,
    heuristics,
    main,
    tune,
)

from ...routing_systems import linear_system

SMALL = Budget(6, 2, 2, 2, 3, 60)


def test_every_space_is_of_a_heuristic_and_starts_at_its_defaults():
    assert set(SPACES) <= set(heuristics()) and {"random", "token_jsq"} <= set(heuristics())
    assert not {"linucb", "rollout", "drop_all", "shortest_queue"} & set(heuristics())
    system = linear_system([[0.01, 1e-4, 1e-6, 0.0]])
    for name, axes in SPACES.items():
        named = [n for axis in axes for n in (getattr(axis, "names", None) or (axis.name,))]
        kinds = type(make_policy(name, system)).__mro__
        for parameter in named:
            assert any(parameter in inspect.signature(kind).parameters for kind in kinds)
        rng = np.random.default_rng(0)
        for _ in range(20):  # every point of a space is a policy
            drawn = {}
            for axis in axes:
                drawn |= axis.decode(rng.random(axis.size))
            make_policy(name, system, **drawn)


def test_axes_come_back_from_the_unit_cube():
    rng = np.random.default_rng(1)
    for axis in (
        Real("a", -2.0, 3.0),
        Real("a", 0.01, 100.0, log=True),
        Choice("a", ("x", "y", "z")),
        Weights(("a", "b", "c")),
    ):
        for _ in range(10):
            given = axis.decode(rng.random(axis.size))
            again = axis.decode(np.array(axis.encode(given)))
            assert again == (given if isinstance(axis, Choice) else pytest.approx(given, rel=1e-2))
    assert Real("a", 0.01, 100.0, log=True).decode(np.array([0.5])) == {"a": 1.0}
    assert Real("a", 0.0, 1.0).encode({"a": 7.0}) == [1.0]
    drawn = np.array(
        [list(Weights(("a", "b", "c")).decode(u).values()) for u in rng.random((4000, 3))]
    )
    assert (drawn >= 0).all() and np.allclose(drawn.sum(1), 1)
    # Uniform over the simplex: means of a third, variances of 1 / 18.
    assert np.allclose(drawn.mean(0), 1 / 3, atol=0.02)
    assert np.allclose(drawn.var(0), 1 / 18, atol=0.005)


def test_the_search_finds_an_optimum_and_asks_for_the_same_episodes():
    axes = (Real("x", 0.0, 10.0), Choice("kind", ("bad", "good")), Real("y", 0.01, 1.0, log=True))
    asked = []

    def played(candidates, episodes, first):
        asked.append((len(candidates), episodes, first))
        value = [
            -abs(one["x"] - 7.3) - abs(np.log(one["y"] / 0.2)) + 2.0 * (one["kind"] == "good")
            for one in candidates
        ]
        return np.tile(value, (episodes, 1)).T

    default = {"x": 1.0, "kind": "bad", "y": 1.0, "fixed": 5}
    search = tuning._search(axes, default, Budget(24, 6, 3), 0, played)
    assert asked == [(24, 3, tuning.SEARCH_SEED)] * 6
    assert search[0]["parameters"] == default
    assert all(one["parameters"]["fixed"] == 5 for one in search)
    best = max(search, key=lambda one: one["qos"])
    assert best["parameters"]["kind"] == "good" and best["qos"] > 1.6
    late = [one["qos"] for one in search if one["generation"] == 5]
    early = [one["qos"] for one in search if one["generation"] == 0]
    assert np.median(late) > np.max(early) - 0.5 > np.median(early)


def test_tuning_chooses_by_other_episodes_and_repeats():
    setting = {"rate": 9.0}
    found = tune("priced_greedy", setting, SMALL)
    assert len(found.search) == 12
    assert (
        found.qos - found.default_qos == pytest.approx(found.gain.value) and found.gain.value >= 0
    )
    system = llm_routing.RoutingSystem.from_kwargs()
    rows = evaluate(
        tuning.ENV_ID,
        [make_policy("priced_greedy", system, **p) for p in (found.parameters, {})],
        3,
        CHOICE_SEED,
        {**setting, "split": "val", "episode_requests": 60},
    )
    qos = [np.mean([row["avg_qos"] for row in rows[i : i + 3]]) for i in (0, 3)]
    assert qos == pytest.approx([found.qos, found.default_qos])
    assert tune("priced_greedy", setting, SMALL) == found
    plain = tune("random", setting, SMALL)
    assert plain.parameters == {} and plain.search == [] and plain.gain.value == 0.0


def test_the_command_writes_what_policies_are_made_from(tmp_path, capsys):
    out = tmp_path / "tuned.json"
    words = "--set rate=9 num_experts=3 --policy route_balance round_robin --population 4"
    words += " --generations 1 --episodes 2 --finalists 1 --choice-episodes 2 --requests 40"
    assert main([*words.split(), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    parameters = {name: one["parameters"] for name, one in record["tuned"].items()}
    assert set(parameters) == {"route_balance", "round_robin"} and parameters["round_robin"] == {}
    make_policy(
        "route_balance", llm_routing.RoutingSystem.from_kwargs(), **parameters["route_balance"]
    )
    assert len(record["tuned"]["route_balance"]["search"]) == 4
    assert record["settings"]["env_kwargs"] == {
        "rate": 9,
        "num_experts": 3,
        "split": "val",
        "episode_requests": 40,
    }
    assert "route_balance" in capsys.readouterr().out


def test_what_must_not_be_tuned_on_is_refused():
    with pytest.raises(ValueError, match="split is 'eval'"):
        tune("priced_greedy", {"split": "eval"}, SMALL)
    for name in ("linucb", "priced_gredy"):
        with pytest.raises(ValueError, match="policy"):
            tune(name, {}, SMALL)
    with pytest.raises(ValueError, match="population is 3"):
        Budget(population=3)
