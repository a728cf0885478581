"""Profiles of one mixture-of-experts layer on one card: an expert alone, and the whole layer.

A file holds two tables in seconds by tokens:

 * ``expert``: the feed-forward network of one expert run by itself with dense kernels on the
   tokens sent to it, weights read from memory (not left in a cache by the call before).
 * ``layer``: the routed part of the layer in one fused kernel, all experts on the card.

and the two constants of the small-batch law ``base_s + active x expert_read_s``. A fused call of
some of the experts costs ``group_s(counts)``: ``base_s`` and each one's share of the layer.

Times are seconds, sizes bytes. Files are checked like those of whole models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from servegym.hardware_profiles.interpolation import interpolate
from servegym.hardware_profiles.law import headline_error, warn_outside
from servegym.hardware_profiles.load import data_path, load_named
from servegym.hardware_profiles.schema import (
    KINDS,
    MAX_PLAUSIBLE_S,
    Fields,
    check_domain,
    check_fit_error,
    check_grid,
    check_provenance,
    copy_json,
    read_json,
    write_json,
)

FORMAT = "servegym-moe-layer/1"
_PREFIX = "moe-"
_TABLES = (("expert_tokens", "expert_s"), ("layer_tokens", "layer_s"))


@dataclass(frozen=True, eq=False)
class MoeLayer:
    """One mixture-of-experts layer on one card.

    Make one with :func:`load_moe` or :meth:`from_dict`; both check every field.

    Attributes:
        name: the profile's name, ``CARD-MODEL``; its file is ``moe-NAME.json``.
        kind: ``"measured"``, ``"fitted"`` or ``"derived"``.
        device: device facts (``memory_bytes``, ...).
        model: layer facts (``hidden_size``, ``expert_intermediate_size``, ``experts``, ``top_k``,
            ``shared_experts``, ``layers``, ``expert_bytes``, ...).
        engine: name, version and dtype behind the times.
        expert_tokens: ``(G1,)`` tokens sent to one expert.
        expert_times_s: ``(G1,)`` seconds of that expert alone.
        layer_tokens: ``(G2,)`` tokens that enter the layer.
        layer_times_s: ``(G2,)`` seconds of the routed layer.
        base_s: seconds of a fused call before any expert's weights are read.
        expert_read_s: seconds by which one more active expert lengthens a small call.
        domain: largest numbers of tokens that the data behind the tables cover.
        fit_error: relative errors.
        provenance: source, licence, commit or date, command, notes.
        description: one line for people.
    """

    name: str
    kind: str
    device: dict[str, Any]
    model: dict[str, Any]
    engine: dict[str, Any]
    expert_tokens: np.ndarray
    expert_times_s: np.ndarray
    layer_tokens: np.ndarray
    layer_times_s: np.ndarray
    base_s: float
    expert_read_s: float
    domain: dict[str, Any]
    fit_error: dict[str, Any]
    provenance: dict[str, Any]
    description: str = ""
    _data: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "<moe layer>") -> MoeLayer:
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
        """Return the JSON object it was made from."""
        return copy_json(self._data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile's JSON file in one move.

        Args:
            path: the file to write.
        """
        write_json(self.to_dict(), path)

    def expert_s(self, tokens: float) -> float:
        """Seconds of one expert alone on ``tokens`` tokens; 0 for none."""
        if tokens <= 0:
            return 0.0
        return interpolate(self.expert_tokens, self.expert_times_s, tokens)

    def layer_s(self, tokens: float) -> float:
        """Seconds of the whole routed layer for ``tokens`` tokens; 0 for none."""
        if tokens <= 0:
            return 0.0
        return interpolate(self.layer_tokens, self.layer_times_s, tokens)

    def share_s(self, tokens: float) -> float:
        """Seconds that an active expert with ``tokens`` tokens adds to a fused call.

        Its part of the whole layer at the size that gives every expert as many tokens:
        ``(layer_s(tokens x experts / top_k) - base_s) / experts``, and never less than reading
        its weights takes.
        """
        if tokens <= 0:
            return 0.0
        experts = self.model["experts"]
        whole = self.layer_s(max(tokens, 1.0) * experts / self.model["top_k"])
        return max((whole - self.base_s) / experts, self.expert_read_s)

    def group_s(self, counts: Iterable[float]) -> float:
        """Seconds of one fused call of several experts; 0 for none.

        Args:
            counts: tokens of each expert on the card.

        Returns:
            ``base_s`` plus every active expert's share (:meth:`share_s`).
        """
        busy = [self.share_s(count) for count in counts if count > 0]
        return self.base_s + sum(busy) if busy else 0.0

    def headline_error(self) -> tuple[str, dict[str, Any]] | None:
        """The error to show with the layer's name, see :func:`law.headline_error`."""
        return headline_error(self.fit_error)

    def check_domain(self, expert_tokens: int = 0, layer_tokens: int = 0) -> bool:
        """Warn, once per profile, when a setting leaves the range the tables were built on.

        Args:
            expert_tokens: the most tokens sent to one expert.
            layer_tokens: the most tokens that enter the layer.

        Returns:
            Whether the setting is inside the domain.
        """
        return warn_outside(
            f"{_PREFIX}{self.name}",
            (
                ("expert_tokens", expert_tokens, self.domain["max_expert_tokens"]),
                ("layer_tokens", layer_tokens, self.domain["max_layer_tokens"]),
            ),
        )


