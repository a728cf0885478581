"""The scripts that turn measured data into packaged files, on small data made here."""

import numpy as np
import pytest

from servegym.envs.workloads.arrivals import MMPPArrivals
from servegym.envs.workloads.build.arrivals import fit_mmpp


@pytest.mark.slow
def test_maximum_likelihood_finds_the_process_that_was_drawn():
    true = MMPPArrivals(8.0, 0.25, 60.0)
    times = true.sample(6_000, np.random.default_rng(4), 1.0)
    gaps = np.diff(times)
    found = fit_mmpp(gaps / gaps.mean())
    assert found["rate_ratio"] == pytest.approx(8.0, rel=0.2)
    assert found["busy_share"] == pytest.approx(0.25, abs=0.06)
    assert found["cycle_requests"] == pytest.approx(60.0, rel=0.3)
