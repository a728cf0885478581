"""Times of one mixture-of-experts layer on one card, from the files that ship.

``moe-CARD-MODEL.json`` holds seconds by tokens of the routed part in one fused kernel, all experts
on the card, and the small-batch law ``base_s + active x expert_read_s``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from servegym._files import read_json
from servegym.hardware_profiles.load import data_path, unknown_name

_PREFIX = "moe-"


@dataclass(frozen=True, eq=False)
class MoeLayer:
    """One mixture-of-experts layer on one card, see :func:`load_moe`.

    Attributes:
        name: ``CARD-MODEL``.
        kind: ``"measured"``, ``"fitted"`` or ``"derived"``.
        device: device facts (``name``, ``memory_bandwidth_bytes_per_s``, ...).
        model: layer facts (``experts``, ``top_k``, ``expert_bytes``, ...).
        layer_tokens: ``(G,)`` tokens that enter the layer.
        layer_times_s: ``(G,)`` seconds of the routed layer.
        base_s: seconds of a fused call before any expert's weights are read.
        expert_read_s: seconds by which one more active expert lengthens a small call.
        fit_error: relative errors.
    """

    name: str
    kind: str
    device: dict[str, Any]
    model: dict[str, Any]
    layer_tokens: np.ndarray
    layer_times_s: np.ndarray
    base_s: float
    expert_read_s: float
    fit_error: dict[str, Any]


def list_moe_layers() -> list[str]:
    """Names of the layers that ship with the package, sorted."""
    return sorted(file.stem.removeprefix(_PREFIX) for file in data_path("").glob("moe-*.json"))


@functools.cache
def load_moe(name: str) -> MoeLayer:
    """A layer by a name of :func:`list_moe_layers`.

    Raises:
        ValueError: for an unknown name, with the nearest valid one.
    """
    if name not in list_moe_layers():
        raise ValueError(unknown_name("moe layer", name, list_moe_layers()))
    data = read_json(data_path(f"{_PREFIX}{name}.json"))
    law = data["law"]
    tokens, seconds = (np.array(law[key], float) for key in ("layer_tokens", "layer_s"))
    for array in (tokens, seconds):
        array.setflags(write=False)
    facts = {key: data[key] for key in ("name", "kind", "device", "model", "fit_error")}
    constants = {key: law[key] for key in ("base_s", "expert_read_s")}
    return MoeLayer(layer_tokens=tokens, layer_times_s=seconds, **facts, **constants)
