"""Hardware profiles: how long one iteration of a serving engine takes on one device.

A profile is a JSON file for one (device, model, engine). Its law is either ``linear`` (the
estimator form of the routing paper, Eq. 13 and 14, with a constant) or ``tabulated`` (times
measured on a grid, interpolated linearly). Both are evaluated through the same
:class:`LawTables`, so that a simulator needs one code path.

All times are seconds, all sizes bytes, all lengths tokens. Files are checked here, in plain
Python, when they are loaded: a field that is missing, of the wrong type, out of range or in
the wrong unit is refused with the file, the field and the reason.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

FORMAT = "servegym-hardware-profile/1"
KINDS = ("measured", "fitted", "derived")
BLOCK_SIZE = 16
# One iteration on one token never takes this long; a file that says so has its units wrong.
MAX_PLAUSIBLE_S = 30.0
_NOT_PROFILES = ("fleet-", "moe-", "schema", "served-models")

_TABLE_SHAPES: dict[str, tuple[str, ...]] = {
    "dense_tokens": (),
    "dense_s": ("dense_tokens",),
    "chunk_tokens": (),
    "context_tokens": (),
    "chunk_attention_s": ("chunk_tokens", "context_tokens"),
    "decode_sequences": (),
    "decode_context_tokens": (),
    "decode_attention_s": ("decode_sequences", "decode_context_tokens"),
    "head_sequences": (),
    "head_s": ("head_sequences",),
}
# Optional: the decodes' attention in an iteration that also prefills, on the decode table's axes.
_MIXED = "mixed_decode_attention_s"
_LINEAR_FIELDS = (
    "base_s",
    "prefill_s_per_token",
    "decode_s_per_sequence",
    "decode_s_per_context_token",
)


class LawTables(NamedTuple):
    """The tables a law is evaluated from; every array is float64 and read-only.

    One iteration takes
    ``dense(tokens) + sum over chunks of chunk_attention(chunk, context before it)
    + decode_attention(b, T / b) + head(sequences)``,
    with linear (bilinear) interpolation inside a grid and the slope of the outermost cell
    beyond it.

    Attributes:
        dense_tokens: ``(G1,)`` scheduled tokens of an iteration (prefill + decode).
        dense_s: ``(G1,)`` seconds of everything that depends on that number alone.
        chunk_tokens: ``(G2,)`` tokens of one prefill chunk.
        context_tokens: ``(G3,)`` tokens of the same request computed before the chunk.
        chunk_attention_s: ``(G2, G3)`` seconds of the chunk's attention, whole model.
        decode_sequences: ``(G5,)`` decoding sequences ``b``.
        decode_context_tokens: ``(G4,)`` mean tokens in KV memory per sequence, ``x = T / b``.
        decode_attention_s: ``(G5, G4)`` seconds of the decodes' attention, whole model.
        head_sequences: ``(G6,)`` sequences that go through the language-model head.
        head_s: ``(G6,)`` seconds of head and sampler.
    """

    dense_tokens: np.ndarray
    dense_s: np.ndarray
    chunk_tokens: np.ndarray
    context_tokens: np.ndarray
    chunk_attention_s: np.ndarray
    decode_sequences: np.ndarray
    decode_context_tokens: np.ndarray
    decode_attention_s: np.ndarray
    head_sequences: np.ndarray
    head_s: np.ndarray


@dataclass(frozen=True)
class Estimator:
    """Linear estimate of the law (Eq. 13 and 14 of the routing paper, with a constant).

    ``prefill(P) = base_s + prefill_s_per_token * P`` and
    ``decode(b, T) = base_s + decode_s_per_sequence * b + decode_s_per_context_token * T``.

    Attributes:
        base_s: seconds of an iteration that does nothing.
        prefill_s_per_token: the paper's k1, seconds per prompt token.
        decode_s_per_context_token: the paper's k2, seconds per token held in KV memory.
        decode_s_per_sequence: seconds per decoding sequence.
    """

    base_s: float
    prefill_s_per_token: float
    decode_s_per_context_token: float
    decode_s_per_sequence: float = 0.0

    @property
    def k1(self) -> float:
        """Seconds per prompt token (Eq. 13)."""
        return self.prefill_s_per_token

    @property
    def k2(self) -> float:
        """Seconds per KV token of a decode iteration (Eq. 14)."""
        return self.decode_s_per_context_token

    def prefill_s(self, tokens: float) -> float:
        """Estimated seconds of a prefill of ``tokens`` prompt tokens."""
        return self.base_s + self.prefill_s_per_token * tokens

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Estimated seconds of a decode of ``sequences`` holding ``context_tokens`` in all."""
        return (
            self.base_s
            + self.decode_s_per_sequence * sequences
            + self.decode_s_per_context_token * context_tokens
        )


