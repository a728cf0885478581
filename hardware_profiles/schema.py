"""The format of profile files: reading, checking every field, writing.

Files are checked here, in plain Python, when they are loaded: a field that is missing, of the wrong
type, out of range or in the wrong unit is refused with the file, the field and the reason. All
times are seconds, all sizes bytes, all lengths tokens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import nearest
from servegym._files import write_text

FORMAT = "servegym-hardware-profile/1"
KINDS = ("measured", "fitted", "derived")
BLOCK_SIZE = 16
# One iteration on one token never takes this long; a file that says so has its units wrong.
MAX_PLAUSIBLE_S = 30.0
# Attention of 131,072 tokens after as many, all layers of a large model, takes minutes.
MAX_PLAUSIBLE_ATTENTION_S = 900.0
# No token more of one context may add more.
MAX_PLAUSIBLE_TOKEN_S = 1e-3

# The axes of each table of a tabulated law; a table without axes is a grid itself.
TABLE_AXES: dict[str, tuple[str, ...]] = {
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
MIXED_TABLE = "mixed_decode_attention_s"
# Seconds that a law may add, see `servegym.hardware_profiles.law.Surplus`.
MIXED_CHUNK, LONGEST = "mixed_chunk_s", ("longest_decode_s", "longest_mixed_s")
_ATTENTION_TABLES = ("chunk_attention_s", "decode_attention_s", MIXED_TABLE)
LINEAR_FIELDS = (
    "base_s",
    "prefill_s_per_token",
    "decode_s_per_sequence",
    "decode_s_per_context_token",
)
ESTIMATOR_FIELDS = (*LINEAR_FIELDS[:2], LINEAR_FIELDS[3], LINEAR_FIELDS[2])
_EXPERT_FIELDS = ("experts_s", "expert_share")
MODEL_FACTS = (
    *("layers", "hidden_size", "attention_heads", "kv_heads", "head_size", "bytes_per_value"),
    *("parameters", "weight_bytes", "kv_bytes_per_token"),
)
STEP_KINDS = ("prefill", "decode")
HOST_TIMES = ("step_s", "sequence_s", "token_s")
_OPTIONAL_HOST_TIMES = ("beyond_256_s",)
API_TIMES = ("api_in_s", "api_request_s", "api_out_s")
DOMAIN_LIMITS = ("max_decode_sequences", "max_iteration_tokens", "max_context_tokens")


class Fields:
    """A JSON object together with where it stands, so that errors can name the field.

    Every reader returns the value, or raises a ``ValueError`` with the file, the field, what was
    given and what is allowed.

    Args:
        data: the decoded JSON object.
        where: the file's name.
        path: the object's place in the file, such as ``device``; empty at the top.
    """

    def __init__(self, data: Any, where: str, path: str = "") -> None:
        self.where = where
        self.path = path
        if not isinstance(data, Mapping):
            raise self.error("", f"got {_short(data)}; must be an object")
        self.data = dict(data)

    def place(self, key: str) -> str:
        """``key`` with the path of its object before it."""
        return ".".join(part for part in (self.path, key) if part) or "(top level)"

    def error(self, key: str, reason: str) -> ValueError:
        """The error of a field, to be raised."""
        return ValueError(f"{self.where}: field {self.place(key)!r}: {reason}")

    def only(self, allowed: Iterable[str]) -> None:
        """Refuse keys that are not ``allowed``, naming the nearest that is."""
        names = list(allowed)
        for key in self.data:
            if key not in names:
                near = nearest(str(key), names)
                hint = f"; did you mean {near!r}?" if near else ""
                raise self.error(str(key), f"unknown field{hint} (allowed: {', '.join(names)})")

    def get(self, key: str) -> Any:
        """The value of a field that must be there."""
        if key not in self.data:
            raise self.error(key, "missing")
        return self.data[key]

    def child(self, key: str) -> Fields:
        """The object in a field."""
        return Fields(self.get(key), self.where, self.place(key))

    def text(self, key: str, allowed: Iterable[str] | None = None) -> str:
        """A non-empty string, one of ``allowed`` if given."""
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
        """A finite number in [``low``, ``high``], above ``low`` if ``strict``."""
        return self.check_number(key, self.get(key), low, high, strict=strict, hint=hint)

    def check_number(
        self, key: str, value: Any, low: float, high: float, *, strict: bool, hint: str
    ) -> float:
        """As :meth:`number`, of a value that is not a field of its own."""
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
        """A whole number of at least ``low``."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"got {_short(value)}; must be an integer")
        if value < low:
            raise self.error(key, f"got {value}; must be >= {low}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; the default where the field is not there."""
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"got {_short(value)}; must be true or false")
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


