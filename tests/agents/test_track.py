"""``--track``: what wandb is told of a run is what the log has."""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")

from .runs import tiny  # noqa: E402


def test_wandb_is_told_every_argument_and_every_number(tmp_path, monkeypatch):
    begun, rows = [], []
    wandb = SimpleNamespace(init=lambda **words: begun.append(words))  # the real one takes a second
    wandb.log = lambda row, step: rows.append((step, row))
    wandb.finish = lambda: begun.append("finished")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    module, args = tiny("ppo", tmp_path, track=True)
    run = module.train(args)
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row for _, row in rows] == log and len(log) > 2
    assert [step for step, _ in rows] == [row["global_step"] for row in log]
    first, last = begun
    assert first["config"] == asdict(args) and first["dir"] == str(run) and last == "finished"
    assert (first["project"], first["name"]) == ("servegym", "run")
