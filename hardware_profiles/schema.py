"""The format of profile files: reading, checking every field, writing.

A field that is missing, of the wrong type, out of range or in the wrong unit is refused with the
file, the field and the reason. Times are seconds, sizes bytes, lengths tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from servegym._checks import LARGEST, flag, nearest, real, whole

FORMAT = "servegym-hardware-profile/1"
KINDS = ("measured", "fitted", "derived")
BLOCK_SIZE = 16
# An 80 % interval of a normal variable of deviation 1 has its ends so far from the mean.
Z80 = 1.2816
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
            raise self.error("", f"got {data!r:.60}; must be an object")
        self.data = dict(data)

    def place(self, key: str) -> str:
        """``key`` with the path of its object before it."""
        return ".".join(part for part in (self.path, key) if part) or "(top level)"

    def at(self, key: str) -> str:
        """The file and the place of a field, for messages."""
        return f"{self.where}: field {self.place(key)!r}:"

    def error(self, key: str, reason: str) -> ValueError:
        """The error of a field, to be raised."""
        return ValueError(f"{self.at(key)} {reason}")

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
        value, options = self.get(key), None if allowed is None else list(allowed)
        if isinstance(value, str) and (value.strip() if options is None else value in options):
            return value
        what = "a non-empty string" if options is None else f"one of {', '.join(options)}"
        raise self.error(key, f"got {value!r:.60}; must be {what}")

    def number(
        self,
        key: str,
        low: float = 0.0,
        high: float = LARGEST,
        *,
        strict: bool = False,
        hint: str = "",
    ) -> float:
        """A finite number in [``low``, ``high``], above ``low`` if ``strict``."""
        return real(self.at(key), self.get(key), low, high, strict, hint)

    def integer(self, key: str, low: int = 1) -> int:
        """A whole number of at least ``low``."""
        return whole(self.at(key), self.get(key), low, math.inf)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; the default where the field is not there."""
        return flag(self.at(key), self.data.get(key, default))

    def array(self, key: str, shape: tuple[int, ...] | None, high: float, hint: str) -> np.ndarray:
        """A list (or list of lists) of finite numbers >= 0, of ``shape`` if one is given."""

        def walk(value: Any, dims: tuple[int, ...] | None, at: str) -> list[Any]:
            if not isinstance(value, list):
                raise self.error(at, f"got {value!r:.60}; must be a list")
            if dims is not None and len(value) != dims[0]:
                raise self.error(at, f"has {len(value)} entries; must have {dims[0]}")
            if dims is not None and len(dims) > 1:
                return [walk(v, dims[1:], f"{at}[{i}]") for i, v in enumerate(value)]
            place = f"{self.where}: field '{self.place(at)}"  # once, for thousands of numbers
            return [real(f"{place}[{i}]':", v, 0.0, high, unit=hint) for i, v in enumerate(value)]

        return np.array(walk(self.get(key), shape, key), dtype=np.float64)

    def check(self, required: Checks, optional: Checks, more: bool = False) -> None:
        """Check every field of the object; others than these are refused unless ``more``."""
        if not more:
            self.only((*required, *optional))
        for key, check in {**required, **optional}.items():
            if key in required or key in self.data:
                check(self, key)


Check = Callable[[Fields, str], Any]
"""Checks a field of an object."""
Checks = Mapping[Any, Check]
"""Checks by field."""


def copy_json(value: Any) -> Any:
    """Copy a JSON value, so that a caller's changes never reach a loaded profile."""
    return json.loads(json.dumps(value))


# -- the parts of a profile --------------------------------------------------------------------

_IN_SECONDS = " seconds (is it in milliseconds or microseconds?)"
_SECONDS = partial(Fields.number, high=1.0, hint=_IN_SECONDS)
_LINEAR_LAW = {"kind": Fields.text, **dict.fromkeys(LINEAR_FIELDS, _SECONDS)}
_DEVICE = {
    "name": Fields.text,
    "memory_bytes": partial(Fields.number, low=1e8, high=1e13, hint=" (bytes)"),
    "usable_memory_fraction": partial(Fields.number, high=1.0, strict=True),
}
_ENGINE = dict.fromkeys(("name", "version", "dtype"), Fields.text)
_ENGINE |= {"activation_reserve_bytes": Fields.number}
_STEP_ERROR = {
    "bias": partial(Fields.number, low=-3.0, high=3.0),
    "sd": partial(Fields.number, high=2.0),
}


def check_model(fields: Fields) -> None:
    """Check model facts; the KV bytes a token must be those of the shape."""
    facts = dict.fromkeys(MODEL_FACTS, Fields.integer)
    fields.check({"name": Fields.text, **facts}, {"source": Fields.get})
    sizes = ("layers", "kv_heads", "head_size", "bytes_per_value")
    kv, expected = fields.data["kv_bytes_per_token"], 2 * math.prod(fields.data[k] for k in sizes)
    if kv != expected:
        must = f"must be 2 x layers x kv_heads x head_size x bytes_per_value = {expected}"
        raise fields.error("kv_bytes_per_token", f"got {kv}; {must}")


