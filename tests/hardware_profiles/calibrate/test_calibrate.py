"""Calibration: known synthetic kernels, recorded errors against the raw data, bad input."""

import csv
import json

import numpy as np
import pytest

from servegym.hardware_profiles import load
from servegym.hardware_profiles.build.derive import derive_cards
from servegym.hardware_profiles.calibrate.calibrate import calibrate_kernels, main
from servegym.hardware_profiles.calibrate.kernel_tables import DENSE_OPS

RTX = "rtx4090-llama-3.1-8b"
KERNELS = "llmservingsim/profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"

TOKENS = (1, 2, 4, 8, 16, 64, 128, 512, 1024, 2048)
GRID = (16, 64, 256, 1024)
OPS = DENSE_OPS


def _write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture
def folder(tmp_path):
    """Kernels that are exactly linear: per layer op 40 + 0.25 t us, attention as below."""
    _write(
        tmp_path / "dense.csv",
        ("layer", "tokens", "time_us"),
        [(op, t, 40 + 0.25 * t) for op in OPS for t in TOKENS],
    )
    head = [("lm_head", s, 900 + 2 * s) for s in TOKENS]
    head += [("sampler", s, 20 + s) for s in TOKENS]
    _write(tmp_path / "per_sequence.csv", ("layer", "sequences", "time_us"), head)
    rows = [(c, k, 0, 0, 5 + 0.1 * c + 0.02 * k) for c in GRID for k in (0, *GRID)]
    rows += [(0, 0, n, k, 3 + 0.01 * n * k) for n in (1, 4, 8, 16) for k in GRID]
    rows += [(c, 0, n, k, 8 + 0.1 * c + 0.01 * n * k) for c in GRID for n in (1, 4) for k in GRID]
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    _write(tmp_path / "attention.csv", names, rows)
    (tmp_path / "meta.yaml").write_text(
        "vllm_version: 0.0.1\ngpu: Test Card\nprofiled_at: '2026-01-01'\nnested:\n  gpu: x\n"
    )
    return tmp_path


