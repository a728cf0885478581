import json

import numpy as np
import pytest

from servegym.envs.workloads import list_arrivals, make_arrivals
from servegym.envs.workloads.build.arrivals import (
    AZURE_WINDOWS,
    BURSTGPT_WINDOWS,
    burstiness,
    mmpp_log_likelihood,
)
from servegym.envs.workloads.files import read_fitted

FITTED = ("burstgpt", "azure")


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    times = np.cumsum(np.random.default_rng(8).exponential(3.0, 300))
    path.write_text("timestamp\n" + "\n".join(f"{t:.6f}" for t in times) + "\n")
    return path


def process(name, trace_file, **kwargs):
    if name == "trace":
        kwargs["path"] = trace_file
    return make_arrivals(name, **kwargs)


def everything():
    return [
        ("poisson", {}),
        ("gamma", {}),
        ("gamma", {"shape": 4.0}),
        ("mmpp", {}),
        ("mmpp", {"fit": "azure"}),
        ("burstgpt", {}),
        ("burstgpt", {"window": False}),
        ("azure", {}),
        ("azure", {"window": False}),
        ("trace", {}),
        ("trace", {"window_s": 200.0}),
        ("trace", {"start_s": 100.0, "window_s": 200.0}),
    ]


def test_every_process_is_covered():
    assert {name for name, _ in everything()} == set(list_arrivals())


@pytest.mark.parametrize(("name", "kwargs"), everything())
def test_shape_order_and_reproducibility(name, kwargs, trace_file):
    arrivals = process(name, trace_file, **kwargs)
    np.random.seed(1)  # of the global state nothing is used
    before = np.random.get_state()[1].copy()
    times = arrivals.sample(500, np.random.default_rng(3), 5.0)
    assert np.array_equal(before, np.random.get_state()[1])
    assert times.dtype == np.float64
    assert times.shape == (500,)
    assert np.isfinite(times).all()
    assert times[0] >= 0
    assert (np.diff(times) >= 0).all()
    assert np.array_equal(times, arrivals.sample(500, np.random.default_rng(3), 5.0))
    if "start_s" not in kwargs:
        assert not np.array_equal(times, arrivals.sample(500, np.random.default_rng(4), 5.0))
    doubled = arrivals.sample(500, np.random.default_rng(3), 10.0)
    np.testing.assert_allclose(doubled, times / 2)
    assert arrivals.sample(0, np.random.default_rng(3), 5.0).shape == (0,)
    assert arrivals.sample(1, np.random.default_rng(3), 5.0).shape == (1,)


@pytest.mark.parametrize(("name", "kwargs"), everything())
def test_mean_rate(name, kwargs, trace_file):
    n = 200
    arrivals = process(name, trace_file, **kwargs)
    rng = np.random.default_rng(17)
    ends = np.array([arrivals.sample(n, rng, 5.0)[-1] for _ in range(300)])
    error = ends.std(ddof=1) / np.sqrt(len(ends))
    # A fixed window has no chance in it: n arrivals of its cyclic gaps, to within a few of them.
    slack = 0.2 * n / 5 if "start_s" in kwargs else 1e-9
    assert abs(ends.mean() - n / 5) < 4 * error + slack


def test_poisson_and_gamma_gaps():
    rng = np.random.default_rng(0)
    gaps = np.diff(make_arrivals("poisson").sample(100_000, rng, 2.0))
    assert gaps.mean() == pytest.approx(0.5, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)
    for kwargs, cv in (({"cv": 2.0}, 2.0), ({"shape": 4.0}, 0.5), ({"cv": 0.0}, 0.0)):
        gaps = np.diff(make_arrivals("gamma", **kwargs).sample(200_000, rng, 2.0))
        assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.03)


