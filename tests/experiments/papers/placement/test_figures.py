"""The placement studies at smoke size, and what they compute against formulas of their own."""

import numpy as np
import pytest

from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.papers.placement.claims import CLAIMS, unpaired
from servegym.experiments.papers.placement.measuring import (
    ENV_ID,
    change,
    drive,
    growing,
    interval,
)


@pytest.mark.parametrize("policy", ["redundance", "prism"])
def test_looking_on_changes_nothing(policy):
    kwargs = {"scenario": "paper_testbed", "epochs": 2, "epoch_s": 60.0}
    (wanted,) = evaluate(ENV_ID, [policy], 1, seed=5, env_kwargs=kwargs)
    system, looks = drive(kwargs, policy, 5, slices=3)
    kpis = system.kpis()
    for key in ("mean_latency_s", "p99_latency_s", "local_token_ratio", "migrations"):
        assert kpis[key] == pytest.approx(wanted[key], rel=1e-12), key
    assert len(looks) == 6 and looks[-1]["end_s"] == 120.0
    tokens = {
        place: sum(look[f"all_{place}_tokens"] for look in looks) for place in ("local", "remote")
    }
    ratio = tokens["local"] / (tokens["local"] + tokens["remote"])
    assert ratio == pytest.approx(wanted["local_token_ratio"], rel=1e-12)


@pytest.mark.parametrize("count, paired", [(3, True), (5, True), (2, False)])
def test_intervals_of_changes_hold_the_truth(count, paired):
    """95 % of intervals, within chance; a bootstrap of three holds it in about 71 %."""
    rng, held, runs = np.random.default_rng(0), 0, 600
    for _ in range(runs):
        shared = rng.normal(0, 1.0, count)
        one = 8.0 + (shared if paired else rng.normal(0, 1.0, count)) + rng.normal(0, 0.3, count)
        other = 10.0 + shared + rng.normal(0, 0.3, count)
        rows = [interval(x, "mean_latency_s") | {"episodes": count} for x in (one, other)]
        low, high = change(one, other)[1:] if paired else unpaired(*rows)
        held += low <= -20.0 <= high
    assert 0.92 < held / runs < 0.985


@pytest.mark.parametrize(
    "seconds, overloaded, verdict",
    [
        ((80.0, 100.0), (), "agrees"),
        ((60.0, 100.0), ("moe_infinity",), "same direction"),
        ((120.0, 100.0), ("uniform",), "disagrees"),
        ((80.0, 100.0), ("uniform", "moe_infinity"), "open"),
    ],
)
def test_overloaded_queues_are_judged_by_the_sign_of_the_change(seconds, overloaded, verdict):
    point = {"skew": "measured", "pcie_gb_s": 12.0}
    rows = [
        point | {"policy": name, "mean_latency_s": mean_s, "overloaded": float(name in overloaded)}
        for name, mean_s in zip(("uniform", "moe_infinity"), seconds, strict=True)
    ]
    (found,) = CLAIMS[0].read(rows)
    assert found.verdict == verdict
    assert growing(rows, "policy")["overloaded"] == list(overloaded)