def _edit(path, change):
    """Write a table again with ``change`` made to every row, a dict of texts."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for line, row in enumerate(rows, 2):
        change(line, row)
    _write(path, list(rows[0]), [list(row.values()) for row in rows])


def test_known_kernels_are_composed_exactly(folder):
    p = calibrate_kernels(folder, name="test")
    # 32 x (8 op runs, layernorm twice) + embedding + final layernorm = 258 runs.
    for t in (1, 7, 100, 2000, 5000):
        assert p.dense_s(t) == pytest.approx(258 * (40 + 0.25 * t) * 1e-6, rel=1e-5)
    assert p.head_s(3) == pytest.approx((900 + 6 + 20 + 3) * 1e-6, rel=1e-5)
    expected = 32 * (5 + 0.1 * 100 + 0.02 * 300) * 1e-6
    assert p.chunk_attention_s(100, 300) == pytest.approx(expected, rel=1e-5)
    expected = 32 * (3 + 0.01 * 6 * 400) * 1e-6
    assert p.decode_attention_s(6, 400) == pytest.approx(expected, rel=1e-5)
    for label, error in p.fit_error.items():
        if "random_third" in label or "all_of" in label or label.startswith("mixed"):
            assert error["max"] < 1e-4, label
    assert p.device["name"] == "Test Card"
    assert p.engine["version"] == "0.0.1"
    assert p.provenance["date"] == "2026-01-01"


def test_decodes_beside_a_chunk_get_their_own_table(folder):
    # Twice the decodes' part beside a chunk: measured rows say 8 + 0.1 c + 0.02 n k.
    def twice(_, row):
        c, k, n, x = (int(row[name]) for name in list(row)[:4])
        if c and n:
            row["time_us"] = 5 + 0.1 * c + 0.02 * k + 0.02 * n * x

    _edit(folder / "attention.csv", twice)
    p = calibrate_kernels(folder, name="test")
    table = p.mixed_decode_attention_s()
    # n = 8 and 16 were not measured beside a chunk: extended from 1 and 4.
    for i, n in enumerate((1, 4, 8, 16)):
        np.testing.assert_allclose(table[i, 1:], 32e-6 * 0.02 * n * np.array(GRID), rtol=1e-4)
    assert p.fit_error["mixed_iteration_sum"]["max"] > 1e-3
    assert p.fit_error["mixed_iteration_with_mixed_table"]["max"] < 1e-5
    expected = p.step_s([(256, 64)], 4, 4 * 1024)
    expected += 32e-6 * (0.02 * 4 * 1024 - 3 - 0.01 * 4 * 1024)
    assert p.mixed_step_s([(256, 64)], 4, 4 * 1024) == pytest.approx(expected, rel=1e-5)


def test_recorded_errors_and_tables_are_recomputed(measured):
    shipped = load(RTX)
    again = calibrate_kernels(measured(KERNELS))
    assert _flat(again.fit_error) == pytest.approx(_flat(shipped.fit_error), rel=1e-3, abs=1e-6)
    assert again.law == shipped.law
    assert again.to_dict()["estimator"] == pytest.approx(shipped.to_dict()["estimator"], rel=1e-4)


def _flat(value, name=""):
    if isinstance(value, dict):
        return {k: v for key, sub in value.items() for k, v in _flat(sub, f"{name}.{key}").items()}
    return {} if isinstance(value, str) else {name: value}


def test_derived_cards_are_recomputed(measured):
    for card, again in derive_cards(measured("vidur").parent, load(RTX)).items():
        shipped = load(f"{card}-llama-3.1-8b").to_dict()
        assert shipped.pop("step_error")  # from tables of the comparisons
        assert again.to_dict() == shipped


@pytest.mark.parametrize(
    ("file", "line", "fields", "message"),
    [
        ("dense.csv", 5, {"time_us": "nan"}, r"dense.csv:5: field 'time_us': got 'nan'"),
        ("dense.csv", 5, {"tokens": "1"}, r"field 'tokens': layernorm at 1 is given twice"),
        ("attention.csv", 4, {"prefill_chunk": "0"}, r"attention.csv:4: .*no work in this row"),
        ("attention.csv", 4, {"n_decode": "2"}, r"attention.csv:4: field 'kv_decode'"),
        ("attention.csv", 4, {"prefill_chunk": "17"}, "measure every combination"),
    ],
)
def test_bad_row_is_refused_with_file_line_and_field(folder, file, line, fields, message):
    _edit(folder / file, lambda at, row: row.update(fields if at == line else {}))
    with pytest.raises(ValueError, match=message):
        calibrate_kernels(folder, name="test")


@pytest.mark.parametrize("file", ["dense.csv", "attention.csv", "per_sequence.csv"])
def test_missing_columns_and_rows_are_refused(folder, file):
    path = folder / file
    text = path.read_text()
    path.write_text(text.replace("time_us", "time_ms", 1))
    with pytest.raises(ValueError, match=rf"{file}:1: field 'time_us': is missing \(found"):
        calibrate_kernels(folder, name="test")
    path.write_text("\n".join(text.splitlines()[:4]))
    with pytest.raises(ValueError, match=rf"{file}:4: .*only 3 rows; measure at least"):
        calibrate_kernels(folder, name="test")


@pytest.mark.parametrize(
    ("factor", "guess"), [(1e-3, "milliseconds or seconds"), (1e3, "nanoseconds")]
)
def test_wrong_units_are_refused(folder, factor, guess):
    for file in ("dense.csv", "attention.csv", "per_sequence.csv"):
        _edit(folder / file, lambda _, row: row.update(time_us=float(row["time_us"]) * factor))
    with pytest.raises(ValueError, match=f"dense.csv.*look like {guess}: write microseconds"):
        calibrate_kernels(folder, name="test")


@pytest.mark.parametrize(
    ("file", "column", "label"),
    [("dense.csv", "tokens", "by tokens"), ("attention.csv", "kv_decode", "by kv_decode")],
)
def test_times_that_the_work_does_not_explain_are_refused(folder, file, column, label):
    def longer_work_shorter_times(_, row):
        if int(row[column]):
            row["time_us"] = 90.0 - 0.02 * int(row[column])

    _edit(folder / file, longer_work_shorter_times)
    with pytest.raises(ValueError, match=rf"{file}: .*{label}: the size explains R² = 0.00"):
        calibrate_kernels(folder, name="test")


def test_arguments_win_over_those_in_the_folder(folder, tmp_path):
    out, file = tmp_path / "card.json", folder / "calibrate.json"
    facts = load(RTX).model | {"name": "mine"}
    (folder / "model.json").write_text(json.dumps(facts))
    settings = {"--name": "a", "--model": "model.json", "--note": "of the folder"}
    file.write_text(json.dumps(settings))
    assert main([str(folder), "-o", str(out)]) == 0
    profile = load(out)
    assert (profile.name, profile.model["name"]) == ("a", "mine")
    assert profile.provenance["notes"][-1] == "of the folder"
    assert main([str(folder), "-o", str(out), "--name=b", "--note", "given"]) == 0
    profile = load(out)
    assert (profile.name, profile.model["name"]) == ("b", "mine")
    assert profile.provenance["notes"][-1] == "given"
    assert "of the folder" not in profile.provenance["notes"]
    for bad in ('{"name": "a"}', '{"--name": ["a"]}', "[]"):
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"calibrate\.json: "):
            main([str(folder), "-o", str(out)])