def test_mmpp_matches_theory():
    # Asymptotic index of dispersion of a two-state MMPP:
    # 1 + 2 p0 p1 (l0 - l1)^2 / ((q0 + q1) mean).
    arrivals = make_arrivals("mmpp", rate_ratio=6.0, busy_share=0.3, cycle_requests=20.0)
    calm = 1 / (0.7 + 0.3 * 6)
    variance = 0.3 * 0.7 * (calm * 5) ** 2
    leave = 1 / (0.7 * 20) + 1 / (0.3 * 20)
    times = arrivals.sample(400_000, np.random.default_rng(2), 1.0)
    assert burstiness(times, (2000,))[1] == pytest.approx(1 + 2 * variance / leave, rel=0.2)
    gaps = np.diff(times)[:20_000]
    truth = mmpp_log_likelihood(gaps, arrivals)
    for other in ({"rate_ratio": 3.0}, {"busy_share": 0.6}, {"cycle_requests": 60.0}):
        wrong = {"rate_ratio": 6.0, "busy_share": 0.3, "cycle_requests": 20.0} | other
        assert mmpp_log_likelihood(gaps, make_arrivals("mmpp", **wrong)) < truth - 10


@pytest.mark.parametrize("name", FITTED)
def test_preset_has_the_measured_burstiness(name):
    entry = read_fitted("arrivals.json")[name]
    arrivals = make_arrivals(name)
    windows = BURSTGPT_WINDOWS if name == "burstgpt" else AZURE_WINDOWS
    rng = np.random.default_rng(23)
    repeats = 60 if name == "burstgpt" else 12
    runs = [
        burstiness(arrivals.sample(entry["requests"], rng, 1.0), windows) for _ in range(repeats)
    ]
    middle = np.median(runs, axis=0)
    target = [row["measured"] for row in entry["fit_error"]["modulated"].values()]
    np.testing.assert_allclose(middle, target, rtol=0.35)
    assert middle[0] == pytest.approx(target[0], rel=0.2)


def test_trace_replays_its_gaps(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": t}) for t in (10, 11, 13, 16)))
    fixed = make_arrivals("trace", path=path, start_s=0.0)
    # Mean gap 2: gaps 1/2, 1, 3/2, then one mean gap to the first event again.
    expected = np.cumsum([1, 0.5, 1, 1.5, 1, 0.5])
    np.testing.assert_allclose(fixed.sample(6, np.random.default_rng(0), 1.0), expected)
    window = make_arrivals("trace", path=path, start_s=1.0, window_s=5.0)
    np.testing.assert_allclose(
        window.sample(4, np.random.default_rng(0), 1.0), np.cumsum([1, 0.8, 1.2, 1])
    )


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("poison", {}, "Did you mean 'poisson'"),
        ("gamma", {"cv": 1.0, "shape": 1.0}, "one of"),
        ("mmpp", {"cycle": 5}, "Did you mean 'cycle_requests'"),
        ("burstgpt", {"rho": 1.0}, "rho"),
        ("trace", {"path": None}, "needs path="),
        ("trace", {"start_s": 1e9}, "0 event"),
        ("trace", {"windows": 3.0}, "Did you mean 'window_s'"),
    ],
)
def test_what_makes_no_arrivals_is_refused(name, kwargs, message, trace_file):
    with pytest.raises(ValueError, match=message):
        make_arrivals(name, **({"path": trace_file} if name == "trace" else {}) | kwargs)


BEYOND = {  # of each parameter a value beyond its bounds
    "gamma": {"cv": 101.0, "shape": 0.0, "fit": "nowhere"},
    "mmpp": {"rate_ratio": 0.5, "busy_share": 1.0, "cycle_requests": 0.0, "fit": "nowhere"},
    **dict.fromkeys(
        FITTED, {"cv": -1.0, "rate_cv": 101.0, "rho": 1.0, "block_requests": 0.0, "window": 3}
    ),
}


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, one) for name, given in BEYOND.items() for one in given]
)
def test_parameters_are_refused_by_name(name, parameter):
    for value in (BEYOND[name][parameter], "x y", np.nan, 10**400, [], {}):
        with pytest.raises((ValueError, TypeError), match=parameter):
            make_arrivals(name, **{parameter: value})
