"""PAM against the textbook's procedure, enumeration and another implementation."""

import itertools

import numpy as np
import pytest

from servegym.experiments.papers.serverless.predictors import kernel
from servegym.experiments.papers.serverless.predictors.tree import unit_rows


def distances(points, seed, duplicates=0):
    rng = np.random.default_rng(seed)
    rows = unit_rows(rng.normal(size=(points, 3)))
    rows[:duplicates] = rows[0]
    return np.clip(1.0 - rows @ rows.T, 0.0, None) * (1.0 - np.eye(points, dtype=np.float32))


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
