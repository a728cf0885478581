"""Cost figures of the serverless family: known answers, smoke runs."""

import numpy as np
import pytest

from servegym.envs.serverless_moe.config import build_system
from servegym.envs.serverless_moe.rivals import deployment_cost
from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.serverless import costs as serverless_costs
from servegym.experiments.papers.serverless.setting import paper_request


def measured(bill, prompts):
    return serverless_costs.measure("toy", "eager", bill, 20, 12, prompts)


@pytest.fixture
def toy(monkeypatch):
    activations = make_toy_activations(prompts=40)
    monkeypatch.setattr(serverless_costs, "load_activations", lambda name: activations)
    monkeypatch.setattr(serverless_costs, "MODELS", ("toy",))
    monkeypatch.setattr(serverless_costs, "SYNTHETIC", "toy")
    return activations


def test_measures_the_held_out_prompts_of_the_recording(toy):
    found = measured("none", 3)
    held = toy.rows("eval")
    system = build_system(toy.model)
    for name in ("mix", "cpu"):
        costs = [
            deployment_cost(name, system, paper_request(toy, p, 20, 12)).cost_usd
            for p in (held[0], held[(len(held) - 1) // 2], held[-1])
        ]
        assert found[name]["cost"] == pytest.approx(costs)


def test_a_bill_has_its_fees_rounding_and_prices(toy):
    found = {bill: measured(bill, 2) for bill in serverless_costs.BILLS}
    prompt = toy.rows("eval")[0]
    request = paper_request(toy, prompt, 20, 12)
    for bill, (usd, cpu, ratio) in {
        "none": (0.0, 1.6276e-8, 3.0),
        "aws_lambda": (2e-7, 1.6276e-8, 3.0),
        "alibaba_fc": (1.5e-7, 2.24609e-8, 1.83),
    }.items():
        system = build_system(toy.model, price_cpu_usd_mb_s=cpu, price_ratio=ratio)
        bare = deployment_cost("mix", system, request)
        mix = {key: value[0] for key, value in found[bill]["mix"].items()}
        seconds = bare.bill.prefill_s + bare.bill.decode_s
        longer = seconds if bill == "none" else np.ceil(1e3 * seconds) / 1e3
        assert mix["cost"] == pytest.approx(bare.cost_usd * longer / seconds + usd)
        assert mix["invocations"] == 1 and mix["fees"] == pytest.approx(usd / mix["cost"])
        rounding = bare.cost_usd * (longer / seconds - 1)
        assert mix["rounding"] == pytest.approx(rounding / mix["cost"], abs=1e-9)
    assert found["aws_lambda"]["per_expert"]["invocations"].min() > 12


@pytest.mark.slow
@pytest.mark.parametrize("name, stem", [("fig9", "fig09_cost"), ("fig10", "fig10_ratio")])
def test_each_figure_by_its_command(name, stem, toy, tmp_path):
    assert serverless_costs.main(["--quick", "--figure", name, "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{stem}.{e}" for e in ("csv", "png", "json")
    }
    rows = read_rows(tmp_path / f"{stem}.csv")
    assert {row["method"] for row in rows} == set(serverless_costs.METHODS)
    for row in rows:
        if row["method"] == "mix":
            assert row["over_mix"] == 1.0
        assert row["over_mix_low"] <= row["over_mix"] <= row["over_mix_high"]
    record = read_record(tmp_path / f"{stem}.csv")
    assert record["quick"] and record["notes"] and f"--figure {name}" in record["command"]