def interpolate(grid: np.ndarray, values: np.ndarray, x: float) -> float:
    """Piecewise-linear ``values(x)``; the outermost segment's slope holds beyond the grid.

    Args:
        grid: ``(G,)`` strictly increasing, ``G >= 2``.
        values: ``(G,)``.
        x: where to evaluate.

    Returns:
        The interpolated value.
    """
    i = min(max(bisect_right(grid, x) - 1, 0), len(grid) - 2)
    w = (x - grid[i]) / (grid[i + 1] - grid[i])
    return float(values[i] + w * (values[i + 1] - values[i]))


def interpolate_2d(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, row: float, column: float
) -> float:
    """Bilinear ``values(row, column)``; the outermost cell's plane holds beyond the grid.

    Args:
        rows: ``(R,)`` strictly increasing, ``R >= 2``.
        columns: ``(C,)`` strictly increasing, ``C >= 2``.
        values: ``(R, C)``.
        row: where to evaluate along the rows.
        column: where to evaluate along the columns.

    Returns:
        The interpolated value.
    """
    i = min(max(bisect_right(rows, row) - 1, 0), len(rows) - 2)
    w = (row - rows[i]) / (rows[i + 1] - rows[i])
    low = interpolate(columns, values[i], column)
    high = interpolate(columns, values[i + 1], column)
    return float(low + w * (high - low))