def _check_model(fields: Fields) -> dict[str, Any]:
    whole = (
        "layers",
        "hidden_size",
        "expert_intermediate_size",
        "experts",
        "top_k",
        "bytes_per_value",
        "expert_bytes",
    )
    fields.only(("name", *whole, "shared_experts"))
    fields.text("name")
    value = {key: fields.integer(key) for key in whole}
    fields.integer("shared_experts", low=0)
    if value["top_k"] > value["experts"]:
        raise fields.error("top_k", f"got {value['top_k']}; must be <= {value['experts']} experts")
    expected = (
        3 * value["hidden_size"] * value["expert_intermediate_size"] * value["bytes_per_value"]
    )
    if value["expert_bytes"] != expected:
        raise fields.error(
            "expert_bytes",
            f"got {value['expert_bytes']}; must be 3 x hidden_size x expert_intermediate_size x "
            f"bytes_per_value = {expected}",
        )
    return copy_json(fields.data)


def _build(data: Any, where: str) -> MoeLayer:
    top = Fields(data, where)
    keys = ("format", "name", "description", "kind", "device", "model", "engine", "law")
    top.only((*keys, "domain", "fit_error", "provenance"))
    top.text("format", (FORMAT,))
    name, description, kind = top.text("name"), top.text("description"), top.text("kind", KINDS)
    device = top.child("device")
    device.text("name")
    device.number("memory_bytes", 1e8, 1e13, hint=" (bytes)")
    model = _check_model(top.child("model"))
    engine = top.child("engine")
    for key in ("name", "version", "dtype"):
        engine.text(key)

    hint = " seconds (are the times in milliseconds or microseconds?)"
    law = top.child("law")
    law.only(("base_s", "expert_read_s", *(key for pair in _TABLES for key in pair)))
    base = law.number("base_s", high=1.0, hint=hint)
    read = law.number("expert_read_s", high=1.0, hint=hint, strict=True)
    arrays: dict[str, np.ndarray] = {}
    for grid, times in _TABLES:
        arrays[grid] = law.array(grid, None, math.inf, "")
        check_grid(law, grid, arrays[grid])
        arrays[times] = law.array(times, (len(arrays[grid]),), MAX_PLAUSIBLE_S, hint)
        if arrays[times].min() <= 0.0:
            raise law.error(times, "every entry must be > 0: no call takes no time")
        if arrays[times][-1] < arrays[times][-2]:
            raise law.error(times, f"falls at the end of {grid}; it must not")
    for array in arrays.values():
        array.setflags(write=False)
    # All weights of an expert are read at least once: at 30 TB/s sooner than any memory gives.
    fastest = model["expert_bytes"] / 3e13
    if arrays["expert_s"][0] < fastest:
        raise law.error(
            "expert_s[0]",
            f"got {arrays['expert_s'][0]:g}; reading an expert takes at least {fastest:.2g} s "
            "(are the times in another unit?)",
        )

    domain = check_domain(top.child("domain"), ("max_expert_tokens", "max_layer_tokens"))
    check_fit_error(top.child("fit_error"))
    return MoeLayer(
        name=name,
        kind=kind,
        device=copy_json(device.data),
        model=model,
        engine=copy_json(engine.data),
        expert_tokens=arrays["expert_tokens"],
        expert_times_s=arrays["expert_s"],
        layer_tokens=arrays["layer_tokens"],
        layer_times_s=arrays["layer_s"],
        base_s=base,
        expert_read_s=read,
        domain=domain,
        fit_error=copy_json(top.child("fit_error").data),
        provenance=check_provenance(top.child("provenance")),
        description=description,
        _data=copy_json(dict(data)),
    )


def list_moe_layers() -> list[str]:
    """Names of the layer profiles that ship with the package, sorted."""
    return sorted(file.stem.removeprefix(_PREFIX) for file in data_path("").glob("moe-*.json"))


def load_moe(name_or_path: str | os.PathLike[str]) -> MoeLayer:
    """A layer profile by a name of `list_moe_layers`, or of a JSON file; see `load.load`."""
    return load_named(name_or_path, "moe layer", list_moe_layers(), _PREFIX, _read)


def _read(file: Path) -> MoeLayer:
    return MoeLayer.from_dict(read_json(file), file.name)