def copy_json(value: Any) -> Any:
    """Copy a JSON value, so that a caller's changes never reach a loaded profile."""
    return json.loads(json.dumps(value))


# -- the parts of a profile --------------------------------------------------------------------


def check_model(fields: Fields, *, shape: bool = True) -> dict[str, Any]:
    """A copy of the model facts; the KV bytes a token must be those of its shape.

    Without ``shape`` the name is enough: KV memory is then given in tokens.
    """
    fields.only(("name", *MODEL_FACTS, "source"))
    fields.text("name")
    if not shape and "kv_bytes_per_token" not in fields.data:
        for key, value in fields.data.items():
            if key not in ("name", "source"):
                fields.check_number(key, value, 1.0, math.inf, strict=False, hint="")
        return copy_json(fields.data)
    stated = {
        key: fields.integer(key) for key in MODEL_FACTS if key != "parameters" or key in fields.data
    }
    sizes = ("layers", "kv_heads", "head_size", "bytes_per_value")
    kv, expected = stated["kv_bytes_per_token"], 2 * math.prod(stated[key] for key in sizes)
    if kv != expected:
        raise fields.error(
            "kv_bytes_per_token",
            f"got {kv}; must be 2 x layers x kv_heads x head_size x bytes_per_value = {expected}",
        )
    return copy_json(fields.data)


def check_law(fields: Fields) -> dict[str, Any]:
    """A copy of the law, ``linear`` or ``tabulated``; no iteration may take no time."""
    hint = " seconds (are the times in milliseconds or microseconds?)"
    kind = fields.text("kind", ("linear", "tabulated"))
    if kind == "linear":
        fields.only(("kind", *LINEAR_FIELDS))
        base, k1, kb, k2 = (fields.number(k, high=1.0, hint=hint) for k in LINEAR_FIELDS)
        for key, shortest in (
            ("prefill_s_per_token", base + k1),
            ("decode_s_per_context_token", base + kb + k2),
        ):
            if shortest <= 0.0:
                raise fields.error(key, "an iteration would take no time; one term must be > 0")
        return copy_json(fields.data)
    fields.only(("kind", *TABLE_AXES, MIXED_TABLE, MIXED_CHUNK, *LONGEST))
    shapes = dict(TABLE_AXES)
    if MIXED_TABLE in fields.data:
        shapes[MIXED_TABLE] = shapes["decode_attention_s"]
    if MIXED_CHUNK in fields.data:
        fields.number(MIXED_CHUNK, high=MAX_PLAUSIBLE_TOKEN_S, hint=hint)
    arrays: dict[str, np.ndarray] = {}
    for key, axes in shapes.items():
        high, unit = (MAX_PLAUSIBLE_S, hint) if key.endswith("_s") else (math.inf, "")
        high = MAX_PLAUSIBLE_ATTENTION_S if key in _ATTENTION_TABLES else high
        shape = tuple(len(arrays[axis]) for axis in axes) if axes else None
        arrays[key] = fields.array(key, shape, high, unit)
        if not axes:
            check_grid(fields, key, arrays[key])
    for key in LONGEST:
        if key in fields.data:
            rows = (len(arrays["decode_sequences"]),)
            fields.array(key, rows, MAX_PLAUSIBLE_TOKEN_S, hint)
    if arrays["dense_s"].min() <= 0.0:
        raise fields.error("dense_s", "every entry must be > 0: no iteration takes no time")
    for key, axes in shapes.items():
        # Beyond the grid the last slope is extended: a falling one would reach negative times.
        for axis in range(len(axes)):
            last = np.take(arrays[key], -1, axis) - np.take(arrays[key], -2, axis)
            if np.min(last) < 0.0:
                raise fields.error(key, f"falls at the end of {axes[axis]}; it must not")
    return copy_json(fields.data)


