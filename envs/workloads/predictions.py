"""Predicted scores and output lengths, in buckets, as a router gets them.

The router never sees a true score or length. A predictor sorts (prompt, LLM) pairs into 10 buckets
and the router gets the centre of the bucket it names. The ``"confusion"`` predictor errs as often
as the published DistilBERT predictors do (arXiv:2508.00234, Section V-B): it names the right
bucket with probability top-1, a neighbour with probability top-3 - top-1, else any other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import choose, whole
from servegym._files import MalformedFileError, write_atomic
from servegym.envs.workloads.catalog import Catalog
from servegym.envs.workloads.files import DATA_DIR, checked, read_arrays

QUANTITIES = ("score", "length")
KINDS = ("confusion", "mean", "zero", "exact", "learned")
BUCKETS = ("quantile", "width")
NUM_BUCKETS = 10
# (top-1, top-3) accuracy of the published predictors.
ACCURACY = {"score": (0.6339, 0.9778), "length": (0.7297, 0.8471)}

_U64 = np.uint64


def bucket_edges(
    catalog: Catalog,
    quantity: str = "score",
    buckets: str = "quantile",
) -> tuple[np.ndarray, np.ndarray]:
    """Inner edges and centres of the buckets, from the train split.

    ``"quantile"``: edges are train values at the 10 % steps of the pooled values, a bucket is
    ``[edge, next edge)`` and its centre is the mean of its train values. Values that more than a
    tenth of the pool share (outputs cut at the cap) make edges coincide; those are merged, so
    there may be fewer than 10 buckets. ``"width"``: 10 buckets of width max/10, max over the
    pooled train values; the centre is the middle.

    Args:
        catalog: The catalog.
        quantity: ``"score"`` or ``"length"``.
        buckets: ``"quantile"`` or ``"width"``.

    Returns:
        float64 (K - 1,) ascending inner edges, float64 (K,) centres, K <= 10.
    """
    choose("quantity", quantity, QUANTITIES)
    choose("buckets", buckets, BUCKETS)
    train = _truth(catalog, quantity)[catalog.rows("train")]
    if train.size == 0:
        raise ValueError(f"catalog {catalog.name!r} has no train prompts to take bucket edges of.")
    pool = train.ravel()
    if buckets == "width":
        outer = np.linspace(0.0, pool.max(), NUM_BUCKETS + 1)
        return outer[1:-1], (outer[:-1] + outer[1:]) / 2
    steps = np.arange(1, NUM_BUCKETS) / NUM_BUCKETS
    edges = np.unique(np.quantile(pool, steps, method="inverted_cdf"))
    edges = edges[edges > pool.min()]
    members = np.searchsorted(edges, pool, side="right")
    counts = np.bincount(members, minlength=len(edges) + 1)
    return edges, np.bincount(members, weights=pool, minlength=len(edges) + 1) / counts


def predict(
    catalog: Catalog,
    columns: Sequence[int] | np.ndarray,
    quantity: str = "score",
    kind: str = "confusion",
    buckets: str = "quantile",
    seed: int = 0,
    *,
    table: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Predicted scores or lengths of all prompts of a catalog for some of its LLMs.

    The draw of ``"confusion"`` for a (prompt, LLM) is a hash of (seed, quantity, LLM name, prompt
    row), and bucket edges are pooled over the whole catalog: a prediction does not
    change when other experts join or leave, and replicas of one LLM share theirs. With K buckets,
    right bucket k:  P(k) = top1,  P(k-1) = P(k+1) = (top3 - top1)/2, both on the one neighbour at
    the ends, and the rest uniform over the other buckets.

    Args:
        catalog: The catalog.
        columns: N column indexes (:meth:`Catalog.columns`).
        quantity: ``"score"`` (in [0, 1]) or ``"length"`` (tokens).
        kind: ``"confusion"``, ``"zero"`` (0 everywhere), ``"mean"`` (the LLM's mean over the train
            prompts), ``"exact"`` (the truth) or ``"learned"`` (the values of ``table``;
            ``"learned:PATH"`` names it too). ``alpaca_eval_7b`` has one already, of
            ``envs/workloads/build/predictor.py`` at commit d987f7ef.
        buckets: ``"quantile"`` or ``"width"``, see :func:`bucket_edges`.
        seed: Seed of the predictor's errors, >= 0.
        table: ``.npz`` written by :func:`write_table`, for ``"learned"`` only.

    Returns:
        float32 (P, N).

    Raises:
        ValueError: An unknown option, a column out of range, or no table for ``"learned"``.
        MalformedFileError: A table that does not fit the catalog.
    """
    choose("quantity", quantity, QUANTITIES)
    if isinstance(kind, str) and kind.startswith("learned:"):
        kind, table = "learned", kind.removeprefix("learned:")
    choose("kind", kind, KINDS)
    choose("buckets", buckets, BUCKETS)
    seed = whole("seed", seed, 0)
    if table is not None and not isinstance(table, (str, os.PathLike)):
        raise ValueError(f"table={table!r} must be the path of a prediction table.")
    if table is not None and kind != "learned":
        raise ValueError(f"table={os.fspath(table)!r} is for kind='learned' only, not {kind!r}.")
    picked = np.asarray(columns)
    if picked.ndim != 1 or picked.dtype.kind not in "iu":
        raise ValueError(f"columns={columns!r} must be a sequence of column indexes.")
    if picked.size and not (0 <= picked.min() and picked.max() < catalog.num_models):
        raise ValueError(f"columns={columns!r} must be in [0, {catalog.num_models - 1}].")
    truth = _truth(catalog, quantity)[:, picked]
    if kind == "zero":
        return np.zeros(truth.shape, dtype=np.float32)
    if kind == "mean":
        mean = truth[catalog.rows("train")].mean(axis=0, dtype=np.float64)
        return np.broadcast_to(mean.astype(np.float32), truth.shape).copy()
    if kind == "exact":
        return truth.astype(np.float32)
    if kind == "learned":
        shipped = DATA_DIR / f"{catalog.name}_predictions.npz"
        if table is None and shipped.is_file():
            table = shipped
        if table is None:
            raise ValueError(
                "kind='learned' needs table=PATH (or kind='learned:PATH') of a prediction table "
                "(.npz written by servegym.envs.workloads.predictions.write_table)."
            )
        return _read_table(table, catalog, quantity)[:, picked]
    edges, centres = bucket_edges(catalog, quantity, buckets)
    right = np.searchsorted(edges, truth, side="right")
    named = _confuse(
        right, len(centres), *ACCURACY[quantity], _uniforms(catalog, picked, quantity, seed)
    )
    return centres[named].astype(np.float32)