def check_law(fields: Fields) -> None:
    """Check a law, ``linear`` or ``tabulated``; no iteration may take no time."""
    if fields.text("kind", ("linear", "tabulated")) == "linear":
        fields.check(_LINEAR_LAW, {})
        base, k1, kb, k2 = (fields.data[key] for key in LINEAR_FIELDS)
        for key, shortest in (
            ("prefill_s_per_token", base + k1),
            ("decode_s_per_context_token", base + kb + k2),
        ):
            if shortest <= 0.0:
                raise fields.error(key, "an iteration would take no time; one term must be > 0")
        return
    fields.only(("kind", *TABLE_AXES, MIXED_TABLE, MIXED_CHUNK, *LONGEST))
    if MIXED_CHUNK in fields.data:
        fields.number(MIXED_CHUNK, high=MAX_PLAUSIBLE_TOKEN_S, hint=_IN_SECONDS)
    optional = {MIXED_TABLE: TABLE_AXES["decode_attention_s"]}
    optional |= dict.fromkeys(LONGEST, ("decode_sequences",))
    most = dict.fromkeys(_ATTENTION_TABLES, MAX_PLAUSIBLE_ATTENTION_S)
    most |= dict.fromkeys(LONGEST, MAX_PLAUSIBLE_TOKEN_S)
    arrays: dict[str, np.ndarray] = {}
    for key, axes in {**TABLE_AXES, **optional}.items():
        if key in optional and key not in fields.data:
            continue
        high = most.get(key, MAX_PLAUSIBLE_S if axes else LARGEST)
        shape = tuple(len(arrays[axis]) for axis in axes) if axes else None
        table = arrays[key] = fields.array(key, shape, high, _IN_SECONDS if axes else "")
        if not axes:
            check_grid(fields, key, table)
        if key == "dense_s" and table.min() <= 0.0:
            raise fields.error(key, "every entry must be > 0: no iteration takes no time")
        # Beyond the grid the last slope is extended: a falling one would reach negative times.
        for axis, name in enumerate(axes if key not in LONGEST else ()):
            if np.any(np.take(table, -1, axis) < np.take(table, -2, axis)):
                raise fields.error(key, f"falls at the end of {name}; it must not")


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
            if not isinstance(value, (str, int, float)):
                check_fit_error(fields.child(str(key)))
        return
    fields.integer("points")
    spread = [fields.number(name) for name in names[1:]]
    if spread != sorted(spread):
        raise fields.error("median", "median, p90 and max must not decrease")


def check_step_error(fields: Fields) -> None:
    """Check the error of whole steps: a bias and a standard deviation of the log, by kind."""

    def kind(fields: Fields, key: str) -> None:
        fields.child(key).check(_STEP_ERROR, {"points": Fields.integer})

    fields.check(dict.fromkeys(STEP_KINDS, kind), {"source": Fields.text})


def check_host(fields: Fields) -> None:
    """Check the host's share of an iteration and of a request."""
    optional = dict.fromkeys((*_OPTIONAL_HOST_TIMES, *API_TIMES), _SECONDS)
    fields.check(dict.fromkeys(HOST_TIMES, _SECONDS), {**optional, "source": Fields.text})
    if fields.data.get("api_request_s", 0.0) > fields.data.get("api_in_s", 0.0):
        raise fields.error("api_request_s", "is part of api_in_s and must not be above it")


def check_provenance(fields: Fields) -> None:
    """Check a provenance: source, licence, command, and a commit or a date."""
    fields.check(dict.fromkeys(("source", "licence", "command"), Fields.text), {}, more=True)
    if "commit" not in fields.data and "date" not in fields.data:
        raise fields.error("commit", "missing (a commit or a date is required)")


def check_profile(data: Any, where: str) -> dict[str, Any]:
    """A copy of a profile's decoded fields but ``format``, checked.

    ValueError names ``where``, the field, what was given and what is allowed.
    """
    top = Fields(data, where)

    def child(check: Callable[[Fields], None]) -> Check:
        return lambda fields, key: check(fields.child(key))

    seconds, experts = (dict.fromkeys(k, _SECONDS) for k in (ESTIMATOR_FIELDS, _EXPERT_FIELDS))
    limits = dict.fromkeys(DOMAIN_LIMITS, Fields.integer)
    capacity = {"kv_capacity_tokens": partial(Fields.integer, low=BLOCK_SIZE)}
    top.check(
        {
            "format": partial(Fields.text, allowed=(FORMAT,)),
            "name": Fields.text,
            "description": Fields.text,
            "kind": partial(Fields.text, allowed=KINDS),
            "device": child(lambda fields: fields.check(_DEVICE, {}, more=True)),
            "model": child(check_model),
            "engine": child(lambda fields: fields.check(_ENGINE, capacity, more=True)),
            "law": child(check_law),
            "estimator": child(lambda fields: fields.check(seconds, experts)),
            "domain": child(lambda fields: fields.check(limits, {})),
            "fit_error": child(check_fit_error),
            "provenance": child(check_provenance),
        },
        {"step_error": child(check_step_error), "host": child(check_host)},
    )
    return {key: value for key, value in copy_json(top.data).items() if key != "format"}


def kv_capacity_tokens(
    device: Mapping[str, Any], model: Mapping[str, Any], engine: Mapping[str, Any], at: str
) -> int:
    """Tokens that fit in the memory which weights and activations leave, in whole blocks of 16.

    An engine that states ``kv_capacity_tokens`` has those. ``at`` is the file and field, for the
    ValueError if no block fits.
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
