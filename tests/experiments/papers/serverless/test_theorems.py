"""The check of the load bounds: uniform routing, recorded routing by a loop, the command."""

import numpy as np
import pytest

from servegym.baselines.serverless_moe.remoe.bounds import theorem1_printed
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.serverless_moe.plans import lpt, smallest_spec
from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.serverless import theorems as serverless_theorems
from servegym.experiments.papers.serverless.predictors import PREDICTORS


def of(rows, statement, form):
    return [row for row in rows if row["statement"] == statement and row["form"] == form]


def test_uniform_routing_meets_the_corrected_bounds_and_not_the_printed_ones():
    rows = serverless_theorems.uniform(64, 6, 64, 50)
    (printed,) = of(rows, "theorem 1", "printed")
    (corrected,) = of(rows, "theorem 1", "corrected")
    assert 0.72 < printed["holds"] < 0.79 and corrected["holds"] > 0.99
    assert printed["low"] <= printed["holds"] <= printed["high"]
    assert max(row["holds"] for row in of(rows, "corollary 1", "printed")) < 0.01
    assert min(row["holds"] for row in of(rows, "corollary 1", "corrected")) == 1.0


def test_the_command_writes_every_statement(tmp_path, monkeypatch):
    toy = make_toy_activations(prompts=60)
    monkeypatch.setattr(serverless_theorems, "load_activations", lambda name: toy)
    monkeypatch.setattr(serverless_theorems, "TOKENS", (4,))
    assert serverless_theorems.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "theorems.csv")
    statements = {"theorem 1", "theorem 4", "corollary 1", "conformal"}
    assert {row["statement"] for row in rows} == statements
    for row in rows:
        assert 0 <= row["low"] <= row["holds"] <= row["high"] <= 1
    whole = [row for row in of(rows, "corollary 1", "corrected") if row["b"] == 1]
    assert whole and all(row["largest_ratio"] == pytest.approx(1.0) for row in whole)
    record = read_record(tmp_path / "theorems.csv")
    assert record["quick"] and record["notes"]
    assert (tmp_path / "theorems.png").read_bytes().startswith(b"\x89PNG")


def test_theorem_4_layer_by_layer():
    """A literal loop over prompts and layers with the engine's LPT gives the same shares."""
    toy = make_toy_activations(prompts=60)
    system, held, train = build_system(toy.model), toy.rows("eval"), toy.rows("train")
    rows = serverless_theorems.recorded_theorem4(toy)
    for row in (r for r in rows if r["form"] == "largest count" and r["ranking"] == "own counts"):
        assert row["holds"] == 1.0 and row["largest_ratio"] <= 1.0 + 1e-9  # list scheduling
    category, nothing = PREDICTORS["category"](), np.zeros((len(toy.tokens), 1))
    category.fit(nothing[train], toy.frequencies()[train], tasks=toy.task[train])
    shares = category.predict(nothing[held], task=toy.task[held])
    experts, b, z, met = toy.model.experts, 0.75, 2, []
    for i, prompt in enumerate(held):
        for layer, counts in enumerate(toy.counts[prompt]):
            expected = shares[i, layer] * toy.model.top_k * toy.tokens[prompt]
            remote = np.argsort(expected, kind="stable")[: int(np.ceil(b * experts))]
            need = len(remote) * system.expert_mb[layer] + counts.sum() * system.token_mb
            memory = smallest_spec(system.remote_specs_mb, need)

            def seconds(n, memory=memory):
                return system.expert_cpu_s(memory, n) + 2 * system.token_mb / 1250.0 * n

            replica = lpt(seconds(expected[remote]), z)
            slowest = max(seconds(counts[remote])[replica == j].sum() for j in range(z))
            largest = seconds(theorem1_printed(toy.tokens[prompt], experts))
            met.append(slowest <= largest / 2 + seconds(counts).sum() / 2 + 1e-12)
    wanted = {"form": "printed", "ranking": "task mean", "b": b, "z": z}
    (row,) = (r for r in rows if all(r[key] == value for key, value in wanted.items()))
    assert row["holds"] == pytest.approx(np.mean(met))