@dataclass(frozen=True, eq=False)
class Profile:
    """One device running one model under one engine.

    Make one with :func:`load` or :meth:`from_dict`; both check every field.

    Attributes:
        name: the profile's name, also its file name.
        kind: ``"measured"``, ``"fitted"`` or ``"derived"``.
        device: device facts (``memory_bytes``, ``usable_memory_fraction``, ...).
        model: model facts (``layers``, ``kv_heads``, ``weight_bytes``, ...).
        engine: engine facts (``activation_reserve_bytes``, ...).
        kv_bytes_per_token: bytes that one token takes in KV memory.
        kv_capacity_tokens: tokens that fit in the KV memory, whole blocks of 16.
        estimator: linear estimate of the law.
        domain: largest batch, iteration and context that the data behind the law cover.
        fit_error: relative errors of the law on rows it was not built from.
        provenance: source, licence, commit or date, command, notes.
        law: the law as it stands in the file.
        description: one line for people.
    """

    name: str
    kind: str
    device: dict[str, Any]
    model: dict[str, Any]
    engine: dict[str, Any]
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    estimator: Estimator
    domain: dict[str, Any]
    fit_error: dict[str, Any]
    provenance: dict[str, Any]
    law: dict[str, Any] = field(repr=False)
    description: str = ""
    _tables: LawTables | None = field(default=None, repr=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "<profile>") -> Profile:
        """Check a profile's JSON object and build the profile.

        Args:
            data: the decoded JSON object.
            where: the file's name, for error messages.

        Returns:
            The profile.

        Raises:
            ValueError: naming ``where``, the field, what was given and what is allowed.
        """
        return _build(data, where)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; ``Profile.from_dict(p.to_dict())`` is the same profile."""
        return {
            "format": FORMAT,
            "name": self.name,
            "description": self.description,
            "kind": self.kind,
            "device": _plain(self.device),
            "model": _plain(self.model),
            "engine": _plain(self.engine),
            "law": _plain(self.law),
            "estimator": {
                "base_s": self.estimator.base_s,
                "prefill_s_per_token": self.estimator.prefill_s_per_token,
                "decode_s_per_context_token": self.estimator.decode_s_per_context_token,
                "decode_s_per_sequence": self.estimator.decode_s_per_sequence,
            },
            "domain": _plain(self.domain),
            "fit_error": _plain(self.fit_error),
            "provenance": _plain(self.provenance),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile's JSON file in one move (a reader never sees half of it).

        Args:
            path: the file to write.
        """
        write_json(self.to_dict(), path)

    def tables(self) -> LawTables:
        """Return the law's tables (float64, read-only, seconds and tokens)."""
        if self._tables is None:
            object.__setattr__(self, "_tables", _law_tables(self.law))
        assert self._tables is not None
        return self._tables

    def with_model(self, model: Mapping[str, Any], where: str = "<model>") -> Profile:
        """Return this profile holding another model's weights and KV cache.

        The latency law stays; only the KV bytes per token and the capacity change.

        Args:
            model: model facts, as in the ``model`` field of a profile file.
            where: the file's name, for error messages.

        Returns:
            The profile with the new memory facts.

        Raises:
            ValueError: if a fact is missing or wrong, or the weights do not fit.
        """
        facts = _check_model(_Fields(model, where, "model"))
        kv_bytes = int(facts["kv_bytes_per_token"])
        tokens = _capacity(self.device, facts, self.engine, f"{where}: field 'weight_bytes'")
        return replace(self, model=facts, kv_bytes_per_token=kv_bytes, kv_capacity_tokens=tokens)

    # -- a clear, slow evaluation of the law ------------------------------------------------

    def dense_s(self, tokens: float) -> float:
        """Seconds of an iteration's dense part for ``tokens`` scheduled tokens."""
        t = self.tables()
        return interpolate(t.dense_tokens, t.dense_s, tokens)

    def chunk_attention_s(self, chunk: float, context: float) -> float:
        """Seconds of the attention of a ``chunk`` of prompt tokens after ``context`` tokens."""
        t = self.tables()
        return interpolate_2d(t.chunk_tokens, t.context_tokens, t.chunk_attention_s, chunk, context)

    def decode_attention_s(self, sequences: float, mean_context: float) -> float:
        """Seconds of the attention of ``sequences`` decodes of ``mean_context`` tokens each."""
        t = self.tables()
        return interpolate_2d(
            t.decode_sequences,
            t.decode_context_tokens,
            t.decode_attention_s,
            sequences,
            mean_context,
        )

    def head_s(self, sequences: float) -> float:
        """Seconds of the language-model head and sampler for ``sequences``."""
        t = self.tables()
        return interpolate(t.head_sequences, t.head_s, sequences)

    def prefill_s(self, tokens: float) -> float:
        """Seconds of a prefill iteration of ``tokens`` prompt tokens (Eq. 13's quantity)."""
        return self.dense_s(tokens) + self.chunk_attention_s(tokens, 0.0) + self.head_s(1.0)

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one decode iteration (Eq. 14's quantity).

        Args:
            sequences: ``b >= 1`` running sequences, one new token each.
            context_tokens: ``T``, tokens in KV memory summed over them.

        Returns:
            Seconds.
        """
        return (
            self.dense_s(sequences)
            + self.decode_attention_s(sequences, context_tokens / sequences)
            + self.head_s(sequences)
        )

    def step_s(
        self,
        chunks: Iterable[tuple[float, float]] = (),
        sequences: float = 0,
        context_tokens: float = 0.0,
    ) -> float:
        """Seconds of one mixed iteration of the chunked-prefill scheduler.

        Args:
            chunks: ``(tokens, context)`` of every prefill chunk: its own tokens, and the
                tokens of the same request computed before.
            sequences: decoding sequences ``b``, one token each.
            context_tokens: ``T``, tokens in KV memory summed over the decodes.

        Returns:
            Seconds.

        Raises:
            ValueError: if there is nothing to do.
        """
        parts = list(chunks)
        if not parts and sequences < 1:
            raise ValueError("step_s needs at least one chunk or one decoding sequence")
        total = self.dense_s(sum(chunk for chunk, _ in parts) + sequences)
        total += sum(self.chunk_attention_s(chunk, context) for chunk, context in parts)
        if sequences >= 1:
            total += self.decode_attention_s(sequences, context_tokens / sequences)
        return total + self.head_s(sequences + len(parts))

    def mixed_decode_attention_s(self) -> np.ndarray:
        """The decodes' attention in an iteration that also prefills.

        There the decodes run in the prefill kernel, without splitting their contexts over the
        multiprocessors, and take longer than in an iteration of decodes alone.

        Returns:
            ``(G5, G4)`` seconds on the axes ``decode_sequences`` and ``decode_context_tokens`` of
            :meth:`tables`, read-only; the decode table itself where nothing else was measured.
        """
        if _MIXED not in self.law:
            return self.tables().decode_attention_s
        table = np.array(self.law[_MIXED], dtype=np.float64)
        table.setflags(write=False)
        return table

    def mixed_step_s(
        self, chunks: Iterable[tuple[float, float]], sequences: float, context_tokens: float
    ) -> float:
        """:meth:`step_s` with the decodes' attention as it is beside prefill chunks.

        Args:
            chunks: ``(tokens, context)`` of every prefill chunk; at least one.
            sequences: decoding sequences ``b``, at least one.
            context_tokens: ``T``, tokens in KV memory summed over the decodes.

        Returns:
            Seconds.

        Raises:
            ValueError: if there is no chunk or no decode.
        """
        parts = list(chunks)
        if not parts or sequences < 1:
            raise ValueError("mixed_step_s needs at least one chunk and one decoding sequence")
        t, mean = self.tables(), context_tokens / sequences
        alone = self.decode_attention_s(sequences, mean)
        beside = interpolate_2d(
            t.decode_sequences,
            t.decode_context_tokens,
            self.mixed_decode_attention_s(),
            sequences,
            mean,
        )
        return self.step_s(parts, sequences, context_tokens) - alone + beside

    def headline_error(self) -> tuple[str, dict[str, Any]] | None:
        """The error to show beside the profile's name, see :func:`headline_error`."""
        return headline_error(self.fit_error)

    def check_domain(self, batch: int, tokens: int, context: int = 0) -> bool:
        """Warn, once per profile, when a setting leaves the range the law was built on.

        Args:
            batch: the most decoding sequences that may run together.
            tokens: the most tokens of one iteration.
            context: the longest context of one sequence.

        Returns:
            Whether the setting is inside the domain.
        """
        return warn_outside(
            self.name,
            (
                ("decode_sequences", batch, self.domain["max_decode_sequences"]),
                ("iteration_tokens", tokens, self.domain["max_iteration_tokens"]),
                ("context_tokens", context, self.domain["max_context_tokens"]),
            ),
        )


def headline_error(fit_error: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The error to show beside a profile's name.

    Args:
        fit_error: the profile's, by what was judged.

    Returns:
        The key in ``fit_error`` and the spread (points, median, p90, max) of the whole iterations
        that the law predicts worst by its 90th percentile; iterations that mix prefill and
        decodes aside. Where no whole iteration was judged, the worst of all entries; None where
        there is none.
    """
    entries = {
        key: value
        for key, value in fit_error.items()
        if isinstance(value, Mapping) and "p90" in value
    }
    whole = {
        key: value
        for key, value in entries.items()
        if "_iteration" in key and not key.startswith("mixed")
    }
    found = whole or entries
    if not found:
        return None
    key = max(found, key=lambda name: found[name]["p90"])
    return key, _plain(found[key])


_WARNED: set[str] = set()


def warn_outside(name: str, limits: Iterable[tuple[str, float, float]]) -> bool:
    """Warn, once per profile, when a setting leaves the range that a law was built on.

    Args:
        name: the profile's name.
        limits: what is bounded, what is asked for, and the largest the data cover.

    Returns:
        Whether everything is inside.
    """
    limits = list(limits)
    outside = [f"{what} {given} > {limit}" for what, given, limit in limits if given > limit]
    if outside and name not in _WARNED:
        _WARNED.add(name)
        domain = ", ".join(f"{what} <= {limit}" for what, _, limit in limits)
        warnings.warn(
            f"profile {name!r} is used outside its domain ({domain}): {', '.join(outside)}; "
            "the last slope of its tables is extended there",
            UserWarning,
            stacklevel=3,
        )
    return not outside


# -- reading and checking -----------------------------------------------------------------------


class _Fields:
    """A JSON object together with where it stands, so that errors can name the field."""

    def __init__(self, data: Any, where: str, path: str = "") -> None:
        self.where = where
        self.path = path
        if not isinstance(data, Mapping):
            raise self.error("", f"got {_short(data)}; must be an object")
        self.data = data

    def name(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part) or "(top level)"

    def error(self, key: str, reason: str) -> ValueError:
        return ValueError(f"{self.where}: field {self.name(key)!r}: {reason}")

    def only(self, allowed: Iterable[str]) -> None:
        names = list(allowed)
        for key in self.data:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise self.error(str(key), f"unknown field{hint} (allowed: {', '.join(names)})")

    def get(self, key: str) -> Any:
        if key not in self.data:
            raise self.error(key, "missing")
        return self.data[key]

    def child(self, key: str) -> _Fields:
        return _Fields(self.get(key), self.where, self.name(key))

    def text(self, key: str, allowed: Iterable[str] | None = None) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"got {_short(value)}; must be a non-empty string")
        if allowed is not None:
            options = list(allowed)
            if value not in options:
                raise self.error(key, f"got {value!r}; must be one of {', '.join(options)}")
        return value

    def number(
        self,
        key: str,
        low: float = 0.0,
        high: float = math.inf,
        *,
        strict: bool = False,
        hint: str = "",
    ) -> float:
        return self.check_number(key, self.get(key), low, high, strict=strict, hint=hint)

    def check_number(
        self, key: str, value: Any, low: float, high: float, *, strict: bool, hint: str
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"got {_short(value)}; must be a number")
        if not math.isfinite(value):
            raise self.error(key, f"got {value}; must be finite")
        if value < low or (strict and value == low):
            raise self.error(key, f"got {value}; must be {'>' if strict else '>='} {low:g}")
        if value > high:
            raise self.error(key, f"got {value}; must be <= {high:g}{hint}")
        return float(value)

    def integer(self, key: str, low: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"got {_short(value)}; must be an integer")
        if value < low:
            raise self.error(key, f"got {value}; must be >= {low}")
        return value

    def array(self, key: str, shape: tuple[int, ...] | None, high: float, hint: str) -> np.ndarray:
        """A list (or list of lists) of finite numbers >= 0, of ``shape`` if one is given."""

        def walk(value: Any, dims: tuple[int, ...] | None, at: str) -> list[Any]:
            if not isinstance(value, list):
                raise self.error(at, f"got {_short(value)}; must be a list")
            if dims is not None and len(value) != dims[0]:
                raise self.error(at, f"has {len(value)} entries; must have {dims[0]}")
            if dims is not None and len(dims) > 1:
                return [walk(v, dims[1:], f"{at}[{i}]") for i, v in enumerate(value)]
            return [
                self.check_number(f"{at}[{i}]", v, 0.0, high, strict=False, hint=hint)
                for i, v in enumerate(value)
            ]

        return np.array(walk(self.get(key), shape, key), dtype=np.float64)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _plain(value: Any) -> Any:
    """Copy a JSON value, so that a caller's changes never reach a loaded profile."""
    return json.loads(json.dumps(value))


def _capacity(
    device: Mapping[str, Any], model: Mapping[str, Any], engine: Mapping[str, Any], at: str
) -> int:
    usable = device["memory_bytes"] * device["usable_memory_fraction"]
    free = usable - model["weight_bytes"] - engine["activation_reserve_bytes"]
    blocks = math.floor(free / (BLOCK_SIZE * model["kv_bytes_per_token"]))
    if blocks < 1:
        raise ValueError(
            f"{at}: no KV block fits: usable memory {usable:.4g} B, weights "
            f"{model['weight_bytes']:.4g} B, activations {engine['activation_reserve_bytes']:.4g} B"
        )
    return blocks * BLOCK_SIZE


def _check_model(fields: _Fields) -> dict[str, Any]:
    fields.only(
        (
            "name",
            "layers",
            "hidden_size",
            "attention_heads",
            "kv_heads",
            "head_size",
            "bytes_per_value",
            "parameters",
            "weight_bytes",
            "kv_bytes_per_token",
            "source",
        )
    )
    fields.text("name")
    for key in ("hidden_size", "attention_heads", "weight_bytes"):
        fields.integer(key)
    if "parameters" in fields.data:
        fields.integer("parameters")
    layers, heads, size, width, kv = (
        fields.integer(key)
        for key in ("layers", "kv_heads", "head_size", "bytes_per_value", "kv_bytes_per_token")
    )
    expected = 2 * layers * heads * size * width
    if kv != expected:
        raise fields.error(
            "kv_bytes_per_token",
            f"got {kv}; must be 2 x layers x kv_heads x head_size x bytes_per_value = {expected}",
        )
    return _plain(dict(fields.data))


def _check_law(fields: _Fields) -> dict[str, Any]:
    hint = " seconds (are the times in milliseconds or microseconds?)"
    kind = fields.text("kind", ("linear", "tabulated"))
    if kind == "linear":
        fields.only(("kind", *_LINEAR_FIELDS))
        base, k1, kb, k2 = (fields.number(k, high=1.0, hint=hint) for k in _LINEAR_FIELDS)
        for key, shortest in (
            ("prefill_s_per_token", base + k1),
            ("decode_s_per_context_token", base + kb + k2),
        ):
            if shortest <= 0.0:
                raise fields.error(key, "an iteration would take no time; one term must be > 0")
        return _plain(dict(fields.data))
    fields.only(("kind", *_TABLE_SHAPES, _MIXED))
    shapes = dict(_TABLE_SHAPES)
    if _MIXED in fields.data:
        shapes[_MIXED] = shapes["decode_attention_s"]
    arrays: dict[str, np.ndarray] = {}
    for key, axes in shapes.items():
        high, unit = (MAX_PLAUSIBLE_S, hint) if key.endswith("_s") else (math.inf, "")
        shape = tuple(len(arrays[axis]) for axis in axes) if axes else None
        arrays[key] = fields.array(key, shape, high, unit)
        if not axes:
            _check_grid(fields, key, arrays[key])
    if arrays["dense_s"].min() <= 0.0:
        raise fields.error("dense_s", "every entry must be > 0: no iteration takes no time")
    for key, axes in shapes.items():
        # Beyond the grid the last slope is extended: a falling one would reach negative times.
        for axis in range(len(axes)):
            last = np.take(arrays[key], -1, axis) - np.take(arrays[key], -2, axis)
            if np.min(last) < 0.0:
                raise fields.error(key, f"falls at the end of {axes[axis]}; it must not")
    return _plain(dict(fields.data))


def _check_grid(fields: _Fields, key: str, grid: np.ndarray) -> None:
    if len(grid) < 2:
        raise fields.error(key, f"has {len(grid)} entries; must have at least 2")
    first = 0.0 if key == "context_tokens" else 1.0
    if grid[0] > first:
        raise fields.error(f"{key}[0]", f"got {grid[0]:g}; the grid must start at <= {first:g}")
    for i in range(1, len(grid)):
        if grid[i] <= grid[i - 1]:
            raise fields.error(f"{key}[{i}]", f"got {grid[i]:g}; must exceed {grid[i - 1]:g}")


def _law_tables(law: Mapping[str, Any]) -> LawTables:
    if law["kind"] == "tabulated":
        arrays = {key: np.array(law[key], dtype=np.float64) for key in _TABLE_SHAPES}
    else:
        base, k1, kb, k2 = (float(law[key]) for key in _LINEAR_FIELDS)
        unit = np.array([0.0, 1.0])
        # (kb - k1) b + k2 b x is bilinear, so its four corners hold it everywhere.
        arrays = {
            "dense_tokens": unit.copy(),
            "dense_s": np.array([base, base + k1]),
            "chunk_tokens": unit.copy(),
            "context_tokens": unit.copy(),
            "chunk_attention_s": np.zeros((2, 2)),
            "decode_sequences": unit.copy(),
            "decode_context_tokens": unit.copy(),
            "decode_attention_s": np.array([[0.0, 0.0], [kb - k1, kb - k1 + k2]]),
            "head_sequences": unit.copy(),
            "head_s": np.zeros(2),
        }
    for array in arrays.values():
        array.setflags(write=False)
    return LawTables(**arrays)


def _check_error(fields: _Fields) -> None:
    """Every object that holds errors says how many points it is over and its spread."""
    names = ("points", "median", "p90", "max")
    if not any(name in fields.data for name in names):
        for key, value in fields.data.items():
            if isinstance(value, Mapping):
                _check_error(fields.child(str(key)))
            elif not isinstance(value, (str, int, float)):
                raise fields.error(str(key), f"got {_short(value)}; must be an object")
        return
    fields.integer("points")
    spread = [fields.number(name) for name in names[1:]]
    if spread != sorted(spread):
        raise fields.error("median", "median, p90 and max must not decrease")


def _build(data: Any, where: str) -> Profile:
    top = _Fields(data, where)
    top.only(
        (
            "format",
            "name",
            "description",
            "kind",
            "device",
            "model",
            "engine",
            "law",
            "estimator",
            "domain",
            "fit_error",
            "provenance",
        )
    )
    top.text("format", (FORMAT,))
    name = top.text("name")
    description = top.text("description")
    kind = top.text("kind", KINDS)

    device = top.child("device")
    device.text("name")
    device.number("memory_bytes", 1e8, 1e13, hint=" (bytes)")
    device.number("usable_memory_fraction", 0.0, 1.0, strict=True)

    model = _check_model(top.child("model"))

    engine = top.child("engine")
    for key in ("name", "version", "dtype"):
        engine.text(key)
    engine.number("activation_reserve_bytes")

    law = _check_law(top.child("law"))

    guess = top.child("estimator")
    keys = (
        "base_s",
        "prefill_s_per_token",
        "decode_s_per_context_token",
        "decode_s_per_sequence",
    )
    guess.only(keys)
    unit = " seconds (is it in milliseconds?)"
    estimator = Estimator(*(guess.number(k, high=1.0, hint=unit) for k in keys))

    domain = top.child("domain")
    domain.only(("max_decode_sequences", "max_iteration_tokens", "max_context_tokens"))
    for key in ("max_decode_sequences", "max_iteration_tokens", "max_context_tokens"):
        domain.integer(key)

    _check_error(top.child("fit_error"))

    provenance = top.child("provenance")
    for key in ("source", "licence", "command"):
        provenance.text(key)
    if "commit" not in provenance.data and "date" not in provenance.data:
        raise provenance.error("commit", "missing (a commit or a date is required)")

    kv_bytes = int(model["kv_bytes_per_token"])
    tokens = _capacity(device.data, model, engine.data, f"{where}: field 'device.memory_bytes'")
    profile = Profile(
        name=name,
        kind=kind,
        device=_plain(dict(device.data)),
        model=model,
        engine=_plain(dict(engine.data)),
        kv_bytes_per_token=kv_bytes,
        kv_capacity_tokens=tokens,
        estimator=estimator,
        domain=_plain(dict(domain.data)),
        fit_error=_plain(dict(top.child("fit_error").data)),
        provenance=_plain(dict(provenance.data)),
        law=law,
        description=description,
    )
    profile.tables()
    return profile


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file strictly: no NaN, no infinity, no key twice.

    Args:
        path: the file to read.

    Returns:
        The decoded value.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    file = Path(path)

    def constant(token: str) -> Any:
        raise ValueError(f"{file.name}: {token} is no JSON number; write a finite number")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise ValueError(f"{file.name}: field {key!r}: given twice")
            out[key] = value
        return out

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name}: not UTF-8 text: {error.reason}") from error
    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file.name}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{file.name}: not valid JSON: {error}") from error
    except ValueError as error:  # a number of thousands of digits, or one of those above
        if str(error).startswith(file.name):
            raise
        raise ValueError(f"{file.name}: not valid JSON: {error}") from error