def check_grid(fields: Fields, key: str, grid: np.ndarray) -> None:
    """Refuse a grid that is short, starts late or does not increase."""
    if len(grid) < 2:
        raise fields.error(key, f"has {len(grid)} entries; must have at least 2")
    first = 0.0 if key == "context_tokens" else 1.0
    if grid[0] > first:
        raise fields.error(f"{key}[0]", f"got {grid[0]:g}; the grid must start at <= {first:g}")
    for i in range(1, len(grid)):
        if grid[i] <= grid[i - 1]:
            raise fields.error(f"{key}[{i}]", f"got {grid[i]:g}; must exceed {grid[i - 1]:g}")


def check_fit_error(fields: Fields) -> None:
    """Refuse an object of errors without its number of points and its quantiles."""
    names = ("points", "median", "p90", "max")
    if not any(name in fields.data for name in names):
        for key, value in fields.data.items():
            if isinstance(value, Mapping):
                check_fit_error(fields.child(str(key)))
            elif not isinstance(value, (str, int, float)):
                raise fields.error(str(key), f"got {_short(value)}; must be an object")
        return
    fields.integer("points")
    spread = [fields.number(name) for name in names[1:]]
    if spread != sorted(spread):
        raise fields.error("median", "median, p90 and max must not decrease")


def check_step_error(fields: Fields) -> dict[str, Any]:
    """A copy of the error of whole steps: a bias and a standard deviation of the log, by kind."""
    fields.only((*STEP_KINDS, "source"))
    if "source" in fields.data:
        fields.text("source")
    for kind in STEP_KINDS:
        error = fields.child(kind)
        error.only(("bias", "sd", "points"))
        if "points" in error.data:
            error.integer("points")
        error.number("bias", -3.0, 3.0)
        error.number("sd", 0.0, 2.0)
    return copy_json(fields.data)


def check_host(fields: Fields) -> dict[str, Any]:
    """A copy of the host's share of an iteration and of a request."""
    optional = (*_OPTIONAL_HOST_TIMES, *API_TIMES)
    fields.only((*HOST_TIMES, *optional, "source"))
    for key in (*HOST_TIMES, *(key for key in optional if key in fields.data)):
        fields.number(key, high=1.0, hint=" seconds (is it in milliseconds?)")
    if fields.data.get("api_request_s", 0.0) > fields.data.get("api_in_s", 0.0):
        raise fields.error("api_request_s", "is part of api_in_s and must not be above it")
    if "source" in fields.data:
        fields.text("source")
    return copy_json(fields.data)


def check_provenance(fields: Fields) -> dict[str, Any]:
    """A provenance: source, licence, command, and a commit or a date."""
    for key in ("source", "licence", "command"):
        fields.text(key)
    if "commit" not in fields.data and "date" not in fields.data:
        raise fields.error("commit", "missing (a commit or a date is required)")
    return copy_json(fields.data)


