"""Clusters of edge servers: GPUs, memory, links and the speed of one mixture-of-experts model.

``build_cluster`` checks its arguments and turns them into the arrays that the simulator reads;
``scenario`` gives the arguments of a registered scenario by name. Units are seconds, bytes and
bits per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from servegym._checks import choose, real, whole
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments

LINK_MODELS = ("nic", "pairwise")
MESSAGES = ("per_expert", "per_server")
ACTIVATION_VALUE_BYTES = 2


@dataclass(frozen=True)
class ModelTimes:
    """What the simulator needs to know of a model: sizes and the times of its layers on one GPU.

    Attributes:
        layers: mixture-of-experts layers L (dense blocks have no experts to place).
        experts: routed experts a layer, E.
        top_k: routed experts a token.
        hidden: width of the activations that travel.
        expert_bytes: one routed expert.
        reserved_bytes: one copy of all other weights, on the first GPU of every server.
        memory_fraction: share of a GPU's memory for weights.
        expert_base_s, expert_token_s: time of one expert call is base + token * tokens.
        dense_base_s, dense_token_s: the same for the rest of a layer (attention, router, shared
            experts).
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_bytes: int
    reserved_bytes: float
    memory_fraction: float
    expert_base_s: float
    expert_token_s: float
    dense_base_s: float
    dense_token_s: float


# In the order of `ModelTimes`, but for the rest of a layer, which takes the same in all of them.
_MODELS = {
    # Derived from a measured Qwen3 expert table by weight size.
    "deepseek-v2-lite": (26, 64, 6, 2048, 17_301_504, 2.6e9, 0.30, 14e-6, 0.18e-6),
    # Fitted on A100.
    "mixtral-8x7b": (32, 8, 2, 4096, 352_321_536, 3.2e9, 0.70, 0.29e-3, 3.2e-6),
    # Derived from deepseek-v2-lite by expert size. Experts in MXFP4 (4.25 bits a value); the time
    # per token grows with the arithmetic.
    "gpt-oss-20b": (24, 32, 4, 2880, 13_219_200, 3.6e9, 0.15, 14e-6, 0.52e-6),
}
MODELS = {name: ModelTimes(*row, 0.25e-3, 1.5e-6) for name, row in _MODELS.items()}

_MBPS = 1e6
_PAPER: dict[str, Any] = {
    "gpus": (1, 1, 2),
    "nic_bps": 500 * _MBPS,
    "latency_s": 0.5e-3,
    "messages": "per_expert",
    "message_cost_s": 1.5e-3,
    "output_tokens": 5,
    "mean_interarrival_s": 10.0,
    # Recorded stand-ins by length: abstract narrative, arithmetic, ASCII words of BIG-bench.
    "tasks": {"deepseek-v2-lite": ("law", "intent", "translation")},
}
# The same for MMLU-Pro, WikiText and code problems, whose prompts are longer.
_MULTI_TASKS = {"deepseek-v2-lite": ("translation", "law", "summary")}
_EDGE: dict[str, Any] = {
    "gpus": (1, 1, 2),
    "nic_bps": (500 * _MBPS, 500 * _MBPS, 100 * _MBPS),
    "latency_s": ((0.0, 0.002, 0.010), (0.002, 0.0, 0.010), (0.010, 0.010, 0.0)),
    "messages": "per_server",
    "message_cost_s": 0.2e-3,
    "output_tokens": 20,
    "mean_interarrival_s": 10.0,
}
_SCENARIOS: dict[str, dict[str, Any]] = {
    "edge_hetero": _EDGE,
    "edge_decode": _EDGE | {"nic_bps": 500 * _MBPS, "latency_s": 0.002},
    "paper_testbed": _PAPER,
    "paper_testbed_multi": _PAPER
    | {"output_tokens": 20, "mean_interarrival_s": 20.0, "tasks": _MULTI_TASKS},
    "drift": _EDGE | {"rotate_s": 900.0, "migration_source": "network"},
}
# Arguments that describe the load of a scenario, not its cluster; ``tasks`` by model.
LOAD_DEFAULTS: dict[str, Any] = {
    "output_tokens": 20,
    "mean_interarrival_s": 10.0,
    "tasks": {},
    "rotate_s": 0.0,
    "migration_source": "host",
}
SCALES = (4, 8, 16, 32, 64, 128, 256)