def write_json(data: Any, path: str | os.PathLike[str]) -> None:
    """Write a JSON file in one move; arrays of numbers stay on one line.

    Args:
        data: a JSON value of finite numbers.
        path: the file to write.
    """
    file = Path(path)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(_format(data) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _format(value: Any, indent: str = "") -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        body = ",\n".join(f"{inner}{json.dumps(k)}: {_format(v, inner)}" for k, v in value.items())
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
        body = ",\n".join(inner + _format(v, inner) for v in value)
        return f"[\n{body}\n{indent}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def data_path(name: str) -> Path:
    """Path of a file that ships in ``hardware_profiles/data``."""
    return Path(str(resources.files("servegym.hardware_profiles.data"))) / name


def list_profiles() -> list[str]:
    """Names of the profiles that ship with the package, sorted."""
    return sorted(
        file.stem
        for file in data_path("").glob("*.json")
        if not file.name.startswith(_NOT_PROFILES)
    )


def load(name_or_path: str | os.PathLike[str]) -> Profile:
    """Load a profile by the name of a shipped one or by the path of a JSON file.

    Args:
        name_or_path: a name of :func:`list_profiles`, or a path (anything that ends in
            ``.json`` or holds a separator).

    Returns:
        The profile.

    Raises:
        ValueError: for an unknown name (the nearest valid one is given), or for a file that
            is unreadable or malformed (the file, field and reason are given).
    """
    return load_named(name_or_path, "profile", list_profiles(), "", _read_profile)


def unknown_name(what: str, given: str, names: list[str]) -> str:
    """Message for a name that does not exist, with the nearest that does."""
    near = [name for name in names if given and name.startswith(given)]
    near = near or difflib.get_close_matches(given, names, 1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what}: got {given!r}{hint} (allowed: {', '.join(names)})"


def _read_profile(file: Path) -> Profile:
    return Profile.from_dict(read_json(file), file.name)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_T = TypeVar("_T", bound=_Named)


def load_named(
    name_or_path: str | os.PathLike[str],
    what: str,
    names: list[str],
    prefix: str,
    read: Callable[[Path], _T],
) -> _T:
    """Load what ships under a name, or what is at a path.

    Args:
        name_or_path: one of ``names``, or a path (anything that ends in ``.json`` or holds a
            separator).
        what: what the names are names of, for the message.
        names: what ships.
        prefix: the shipped file is ``<prefix><name>.json``.
        read: reads a file; what ships is read once.

    Raises:
        ValueError: for an unknown name, or what ``read`` raises.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ValueError(f"{what}: got {name_or_path!r}; it must be a name or a path")
    text = os.fspath(name_or_path)
    if text.endswith(".json") or os.sep in text or "/" in text:
        return read(Path(text))
    if text not in names:
        raise ValueError(unknown_name(what, text, names))
    return _read_shipped(text, prefix, read)


@functools.cache
def _read_shipped(name: str, prefix: str, read: Callable[[Path], Any]) -> Any:
    file = data_path(f"{prefix}{name}.json")
    found = read(file)
    if found.name != name:
        raise ValueError(f"{file.name}: field 'name': got {found.name!r}; must be {name!r}")
    return found
