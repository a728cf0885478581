"""Damaged checkpoints, sweep files and policy files are refused with the file's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="checkpoints need torch")
pytest.importorskip("safetensors", reason="checkpoints need safetensors")

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from servegym.agents import load_policy
from servegym.agents.lib.checkpoint import shipped
from servegym.baselines.policy_file import policy_from_file

from .test_loader_fuzz import byte_damages, json_damages, judged, refusal

torch.set_num_threads(1)
CHECKPOINTS = {
    path.stem: path
    for family in ("llm_routing", "serverless_moe", "expert_placement")
    for path in shipped(family).values()
}


def parts(path: Path):
    with safe_open(path, framework="pt") as content:
        tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
        meta = dict(content.metadata())
        assert len(meta.pop("sha256")) == 64  # refuses every damage, and older files have none
        return tensors, meta


def rebuilt(tensors, meta):
    def damage(path: Path) -> None:
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, meta)

    return damage


UNREAD = ("step", "setting", "layout")
"""Metadata that no policy depends on, or that has no wrong value."""


def checkpoint_damages(path: Path):
    """Everything that a checkpoint's parts can lack."""
    tensors, meta = parts(path)
    for key in meta:
        yield f"no {key}", rebuilt(tensors, {k: v for k, v in meta.items() if k != key})
        junk = ["", "x", "[]", "3", "null", "{", "[" * 100_000, '{"no such field": 1}']
        for text in junk if key not in UNREAD else []:
            if not (key in ("args", "start", "setting") and text == junk[-1]):
                yield f"{key} = {text[:20]}", rebuilt(tensors, meta | {key: text})
    name = max(tensors, key=lambda key: tensors[key].numel() if key != "law" else 0)
    weight = tensors[name]
    yield "no weight", rebuilt({k: v for k, v in tensors.items() if k != name}, meta)
    yield "renamed", rebuilt({k + "x": v for k, v in tensors.items()}, meta)
    yield "cut weight", rebuilt(tensors | {name: weight[:-1]}, meta)
    yield "NaN", rebuilt(tensors | {name: weight * float("nan")}, meta)
    yield "infinite", rebuilt(tensors | {name: weight + float("inf")}, meta)
    other = weight.reshape(-1) if weight.ndim > 1 else weight[None]
    yield "other shape", rebuilt(tensors | {name: other}, meta)


QUICK = ("sac_rows", "ppo_placement")
"""Of the ways in which checkpoints are read."""


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS],
)
def test_damaged_checkpoints(name, tmp_path):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(CHECKPOINTS[name].read_bytes())
    assert refusal(load_policy, path) is None
    free = ("no start", *(f"no {key}" for key in UNREAD))
    damages = [(w, d) for w, d in checkpoint_damages(path) if w not in free]
    assert not (wrong := judged(load_policy, path, damages, dict(damages))), "\n".join(wrong)
    always = ("missing", "empty", "zeros", "noise")
    damages = byte_damages(path.read_bytes(), path.suffix)
    assert not (wrong := judged(load_policy, path, damages, always)), "\n".join(wrong)


SWEEP = """
program: agents/ppo.py
method: bayes
metric: {name: eval/score, goal: minimize}
early_terminate: {type: hyperband, min_iter: 2, eta: 3}
parameters:
  width: {values: [8, 16, 32]}
  learning_rate: {min: 0.001, max: 0.1, distribution: log_uniform_values}
  arch: {value: mlp}
"""


def sweep_damages():
    """Every key of a sweep lacking, and every value of it replaced."""
    yaml = pytest.importorskip("yaml")
    good = yaml.safe_load(SWEEP)
    for text in ("{", "a: b: c", "- 1", "!!python/object:os.system {}", "a: &a [*a]", "&"):
        yield text, lambda path, text=text: path.write_text(text)
    for word, changed, _ in json_damages(json.dumps(good).encode()):
        text = yaml.safe_dump(json.loads(changed))
        yield word, lambda path, text=text: path.write_text(text)


def test_damaged_sweeps(tmp_path):
    pytest.importorskip("optuna")
    from servegym.experiments.sweeps.spec import read_sweep

    path = tmp_path / "mine.yaml"
    path.write_text(SWEEP)
    assert refusal(read_sweep, path) is None
    always = [f"no {key}" for key in ("program", "method", "metric", "parameters")]
    always += [f"{key} = {new}" for key in ("method", "parameters") for new in ("0", "[]")]
    damages = [*byte_damages(path.read_bytes(), path.suffix), *sweep_damages()]
    assert not (wrong := judged(read_sweep, path, damages, always)), "\n".join(wrong)


POLICY = "def act(observation, action_mask):\n    return 0\n"


@pytest.mark.parametrize("name", ["mine.py", "mine.zip"])
def test_damaged_policy_files(name, tmp_path):
    path = tmp_path / name
    path.write_text(POLICY)
    if path.suffix == ".zip":
        sb3 = pytest.importorskip("stable_baselines3")
        small = {"n_steps": 8, "policy_kwargs": {"net_arch": [2]}}
        sb3.A2C("MlpPolicy", "CartPole-v1", device="cpu", **small).save(path)
    assert policy_from_file(path, None).name == "mine"
    read = lambda p: policy_from_file(p, None)  # noqa: E731
    always = ("missing", "a folder", "empty", "zeros")
    damages = byte_damages(path.read_bytes(), path.suffix)
    assert not (wrong := judged(read, path, damages, always)), "\n".join(wrong)