def check_profile(data: Any, where: str) -> dict[str, Any]:
    """Check a profile's JSON object.

    Args:
        data: the decoded JSON object.
        where: the file's name, for error messages.

    Returns:
        Copies of its fields but ``format``, by name; ``estimator`` is a mapping of seconds.

    Raises:
        ValueError: naming ``where``, the field, what was given and what is allowed.
    """
    top = Fields(data, where)
    names = ("name", "description", "kind", "device", "model", "engine", "law", "estimator")
    top.only(("format", *names, "domain", "fit_error", "step_error", "host", "provenance"))
    top.text("format", (FORMAT,))

    device = top.child("device")
    engine = top.child("engine")
    # A server seen from outside: its KV memory is given in tokens, its shape is not known.
    outside = "kv_capacity_tokens" in engine.data
    if outside:
        engine.integer("kv_capacity_tokens", BLOCK_SIZE)

    def stated(fields: Fields, key: str) -> bool:
        return not outside or key in fields.data

    for key in ("name", "version"):
        engine.text(key)
    device.text("name")
    if stated(engine, "dtype"):
        engine.text("dtype")
    if stated(engine, "activation_reserve_bytes"):
        engine.number("activation_reserve_bytes")
    if stated(device, "memory_bytes"):
        device.number("memory_bytes", 1e8, 1e13, hint=" (bytes)")
    if stated(device, "usable_memory_fraction"):
        device.number("usable_memory_fraction", 0.0, 1.0, strict=True)

    estimator = top.child("estimator")
    estimator.only((*ESTIMATOR_FIELDS, *_EXPERT_FIELDS))
    stated_of_estimator = (*ESTIMATOR_FIELDS, *(k for k in _EXPERT_FIELDS if k in estimator.data))
    unit = " seconds (is it in milliseconds?)"

    domain = top.child("domain")
    domain.only(DOMAIN_LIMITS)
    check_fit_error(top.child("fit_error"))
    return {
        "name": top.text("name"),
        "description": top.text("description"),
        "kind": top.text("kind", KINDS),
        "device": copy_json(device.data),
        "model": check_model(top.child("model"), shape=not outside),
        "engine": copy_json(engine.data),
        "law": check_law(top.child("law")),
        "estimator": {k: estimator.number(k, high=1.0, hint=unit) for k in stated_of_estimator},
        "domain": {key: domain.integer(key) for key in DOMAIN_LIMITS},
        "fit_error": copy_json(top.child("fit_error").data),
        "step_error": check_step_error(top.child("step_error")) if "step_error" in data else {},
        "host": check_host(top.child("host")) if "host" in data else {},
        "provenance": check_provenance(top.child("provenance")),
    }


def kv_capacity_tokens(
    device: Mapping[str, Any], model: Mapping[str, Any], engine: Mapping[str, Any], at: str
) -> int:
    """Tokens that fit in the memory which weights and activations leave, in whole blocks of 16.

    An engine that states ``kv_capacity_tokens`` has those.

    Args:
        device: ``memory_bytes`` and ``usable_memory_fraction``.
        model: ``weight_bytes`` and ``kv_bytes_per_token``.
        engine: ``activation_reserve_bytes``.
        at: the file and field, for the error message.

    Raises:
        ValueError: if no block fits.
    """
    if "kv_capacity_tokens" in engine:
        return int(engine["kv_capacity_tokens"]) // BLOCK_SIZE * BLOCK_SIZE
    usable = device["memory_bytes"] * device["usable_memory_fraction"]
    free = usable - model["weight_bytes"] - engine["activation_reserve_bytes"]
    blocks = math.floor(free / (BLOCK_SIZE * model["kv_bytes_per_token"]))
    if blocks < 1:
        raise ValueError(
            f"{at}: no KV block fits: usable memory {usable:.4g} B, weights "
            f"{model['weight_bytes']:.4g} B, activations {engine['activation_reserve_bytes']:.4g} B"
        )
    return blocks * BLOCK_SIZE


# -- files -------------------------------------------------------------------------------------


class _RefusedError(ValueError):
    """JSON that could be parsed and is refused."""


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file strictly: no NaN, no infinity, no key twice.

    Args:
        path: the file to read.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    file = Path(path)

    def constant(token: str) -> Any:
        raise _RefusedError(f"{file.name}: {token} is no JSON number; write a finite number")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise _RefusedError(f"{file.name}: field {key!r}: given twice")
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
    except _RefusedError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{file.name}: not valid JSON: {error}") from error


def write_json(data: Any, path: str | os.PathLike[str]) -> None:
    """Write a JSON file in one move; arrays of numbers stay on one line.

    Args:
        data: a JSON value of finite numbers.
        path: the file to write.
    """
    write_text(path, _indented(data) + "\n")


def _indented(value: Any, indent: str = "") -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        body = ",\n".join(
            f"{inner}{json.dumps(k)}: {_indented(v, inner)}" for k, v in value.items()
        )
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
        body = ",\n".join(inner + _indented(v, inner) for v in value)
        return f"[\n{body}\n{indent}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
