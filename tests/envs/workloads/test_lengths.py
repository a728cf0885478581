"""The fitted length laws: the fit on known lengths, the shipped file, draws, refusals."""

import numpy as np
import pytest

from servegym.envs.workloads.build import lengths as fit_lengths
from servegym.envs.workloads.files import read_fitted
from servegym.envs.workloads.lengths import length_quantiles, sample_lengths


def test_the_fit_recovers_a_known_law_and_tells_its_error():
    lengths = np.random.default_rng(0).integers(1, 2001, 5_000)  # quantile q is 2,000 q
    law = fit_lengths.fit(lengths, 1024)
    assert law["quantiles"] == pytest.approx(np.linspace(1, 2000, 21), abs=40)
    assert law["share_above_cap"] == pytest.approx(976 / 2000, abs=0.02)
    for error in law["fit_error"].values():
        # A cut inside an interval of 5 % bends the law there.
        assert error["kolmogorov_smirnov"] < 0.05
        assert abs(error["relative_error_of_mean"]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name, requests", [("azure", 19_366), ("sharegpt", 82_814)])
def test_the_shipped_law_is_that_of_the_trace(measured, name, requests):
    shipped = read_fitted("lengths.json")["traces"][name]
    lengths = fit_lengths.read_lengths(measured(*fit_lengths.TRACES[name][0].split("/")))
    for kind, values in lengths.items():
        assert len(values) == shipped["requests"] == requests
        assert fit_lengths.fit(values, fit_lengths.CAPS[name][kind]) == shipped[kind]


def test_draws_follow_the_quantiles_and_the_cap():
    law = length_quantiles("azure", "prompt_tokens", 1024)
    assert law.max() == 1024 and law[9] == 984 and (np.diff(law) >= 0).all()
    draws = sample_lengths(law, np.random.default_rng(0).random(20_000))
    for i in (2, 5, 8):
        assert (draws <= law[i]).mean() == pytest.approx(0.05 * i, abs=0.015)
    assert (draws == np.rint(draws)).all()
    # Nine of twenty steps, and what the step from 1,020 rounds up.
    assert (draws == 1024).mean() == pytest.approx(0.45 + 0.05 / 8, abs=0.01)
    assert sample_lengths(np.array([7.0]), np.array([0.1, 0.9])).tolist() == [7.0, 7.0]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="azure"):
        length_quantiles("azur", "prompt_tokens")
    with pytest.raises(ValueError, match="output_tokens"):
        length_quantiles("azure", "outputs")