def list_scenarios() -> list[str]:
    """Names of the registered scenarios."""
    return [*_SCENARIOS, *(f"scale_{count}" for count in SCALES)]


def scenario(name: str) -> dict[str, Any]:
    """Arguments of a registered scenario, of the cluster and of its load.

    ``scale_N`` repeats the 1, 1, 2 pattern of GPUs up to N GPUs at a fixed rate per server.

    Raises:
        ValueError: the name is unknown; the message names the nearest.
    """
    name = choose("scenario", name, list_scenarios())
    if name in _SCENARIOS:
        return dict(_SCENARIOS[name])
    left = int(name.removeprefix("scale_"))
    gpus = (1, 1, 2) * (left // 4)
    return _PAPER | {"gpus": gpus, "mean_interarrival_s": 8.0}


@dataclass(frozen=True, eq=False)
class Cluster:
    """N servers with GPUs and links, and the times and sizes of one model on them.

    Attributes:
        model: name of the model.
        gpus: GPUs of each server.
        slots: int64 ``(G,)`` experts that each GPU can hold (cap_{n,g}).
        gpu_server: int64 ``(G,)`` server of each GPU, non-decreasing.
        expert_base_s, expert_token_s: ``(G,)`` seconds: a call with x tokens takes base + token x.
        dense_base_s, dense_token_s: ``(N,)`` the same for the rest of a layer on the first GPU of
            the home server.
        activation_bytes: bytes of one token on a link, B.
        expert_bytes: bytes of one expert.
        layers, experts, top_k: L, E, k.

    The others are arguments of `build_cluster`: ``nic_bps`` ``(N,)``, ``latency_s`` ``(N, N)``, the
    rest as given.
    """

    model: str
    gpus: tuple[int, ...]
    slots: np.ndarray
    gpu_server: np.ndarray
    nic_bps: np.ndarray
    latency_s: np.ndarray
    link_model: str
    messages: str
    message_cost_s: float
    pcie_bytes_s: float
    pcie_latency_s: float
    expert_base_s: np.ndarray
    expert_token_s: np.ndarray
    dense_base_s: np.ndarray
    dense_token_s: np.ndarray
    activation_bytes: int
    expert_bytes: int
    layers: int
    experts: int
    top_k: int

    @property
    def num_servers(self) -> int:
        """N."""
        return len(self.gpus)

    @property
    def num_gpus(self) -> int:
        """G, over all servers."""
        return len(self.slots)

    @property
    def cap(self) -> np.ndarray:
        """int64 ``(N,)``: slots of each server, the sum over its GPUs."""
        return np.bincount(self.gpu_server, self.slots, self.num_servers).astype(np.int64)

    @property
    def home_gpu(self) -> np.ndarray:
        """int64 ``(N,)``: first GPU of each server, which runs all but the routed experts."""
        return np.concatenate([[0], np.cumsum(self.gpus)[:-1]]).astype(np.int64)

    @property
    def link_bytes_s(self) -> np.ndarray:
        """``(N, N)`` bytes/s of a message: an interface is shaped where it sends."""
        return np.repeat(self.nic_bps[:, None] / 8.0, self.num_servers, axis=1)

    def server_view(self, placement: np.ndarray) -> np.ndarray:
        """Bool ``(N, L, E)``: experts on any GPU of a server, of a placement ``(G, L, E)``."""
        view = np.zeros((self.num_servers, *np.shape(placement)[1:]), dtype=bool)
        np.logical_or.at(view, self.gpu_server, np.asarray(placement, dtype=bool))
        return view

    def check_placement(self, placement: Any, covered: bool = True) -> np.ndarray:
        """Return ``placement`` as uint8 ``(G, L, E)`` if it is feasible.

        If ``covered``, every expert must be on some GPU.
        """
        z = np.asarray(placement)
        shape = (self.num_gpus, self.layers, self.experts)
        if z.shape != shape or z.dtype.kind not in "biu":
            raise ValueError(
                f"placement must be an integer or boolean array of shape {shape} "
                f"(GPUs, layers, experts), got {z.shape} of {z.dtype}."
            )
        if z.min() < 0 or z.max() > 1:
            raise ValueError("placement must hold 0 and 1 only.")
        used = z.sum(axis=(1, 2), dtype=np.int64)
        full = np.flatnonzero(used > self.slots)
        if len(full):
            g = int(full[0])
            raise ValueError(
                f"placement: GPU {g} would hold {used[g]} experts, it has {self.slots[g]} slots."
            )
        missing = np.argwhere(~z.any(axis=0))
        if covered and len(missing):
            layer, expert = missing[0].tolist()
            raise ValueError(
                f"placement: {len(missing)} experts are on no GPU, the first is expert {expert} "
                f"of layer {layer}."
            )
        return z.astype(np.uint8)


def _per(argument: str, value: Any, shape: tuple[int, ...], low: float, open_low: bool):
    """``value``, a number or an array, as finite float64 of ``shape``."""
    try:
        array = np.array(value)
        if array.dtype.kind not in "iuf":
            raise ValueError
        array = array.astype(np.float64)
    except ValueError:  # text, nested lists of several lengths
        array = np.array(np.nan)
    if array.shape == ():
        array = np.full(shape, real(argument, value, low, open_low=open_low))
    if array.shape != shape:
        raise ValueError(f"{argument} has shape {array.shape}; give one number or shape {shape}.")
    bad = ~np.isfinite(array) | (array < low) | (open_low & (array == low))
    if len(shape) == 2:
        np.fill_diagonal(bad, False)
    if bad.any():
        at = tuple(np.argwhere(bad)[0].tolist())
        limit = f"above {low:g}" if open_low else f"at least {low:g}"
        raise ValueError(f"{argument}{list(at)}={array[at]:g} must be a finite number {limit}.")
    return array


def _model_times(model: str, sizes: ModelTimes | None) -> ModelTimes:
    """The sizes and times given, else those listed for the model."""
    if not isinstance(sizes, (ModelTimes, type(None))):
        raise ValueError(f"sizes={sizes!r} must be ModelTimes or None.")
    return sizes if sizes is not None else MODELS[choose("model", model, MODELS)]


def _gpu_counts(name: str, value: Any) -> tuple[int, ...]:
    """GPUs of each server."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name}={value!r} must list the GPUs of each server, as (1, 1, 2).")
    return tuple(whole(f"{name}[{n}]", g, 1, 64) for n, g in enumerate(value))


def _slots_in_memory(times: ModelTimes, model: str, memory: np.ndarray) -> np.ndarray:
    """Experts that fit into the bytes ``(G,)`` of each GPU that are free for them."""
    short = np.flatnonzero(memory < 0)
    if len(short):
        g = int(short[0])
        raise ValueError(
            f"GPU {g} misses {math.ceil(-memory[g])} bytes for the non-expert weights "
            f"({times.reserved_bytes:.0f} bytes) of {model!r}: raise gpu_bytes or "
            "memory_fraction."
        )
    most = times.layers * times.experts
    return np.minimum(np.floor(memory / times.expert_bytes), most).astype(np.int64)


def _slots_given(times: ModelTimes, slots: Any, counts: tuple[int, ...]) -> np.ndarray:
    """The listed experts of each GPU, at most all of the model."""
    if not isinstance(slots, (list, tuple, np.ndarray)):
        raise ValueError(f"slots={slots!r} must list the experts that each GPU can hold.")
    if len(slots) != sum(counts):
        raise ValueError(f"slots lists {len(slots)} GPUs, gpus={counts} has {sum(counts)}.")
    listed = np.array([whole(f"slots[{g}]", s, 0) for g, s in enumerate(slots)], dtype=np.int64)
    return np.minimum(listed, times.layers * times.experts)


def _check_experts_fit(
    times: ModelTimes, model: str, slots: np.ndarray, gpu_server: np.ndarray
) -> None:
    """Check that there is a slot for each expert; a second copy on one server is of no use."""
    need = times.layers * times.experts
    places = int(np.minimum(np.bincount(gpu_server, slots), need).sum())
    if places < need:
        raise ValueError(
            f"the {need} experts of {model!r} do not fit: the GPUs have room for {places}, "
            f"{(need - places) * times.expert_bytes} bytes are missing. Raise gpu_bytes, "
            "memory_fraction or gpus."
        )


@dataclass(frozen=True, kw_only=True)
class ClusterArguments(Arguments):
    """The arguments of a cluster of G GPUs in N servers."""

    gpus: tuple[int, ...] = arg.other((1, 1, 2), "GPUs of each server", _gpu_counts)
    gpu_bytes: Any = arg.other(40e9, "memory of a GPU, one number or one for each")
    # The first GPU of a server also holds one copy of the non-expert weights.
    memory_fraction: float | None = arg.number(
        None, 0.0, "share of it for weights; the model's", high=1.0, open_low=True
    )
    slots: Any = arg.other(None, "experts that each GPU can hold, instead of counting bytes")
    nic_bps: Any = arg.other(500e6, "bits/s that a server sends, one number or one for each")
    latency_s: Any = arg.other(0.002, "of a message, one number for all pairs or (N, N)")
    link_model: str = arg.choice("nic", LINK_MODELS, "what is shared: interfaces, or nothing")
    messages: str = arg.choice("per_expert", MESSAGES, "what travels together")
    message_cost_s: float = arg.number(0.2e-3, 0.0, "fixed sending time of a message, h")
    pcie_bytes_s: float = arg.number(12e9, 0.0, "between host and GPU", open_low=True)
    pcie_latency_s: float = arg.number(20e-6, 0.0, "fixed delay of staging activations")
    gpu_speed: Any = arg.other(1.0, "factor on the GPUs' speed, one number or one for each")
    sizes: ModelTimes | None = arg.other(None, "of the model, instead of those listed for it")


def build_cluster(model: str = "deepseek-v2-lite", **chosen: Any) -> Cluster:
    """Check the arguments of a cluster and build it.

    Args:
        model: ``deepseek-v2-lite``, ``mixtral-8x7b`` or ``gpt-oss-20b``.
        **chosen: As `ClusterArguments` has them.

    Raises:
        ValueError: an argument is bad, or the experts do not fit in the memory.
    """
    arguments = ClusterArguments.fill(chosen)
    times = _model_times(model, arguments.sizes)
    counts = arguments.gpus
    servers, total = len(counts), sum(counts)
    gpu_server = np.repeat(np.arange(servers), counts).astype(np.int64)
    home_gpu = np.concatenate([[0], np.cumsum(counts)[:-1]])

    fraction = arguments.memory_fraction or times.memory_fraction
    memory = _per("gpu_bytes", arguments.gpu_bytes, (total,), 0.0, True) * fraction
    memory[home_gpu] -= times.reserved_bytes
    if arguments.slots is None:
        capacity = _slots_in_memory(times, model, memory)
    else:
        capacity = _slots_given(times, arguments.slots, counts)
    _check_experts_fit(times, model, capacity, gpu_server)

    nic = _per("nic_bps", arguments.nic_bps, (servers,), 0.0, True)
    delay = _per("latency_s", arguments.latency_s, (servers, servers), 0.0, False)
    np.fill_diagonal(delay, 0.0)
    speed = _per("gpu_speed", arguments.gpu_speed, (total,), 0.0, True)
    return Cluster(
        model=model,
        gpus=counts,
        slots=capacity,
        gpu_server=gpu_server,
        nic_bps=nic,
        latency_s=delay,
        link_model=arguments.link_model,
        messages=arguments.messages,
        message_cost_s=arguments.message_cost_s,
        pcie_bytes_s=arguments.pcie_bytes_s,
        pcie_latency_s=arguments.pcie_latency_s,
        expert_base_s=times.expert_base_s / speed,
        expert_token_s=times.expert_token_s / speed,
        dense_base_s=times.dense_base_s / speed[home_gpu],
        dense_token_s=times.dense_token_s / speed[home_gpu],
        activation_bytes=times.hidden * ACTIVATION_VALUE_BYTES,
        expert_bytes=times.expert_bytes,
        layers=times.layers,
        experts=times.experts,
        top_k=times.top_k,
    )


def scenario_cluster(name: str, model: str = "deepseek-v2-lite", **changes: Any) -> Cluster:
    """The cluster of a scenario, with some of its arguments changed."""
    arguments = {k: v for k, v in scenario(name).items() if k not in LOAD_DEFAULTS}
    return build_cluster(model, **(arguments | changes))
