import dataclasses

import numpy as np
import pytest

from servegym.envs.workloads import MalformedFileError, bucket_edges, load_catalog, predict
from servegym.envs.workloads.predictions import ACCURACY, write_table


@pytest.fixture(scope="module")
def catalog():
    return load_catalog("alpaca_eval_7b")


@pytest.fixture(scope="module")
def large():
    return load_catalog("synthetic", num_models=8, num_prompts=20_000, seed=2)


def truth(catalog, quantity):
    return catalog.scores if quantity == "score" else catalog.output_tokens


def buckets_of(catalog, quantity, buckets, seed):
    """True and named buckets, (P, M) each, from the outside: by edges and by nearest centre."""
    edges, centres = bucket_edges(catalog, quantity, buckets)
    right = np.searchsorted(edges, truth(catalog, quantity).astype(np.float64), side="right")
    columns = np.arange(catalog.num_models)
    emitted = predict(catalog, columns, quantity, "confusion", buckets, seed)
    off = np.abs(emitted[..., None] - centres.astype(np.float32))
    assert off.min(axis=-1).max() == 0, "something else than a centre was emitted"
    return right, off.argmin(axis=-1), len(centres)


def within(share, count, probability):
    return abs(share - probability) < 4 * np.sqrt(probability * (1 - probability) / count)


@pytest.mark.parametrize("quantity", ["score", "length"])
@pytest.mark.parametrize("buckets", ["quantile", "width"])
def test_accuracies_are_the_published_ones(large, quantity, buckets):
    top1, top3 = ACCURACY[quantity]
    right, named, count = buckets_of(large, quantity, buckets, 1)
    n = right.size
    assert within(np.mean(named == right), n, top1)
    assert within(np.mean(abs(named - right) <= 1), n, top3)
    inner = (right > 0) & (right < count - 1)
    below, above = np.mean(named[inner] == right[inner] - 1), np.mean(named[inner] > right[inner])
    assert within(below, inner.sum(), (top3 - top1) / 2)
    assert above > below / 2
    for end, beside in ((0, 1), (count - 1, count - 2)):
        here = named[right == end]
        if here.size > 200:
            assert within(np.mean(here == beside), here.size, top3 - top1)
            assert within(np.mean(here == end), here.size, top1)


def test_other_experts_do_not_matter(catalog):
    full = predict(catalog, np.arange(16), "score", seed=3)
    assert np.array_equal(predict(catalog, [5, 2], "score", seed=3), full[:, [5, 2]])
    assert np.array_equal(predict(catalog, [2, 5, 2], "score", seed=3), full[:, [2, 5, 2]])


def test_edges_come_from_train_only(catalog):
    scores = np.array(catalog.scores)
    scores[catalog.split > 0] = 0.5
    other = dataclasses.replace(catalog, scores=scores)
    for buckets in ("quantile", "width"):
        pairs = zip(*(bucket_edges(c, "score", buckets) for c in (catalog, other)), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_zero_and_exact(catalog):
    assert not predict(catalog, [0, 1], "score", "zero").any()
    assert np.array_equal(predict(catalog, [0, 1], "score", "exact"), catalog.scores[:, :2])
    assert np.array_equal(predict(catalog, [0], "length", "exact"), catalog.output_tokens[:, :1])


def test_learned_reads_its_table(catalog, tmp_path):
    path = tmp_path / "table.npz"
    values = np.clip(catalog.scores + 0.01, 0, 1)
    write_table(path, catalog, {"score": values})
    for kwargs in ({"kind": "learned", "table": path}, {"kind": f"learned:{path}"}):
        assert np.array_equal(predict(catalog, [4, 0], **kwargs), values[:, [4, 0]])
    with pytest.raises(MalformedFileError, match="field 'length': is missing"):
        predict(catalog, [0], "length", "learned", table=path)


def test_the_shipped_table_is_better_than_a_guess_and_no_oracle(catalog):
    rows, columns = catalog.rows("eval"), np.arange(16)
    for quantity, truth in (("score", catalog.scores), ("length", catalog.output_tokens)):
        said = predict(catalog, columns, quantity, "learned")[rows]
        mean = truth[catalog.rows("train")].mean(axis=0)
        error, guess = abs(said - truth[rows]).mean(), abs(mean - truth[rows]).mean()
        assert 0.5 * guess < error < 0.97 * guess


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "confused"}, "Did you mean 'confusion'"),
        ({"kind": "learned", "catalog": load_catalog("synthetic")}, "needs table=PATH"),
        ({"columns": [16]}, r"in \[0, 15\]"),
        ({"columns": [0.5]}, "column indexes"),
    ],
)
def test_predict_refuses(catalog, kwargs, message):
    with pytest.raises(ValueError, match=message):
        predict(**({"catalog": catalog, "columns": [0]} | kwargs))


def test_write_table_refuses(catalog, tmp_path):
    for values in ({}, {"scores": catalog.scores}, {"score": catalog.scores[:3]}):
        with pytest.raises(ValueError):
            write_table(tmp_path / "t.npz", catalog, values)
    assert not list(tmp_path.iterdir())