def write_table(
    path: str | os.PathLike[str],
    catalog: Catalog,
    values: Mapping[str, np.ndarray],
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a table of a trained predictor, to be used as ``kind="learned"``.

    Args:
        path: The ``.npz`` to write.
        catalog: The catalog it is for.
        values: ``"score"`` and/or ``"length"`` -> float (P, M) predictions for all its LLMs.
        provenance: How they were made, kept as JSON under ``"provenance"``.

    Raises:
        ValueError: A wrong key, shape or range.
    """
    arrays: dict[str, np.ndarray] = {
        "catalog": np.array(catalog.name),
        "models": np.array(catalog.models),
        "prompt_id": np.asarray(catalog.prompt_ids),
    }
    if provenance is not None:
        arrays["provenance"] = np.array(json.dumps(dict(provenance), default=str))
    for quantity, array in values.items():
        choose("values key", quantity, QUANTITIES)
        arrays[quantity] = _checked_values(array, catalog, quantity)
    if not values:
        raise ValueError(f"values is empty, it must have one of {list(QUANTITIES)}.")
    named: dict[str, Any] = arrays
    write_atomic(path, lambda stream: np.savez_compressed(stream, **named))


def _truth(catalog: Catalog, quantity: str) -> np.ndarray:
    """float64 (P, M) of the true scores or lengths."""
    values = catalog.scores if quantity == "score" else catalog.output_tokens
    return values.astype(np.float64)


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of uint64 that scatters counters."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def _uniforms(catalog: Catalog, columns: np.ndarray, quantity: str, seed: int) -> np.ndarray:
    """float64 (2, P, N) in [0, 1): two draws for each prompt and LLM, by hash."""
    keys = []
    for column in columns:
        text = f"{seed}\0{quantity}\0{catalog.models[column]}".encode()
        keys.append(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
    key = np.array(keys, dtype=np.uint64)
    row = np.arange(catalog.num_prompts, dtype=np.uint64)[:, None]
    draws = []
    for stream in range(2):
        counter = (row * _U64(2) + _U64(stream + 1)) * _U64(0x9E3779B97F4A7C15)
        draws.append(_mix(_mix(key[None, :] + counter) ^ key[None, :]) >> _U64(11))
    return np.stack(draws).astype(np.float64) * 2.0**-53


def _confuse(
    right: np.ndarray, count: int, top1: float, top3: float, uniforms: np.ndarray
) -> np.ndarray:
    """Bucket named for each right one; see :func:`predict` for the law."""
    first, second = uniforms
    step = np.where(second < 0.5, -1, 1)
    neighbour = right + step
    neighbour = np.where((neighbour < 0) | (neighbour >= count), right - step, neighbour)
    low = np.maximum(right - 1, 0)
    others = count - (np.minimum(right + 1, count - 1) - low + 1)
    far = np.floor(second * others).astype(np.intp)
    far = np.where(far < low, far, far + (count - others))
    named = np.where(first < top1, right, np.where(first < top3, neighbour, far))
    if count == 1:
        return np.zeros_like(right)
    # With two or three buckets there may be none beyond the neighbours.
    return np.where((others == 0) & (first >= top3), neighbour, named)


def _checked_values(values: Any, catalog: Catalog, quantity: str) -> np.ndarray:
    most = 1 if quantity == "score" else catalog.max_output_tokens
    shape = (catalog.num_prompts, catalog.num_models)
    return checked(quantity, values, shape, 0, most, np.float32)


def _read_table(path: str | os.PathLike[str], catalog: Catalog, quantity: str) -> np.ndarray:
    """float32 (P, M) of a table in the catalog's order of LLMs."""
    remedy = "train it for this catalog and write it with predictions.write_table"
    if not Path(path).is_file():
        raise ValueError(f"table={os.fspath(path)!r} is not a file; {remedy}.")
    arrays = read_arrays(path, remedy)
    for key in ("models", "prompt_id", quantity):
        if key not in arrays:
            raise MalformedFileError(path, None, key, "is missing", remedy)
    if not np.array_equal(arrays["models"], np.array(catalog.models)):
        raise MalformedFileError(path, None, "models", "are not the catalog's", remedy)
    ids = arrays["prompt_id"]
    if ids.dtype.kind not in "iu" or not np.array_equal(ids, np.asarray(catalog.prompt_ids)):
        raise MalformedFileError(path, None, "prompt_id", "are not the catalog's", remedy)
    try:
        return _checked_values(arrays[quantity], catalog, quantity)
    except ValueError as error:
        raise MalformedFileError(path, None, quantity, str(error), remedy) from error
