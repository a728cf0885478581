"""Evaluations over draws of the profiles' errors: known factors, known rankings, refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.profile_draws import (
    draw_factors,
    drawn_worlds,
    evaluate_in,
    print_draws,
    ranking,
)
from servegym.hardware_profiles import load

from ...runner import servegym

ENV, PLACEMENT = "servegym/LLMRouting-v1", "servegym/ExpertPlacement-v0"
SMALL = {"profiles": "edge-6-heterogeneous", "episode_requests": 60, "rate": 5.0}
RTX, A10 = "rtx4090-llama-3.1-8b", "a10-llama-3.1-8b"


def card(name, prefill, decode):
    pair = {"prefill": prefill, "decode": decode}
    error = {kind: dict(zip(("bias", "sd"), value, strict=True)) for kind, value in pair.items()}
    return replace(load(name), step_error=error)


def test_factors_have_the_stated_bias_and_deviation():
    cards = [card(RTX, (0.05, 0.1), (0.0, 0.0)), card(A10, (0.0, 0.2), (-0.1, 0.3))]
    factors = draw_factors([*cards, cards[0], load("paper-linear-01")], 4000)
    assert {frozenset(one) for one in factors} == {frozenset((RTX, A10))}
    logs = np.log([[one[RTX], one[A10]] for one in factors])
    assert (logs[:, 0, 1] == 0.0).all()
    np.testing.assert_allclose(logs.mean(0), [[0.05, 0.0], [0.0, -0.1]], atol=0.02)
    np.testing.assert_allclose(logs.std(0), [[0.1, 0.0], [0.2, 0.3]], atol=0.012)
    columns = logs.reshape(len(logs), 4)[:, [0, 2, 3]]
    assert np.abs(np.corrcoef(columns.T) - np.eye(3)).max() < 0.06
    assert draw_factors(cards, 2) == draw_factors(cards, 5)[:2]


def test_certain_profiles_give_the_plain_evaluation_bit_for_bit(tmp_path):
    sure = []
    for name in (RTX, A10):
        file = tmp_path / f"{name}.json"
        card(name, (0.0, 0.0), (0.0, 0.0)).save(file)
        sure.append(str(file))
    kwargs = {**SMALL, "profiles": sure}
    policies = ["random", "greedy_qos"]
    plain = evaluate(ENV, policies, episodes=2, seed=5, env_kwargs=kwargs)
    worlds = drawn_worlds(ENV, kwargs, 2)
    drawn = evaluate_in(worlds, plain, ENV, policies, episodes=2)
    assert [row["profile_draw"] for row in drawn] == [0] * 4 + [1] * 4
    for row, again in zip(plain + plain, drawn, strict=True):
        for key, value in row.items():
            same = again[key] == value or (isinstance(value, float) and math.isnan(value))
            assert same or key == "env_kwargs", key
    guest = [{"seed": 5, "source": "guest"}]
    apart = evaluate_in(worlds, guest, ENV, ["random"], episodes=1)
    assert len({5, *(row["seed"] for row in apart)}) == 3  # no draw has another's episodes


@pytest.mark.parametrize("scheduler", ["orca", "chunked_prefill"])
def test_steps_take_the_drawn_time(scheduler):
    kwargs = {"profiles": [RTX] * 2, "episode_requests": 1, "scheduler": scheduler}
    kwargs |= {"router_delay_s": 0.0, "bytes_per_token": 0.0}
    factors = (None, {RTX: [2.0, 2.0]}, {RTX: [2.0, 1.0]})
    played = (
        evaluate(ENV, ["round_robin"], episodes=3, seed=1, env_kwargs=kwargs | {"step_factors": x})
        for x in factors
    )
    for row, slow, mixed in zip(*played, strict=True):
        assert slow["mean_e2e_s"] == pytest.approx(2 * row["mean_e2e_s"])
        assert mixed["mean_ttft_s"] == pytest.approx(2 * row["mean_ttft_s"])
        assert mixed["mean_tpot_s"] == pytest.approx(row["mean_tpot_s"])


def test_ranking_of_made_up_rows(capsys):
    """a leads b by 0.1 in three draws of four; c is last in all."""

    def rows(values, **more):
        return [
            {"policy": p, "episode": e, "avg_qos": v + 0.01 * e, "env_id": ENV, **more}
            for p, v in values.items()
            for e in (0, 1)
        ]

    plain = rows({"c": 0.2, "a": 0.5, "b": 0.4})
    drawn = []
    for draw, a in enumerate((0.5, 0.5, 0.5, 0.3)):
        drawn += rows({"c": 0.2, "a": a, "b": 0.4}, profile_draw=draw)
    first, second = ranking(plain, drawn)
    assert (first["policy"], first["next"], second["next"]) == ("a", "b", "c")
    assert first["difference"] == pytest.approx(0.1) and first["share_ahead"] == 0.75
    assert (first["low"], first["high"]) == (pytest.approx(-0.1), pytest.approx(0.1))
    assert second["share_ahead"] == 1.0 and second["low"] == pytest.approx(0.2)
    print_draws(plain, drawn)
    shown = capsys.readouterr().out
    assert "75 %" in shown and "4 draws" in shown


@pytest.mark.parametrize(
    ("env_id", "kwargs", "draws", "words"),
    [
        (ENV, {"profiles": "paper-linear"}, 2, "step_error.*paper-linear-01"),
        (ENV, {"step_factors": {}}, 2, "step_factors"),
        ("servegym/ServerlessMoE-v0", {}, 2, "serverless_moe"),
        (ENV, {"step_factors": {"nobody": [1, 1]}}, None, "step_factors.*nobody"),
        (ENV, {"step_factors": {RTX: 2.0}}, None, r"step_factors\['rtx4090.*pair"),
        (ENV, {"step_factors": {RTX: [1.0, 0.0]}}, None, r"\]\[1\]=0.0"),
    ],
)
def test_bad_arguments_are_named(env_id, kwargs, draws, words):
    with pytest.raises(ValueError, match=words):
        if draws is None:
            evaluate(env_id, ["random"], episodes=1, env_kwargs=kwargs)
        else:
            drawn_worlds(env_id, kwargs, draws)


def test_a_family_without_profiles_is_refused_before_anything_is_played(monkeypatch):
    from servegym.experiments.evaluation import evaluate as evaluation

    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: pytest.fail("something ran"))
    result = servegym(*f"evaluate {PLACEMENT} --policy random --profile-draws 2".split())
    assert result.exit_code == 2 and "not for expert_placement" in result.stderr
