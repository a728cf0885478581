"""The engine as a textbook queue agrees with the closed forms."""

import numba
import pytest

from servegym.experiments.studies.fidelity.queueing import erlang_c, queueing


def test_closed_forms():
    assert erlang_c(1, 0.6) == pytest.approx(0.6)
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3)
    compiled = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
    rows = queueing(40_000 if compiled else 1000, loads=(0.3, 0.8), repeats=2)
    assert {row["queue"] for row in rows} == {"M/M/1", "M/D/1", "M/G/1-PS", "M/M/4"}
    for row in rows:
        # Half a thousandth for the lattice of iterations.
        assert abs(row["difference"]) < 4 * row["standard_error"] + 0.0015 / (1 - 0.8)
        assert row["standard_error"] < 0.06 or not compiled
    with pytest.raises(ValueError, match="loads"):
        queueing(loads=(1.0,))
    with pytest.raises(ValueError, match="requests"):
        queueing(requests=10)
