import hashlib
import json

import numpy as np
import pytest

from servegym.envs.workloads import list_catalogs, load_catalog
from servegym.envs.workloads.build.catalog import main as build
from servegym.envs.workloads.build.synthetic_catalog import moments
from servegym.envs.workloads.catalog import read_catalog
from servegym.envs.workloads.files import DATA_DIR, read_fitted
from servegym.envs.workloads.synthetic_catalog import synthetic_catalog

SPLIT_SHA256 = "d45f80a514597f1525273e94ff310ec536bd585eab221064beb80ac517a17c51"


@pytest.fixture(scope="module")
def catalog():
    return load_catalog("alpaca_eval_7b")


def test_splits_are_disjoint_complete_and_fixed(catalog):
    parts = [catalog.rows(name) for name in ("train", "val", "eval")]
    assert [len(part) for part in parts] == [483, 80, 242]
    assert np.array_equal(np.sort(np.concatenate(parts)), catalog.rows("all"))
    assert parts[0].dtype == np.int32
    assert hashlib.sha256(catalog.split.tobytes()).hexdigest() == SPLIT_SHA256


def test_packaged_data_is_numbers_only():
    for path in DATA_DIR.iterdir():
        if path.name.startswith("__"):
            continue
        assert path.suffix in (".npz", ".json"), path
    with np.load(DATA_DIR / "alpaca_eval_7b.npz") as archive:
        assert all(archive[k].dtype.kind in "iuf" for k in archive.files if k != "models")
    notes = json.loads((DATA_DIR / "alpaca_eval_7b.json").read_text())
    assert {"source", "commit", "licence", "date", "command", "scores", "counts"} <= set(notes)


def test_columns_and_rows_refuse_unknown_names(catalog):
    assert catalog.columns(["zephyr-7b-beta", "alpaca-7b", "alpaca-7b"]).tolist() == [15, 3, 3]
    with pytest.raises(ValueError, match="Did you mean 'vicuna-7b-v1.5'"):
        catalog.columns(["vicuna-7b"])
    with pytest.raises(ValueError, match="sequence"):
        catalog.columns("alpaca-7b")
    with pytest.raises(ValueError, match="Did you mean 'eval'"):
        catalog.rows("evla")


def test_load_catalog_refuses_unknown_names_and_arguments():
    assert list_catalogs() == ["alpaca_eval_7b", "synthetic"]
    with pytest.raises(ValueError, match="Did you mean 'alpaca_eval_7b'"):
        load_catalog("alpaca_eval")
    with pytest.raises(ValueError, match="num_modles.*Did you mean 'num_models'"):
        load_catalog("synthetic", num_modles=3)
    with pytest.raises(ValueError, match="path"):
        load_catalog("alpaca_eval_7b", path="x")


@pytest.mark.slow
def test_build_gives_the_packaged_catalog(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("SERVEGYM_DATA", str(measured("routing_catalog").parent))
    build(tmp_path)
    fresh, packaged = read_catalog(tmp_path / "alpaca_eval_7b.npz"), load_catalog("alpaca_eval_7b")
    for name in ("prompt_tokens", "scores", "output_tokens", "split", "prompt_ids"):
        assert np.array_equal(getattr(fresh, name), getattr(packaged, name)), name
    once = (tmp_path / "alpaca_eval_7b.npz").read_bytes()
    build(tmp_path)
    assert (tmp_path / "alpaca_eval_7b.npz").read_bytes() == once


def test_synthetic_comes_near_the_fit():
    made = synthetic_catalog(num_models=120, num_prompts=2000, seed=11)
    found = moments(made.prompt_tokens, made.scores, made.output_tokens)
    errors = read_fitted("synthetic.json")["fit_error"]
    for kind, bound in (("mean", 0.03), ("std", 0.06), ("correlation", 0.15), ("model_std", 0.2)):
        for name in (f"score_{kind}", f"length_{kind}"):
            assert found[name] == pytest.approx(errors[name]["measured"], rel=bound), name
    name = "residual_score_length"
    assert found[name] == pytest.approx(errors[name]["measured"], abs=0.06)
