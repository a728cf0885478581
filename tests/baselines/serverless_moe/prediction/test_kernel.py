"""PAM against the textbook's procedure, enumeration and another implementation."""

import itertools

import numba
import numpy as np
import pytest

from servegym import _jit
from servegym.baselines.serverless_moe.prediction import (
    kernel,
    make_predictor,
)
from servegym.baselines.serverless_moe.prediction.tree import unit_rows

from .histories import made_up


def distances(points, seed, duplicates=0):
    rng = np.random.default_rng(seed)
    rows = unit_rows(rng.normal(size=(points, 3)))
    rows[:duplicates] = rows[0]
    return np.clip(1.0 - rows @ rows.T, 0.0, None) * (1.0 - np.eye(points, dtype=np.float32))


def textbook_pam(distance, k):
    """BUILD and SWAP as in the book: every exchange is tried by its whole loss."""

    def loss(medoids):
        return distance[medoids].min(axis=0).sum(dtype=np.float64)

    points = range(len(distance))
    medoids = []
    for _ in range(k):
        medoids.append(
            min((j for j in points if j not in medoids), key=lambda j: loss([*medoids, j]))
        )
    while True:
        swaps = [
            [*medoids[:i], j, *medoids[i + 1 :]]
            for j in points
            if j not in medoids
            for i in range(k)
        ]
        best = min(swaps, key=loss, default=medoids)
        if not loss(best) < loss(medoids) - 1e-9:
            return medoids, loss(medoids)
        medoids = best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("points", "k"), [(7, 2), (9, 3), (14, 4)])
def test_pam_is_the_textbooks_and_no_exchange_improves_it(seed, points, k):
    distance = distances(points, seed, duplicates=seed % 3)
    medoids, nearest, loss = kernel.pam(distance, k)
    assert sorted(medoids) == sorted(textbook_pam(distance, k)[0]) and len(set(medoids)) == k
    assert loss == pytest.approx(textbook_pam(distance, k)[1], rel=1e-6)
    to_medoids = distance[medoids]
    np.testing.assert_array_equal(nearest, to_medoids.argmin(axis=0))
    assert loss == pytest.approx(to_medoids.min(axis=0).sum(), rel=1e-6)
    for i, j in itertools.product(range(k), range(points)):
        other = medoids.copy()
        other[i] = j
        assert distance[other].min(axis=0).sum() >= loss - 1e-6


def test_pam_mostly_finds_the_global_optimum_and_never_less():
    met = []
    for seed in range(40):
        distance = distances(10, seed)
        best = min(
            distance[list(some)].min(axis=0).sum() for some in itertools.combinations(range(10), 3)
        )
        loss = kernel.pam(distance, 3)[2]
        assert loss >= best - 1e-5
        met.append(loss <= best + 1e-5)
    assert np.mean(met) >= 0.75


def test_pam_finds_the_optimum_of_separate_clusters_and_its_ends():
    rng = np.random.default_rng(0)
    place = np.sort(np.concatenate([c + 0.1 * rng.random(6) for c in (0.0, 5.0, 9.0)]))
    distance = np.abs(place[:, None] - place).astype(np.float32)
    medoids, nearest, _ = kernel.pam(distance, 3)
    assert sorted(m // 6 for m in medoids) == [0, 1, 2]
    assert len({tuple(nearest[6 * c : 6 * c + 6]) for c in range(3)}) == 3
    assert kernel.pam(distance, 1)[0].tolist() == [int(distance.sum(axis=1).argmin())]
    assert kernel.pam(distance, 18)[2] == 0.0
    # SWAP leaves what BUILD found: the middle of three points is a poor first medoid for two.
    row = np.array([0.0, 0.1, 1.0, 2.0, 2.1])
    medoids, _, loss = kernel.pam(np.abs(row[:, None] - row).astype(np.float32), 2)
    assert loss == pytest.approx(1.1) and 2 not in medoids


def test_pam_agrees_with_the_package_kmedoids():
    package = pytest.importorskip("kmedoids")
    for seed, (points, k) in enumerate([(40, 4), (60, 5), (120, 4)]):
        distance = distances(points, seed)
        medoids, nearest, loss = kernel.pam(distance, k)
        other = package.pam(distance, k, init="build")
        assert loss == pytest.approx(other.loss, rel=1e-6)
        assert sorted(medoids) == sorted(other.medoids.tolist())


def test_the_types_of_calls_are_those_compiled_ahead(monkeypatch):
    compiled, called = {}, {}

    def types(arguments):
        return [numba.typeof(argument) for argument in arguments]

    def record(function):
        def call(*arguments):
            called[function.__name__] = types(arguments)
            return function(*arguments)

        return call

    monkeypatch.setattr(
        _jit,
        "compile_kernels",
        lambda _, calls: compiled.update({f.__name__: types(arguments) for f, arguments in calls}),
    )
    kernel.compile_kernels()
    for name in compiled:
        monkeypatch.setattr(kernel, name, record(getattr(kernel, name)))
    embeddings, shares, _ = made_up(60)
    fitted = make_predictor("varpam", alpha=3, beta=20).fit(embeddings, shares)
    fitted.predict(embeddings[:2])
    assert called == compiled
