"""Scoring a profile on measurements that it was not fitted to."""

import csv

import pytest

from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate.check import COLUMNS, score

NAME = "rtx4090-llama-3.1-8b"


def steps(path, factor=1.0, extra=(), columns=COLUMNS):
    """Iterations that take the profile's own time, times ``factor``."""
    profile = load(NAME)
    rows = []
    for n in (1, 8, 64):
        for x in (64, 512):
            rows.append((0, 0, n, x, 1e6 * profile.decode_s(n, n * x)))
            mixed = profile.mixed_step_s([(128, 256)], n, n * x)
            rows.append((128, 256, n, x, 1e6 * mixed))
    for chunk in (16, 256):
        rows.append((chunk, 0, 0, 0, 1e6 * profile.prefill_s(chunk)))
    rows = [(*row[:-1], factor * row[-1]) for row in rows]
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows, *extra])
    return path


def test_the_size_and_sign_of_errors(tmp_path):
    result = score(load(NAME), steps(tmp_path / "s.csv"))
    assert {kind: row["points"] for kind, row in result.items() if kind != "outside_domain"} == {
        "prefill": 2,
        "decode": 6,
        "mixed": 6,
    }
    assert max(result[kind]["max"] for kind in ("prefill", "decode", "mixed")) < 1e-9
    result = score(load(NAME), steps(tmp_path / "slow.csv", 1.25))
    for kind in ("prefill", "decode", "mixed"):
        assert result[kind]["mean_error"] == pytest.approx(-0.2)
        assert result[kind]["median"] == pytest.approx(0.2)
        assert result[kind]["max"] == pytest.approx(0.2)


def test_points_outside_the_domain_are_counted(tmp_path):
    extra = [(0, 0, 10_000, 10, 1e5), (0, 0, 1, 10**7, 1e5)]
    assert score(load(NAME), steps(tmp_path / "s.csv", extra=extra))["outside_domain"] == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: steps(p, 1e-3), "time_us.*milliseconds"),
        (lambda p: steps(p, extra=[(0, 0, 1, 16, "nan")]), "s.csv:16: field 'time_us'"),
        (lambda p: steps(p, extra=[(0, -1, 1, 16, 5)]), "s.csv:16: field 'kv_prefill'"),
        (lambda p: steps(p, columns=(*COLUMNS[:-1], "time_ms")), "field 'time_us': is missing"),
        (lambda p: p.write_text(",".join(COLUMNS) + "\n0,0,1,16,20000\n"), "at least 8"),
    ],
)
def test_bad_files_are_refused(tmp_path, make, words):
    path = tmp_path / "s.csv"
    make(path)
    with pytest.raises(ValueError, match=words):
        score(load(NAME), path)
