"""The arguments of the serverless MoE environments, and of the system behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from servegym._checks import choose, real, whole
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments
from servegym.hardware_profiles import serverless

DEFAULT_MODEL = "deepseek-v2-lite"
DEPLOYMENTS = ("plan", "cpu", "gpu", "fetch", "per_expert")
"""How requests are served: as the action plans, or by a deployment that takes no decision."""
GRANULARITIES = ("global", "per_layer")
MAX_PROMPT_TOKENS = 1024
MAX_TOKENS = 100_000
Pairs = tuple[tuple[float, float], ...]

PRESETS: dict[str, dict[str, Any]] = {
    "seed": {
        "prompt_tokens": 115,
        "output_tokens": 200,
        "output_error": 0.0,
        "idle_s": ((1.0, 20.0),),
        "keep_alive_s": 0.0,
        "bill_cold_start": False,
        "slo": ((14.0, 0.12),),
        "trem_s": (0.3e-3,),
        "trem_switch": 0.0,
        "trem_sigma": 0.0,
    },
    "dynamic": {
        "prompt_tokens": "azure",
        "output_tokens": "azure",
        "output_error": 0.3,
        "idle_s": ((0.7, 20.0), (0.3, 1500.0)),
        "keep_alive_s": 300.0,
        "bill_cold_start": True,
        "slo": ((8.0, 0.06), (8.0, 0.12), (14.0, 0.05), (14.0, 0.08)),
        "trem_s": (0.2e-3, 1.0e-3),
        "trem_switch": 0.1,
        "trem_sigma": 0.25,
    },
}
"""What the two presets set; every entry is an argument of its own, too. The limits of ``dynamic``
are those of the default model; `slo_classes` has the other models'."""


def _tokens(name: str, value: Any) -> int | str:
    if isinstance(value, str):
        return choose(name, value, ("azure",))
    return whole(name, value, 1, MAX_TOKENS)


def _pairs(name: str, value: Any) -> Pairs:
    ok = isinstance(value, (list, tuple)) and len(value) > 0
    if not ok or any(not isinstance(x, (list, tuple)) or len(x) != 2 for x in value):
        raise ValueError(f"{name}={value!r} must be a list of pairs.")
    first, second = ([real(name, x[k], 0.0, open_low=True) for x in value] for k in (0, 1))
    return tuple(zip(first, second, strict=True))


def _idle_classes(name: str, value: Any) -> Pairs:
    classes = _pairs(name, value)
    if abs(sum(p for p, _ in classes) - 1.0) > 1e-6:
        raise ValueError(f"{name}={value!r}: the probabilities must sum to 1.")
    return classes


def _overheads(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name}={value!r} must be a list of seconds, one a regime.")
    return tuple(real(name, x, 0.0, open_low=True) for x in value)


def _steps(high: float, each: Callable[..., Any] = real) -> Callable[[str, Any], Any]:
    """Check of increasing numbers up to ``high`` that begin with 0."""

    def check(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= 64:
            raise ValueError(f"{name}={value!r} must be a list of 1 to 64 numbers.")
        values = tuple(each(name, x, 0, high) for x in value)
        if values[0] != 0 or any(b <= a for a, b in zip(values, values[1:], strict=False)):
            raise ValueError(f"{name}={value!r} must be increasing numbers that begin with 0.")
        return values

    return check


@dataclass(frozen=True, kw_only=True)
class SystemArguments(Arguments):
    """The constants of `build_system`."""

    gpu: str = arg.choice("eager", serverless.GPUS, "the first two chosen, the cards by their laws")
    container_start_s: float = arg.number(
        serverless.CONTAINER_START_S, 0.0, "start of a container, s"
    )
    load_mb_s: float = arg.number(serverless.LOAD_MB_S, 0.0, "loading of weights", open_low=True)
    z_max: int = arg.whole(serverless.Z_MAX, 1, "most replicas of a remote function", high=64)
    main_specs_mb: Any = arg.other(None, "memory sold, (low, high, step); the model's own")
    remote_specs_mb: Any = arg.other(None, "likewise of remote functions")
    bandwidth_mb_s: float = arg.number(
        serverless.BANDWIDTH_MB_S, 0.0, "between functions", open_low=True
    )
    payload_mb: float = arg.number(serverless.PAYLOAD_MB, 0.0, "of a call at most", open_low=True)
    price_ratio: float = arg.number(serverless.PRICE_RATIO, 0.0, "c_g / c_c", open_low=True)
    price_cpu_usd_mb_s: float = arg.number(serverless.PRICE_CPU_USD_MB_S, 0.0, "c_c", open_low=True)
    fees: Any = arg.other(
        "none", "or `aws_lambda`, `alibaba_fc`, or (USD a call, billing step in s)"
    )


@dataclass(frozen=True, kw_only=True)
class ServerlessArguments(SystemArguments):
    """The arguments of `ServerlessMoEEnv` and of the id beside it; None: the preset's."""

    headings = dict(
        gpu="engine",
        bandwidth_mb_s="network",
        price_ratio="prices",
        model="workload",
        deployment="serving",
        trem_s="overhead",
        predictor="observation",
        granularity="action",
        penalty="reward",
    )
    model: str = arg.other(DEFAULT_MODEL, "see below")
    activations: Any = arg.other(None, "an `Activations` object in place of the model's own")
    preset: str = arg.choice("dynamic", PRESETS, "what stands for arguments that are none")
    split: str = arg.choice("train", ("train", "val", "eval", "all"), "prompts")
    episode_requests: int = arg.whole(200, 1, "requests of an episode", high=1_000_000)
    prompt_tokens: int | str = arg.other(None, 'a number or `"azure"`', _tokens)
    output_tokens: int | str = arg.other(None, "likewise", _tokens)
    max_prompt_tokens: int = arg.whole(MAX_PROMPT_TOKENS, 1, "cap of the law", high=MAX_TOKENS)
    max_output_tokens: int = arg.whole(400, 1, "likewise", high=MAX_TOKENS)
    idle_s: Pairs = arg.other(None, "(probability, mean s) of idle gaps", _idle_classes)
    slo: Pairs | None = arg.other(None, "(TTFT s, TPOT s), one drawn a request", _pairs)
    deployment: str = arg.choice("plan", DEPLOYMENTS, "all but `plan` take no decision")
    decode_invocation: str = arg.choice("per_call", ("per_call", "per_layer"), "Eq. 5, or a layer")
    keep_alive_s: float = arg.number(None, 0.0, "time that an unused function stays warm")
    bill_cold_start: bool = arg.switch(None, "whether starts are billed")
    load_shared: bool = arg.switch(False, "whether starts share a link")
    trem_s: tuple[float, ...] = arg.other(None, "median t_rem of each regime, s", _overheads)
    trem_switch: float = arg.number(None, 0.0, "probability of leaving a regime", high=1.0)
    trem_sigma: float = arg.number(None, 0.0, "sigma of the log of a draw", high=10.0)
    predictor: Any = arg.other(
        "task_mean", "or `global_mean`, `nearest`, a table (P, L, K), what gives one"
    )
    output_error: float = arg.number(None, 0.0, "sigma of the log error of the length", high=10.0)
    granularity: str = arg.choice("global", GRANULARITIES, "see Action Space")
    keep_action: bool = arg.switch(False, "see Action Space", box=True)
    levels: int | None = arg.whole(None, 2, "values of b, at most K + 1; min(K, 16) + 1")
    w_headroom_mb: tuple[float, ...] = arg.other(
        (0, 500, 1000, 2000, 4000, 8000), "from 0 up", _steps(1e7)
    )
    y_headroom_mb: tuple[float, ...] = arg.other(
        (0, 200, 400, 800, 1200, 1600, 2400), "from 0 up", _steps(1e7)
    )
    z_headroom: tuple[int, ...] = arg.other((0, 1, 2, 3, 5, 7), "from 0 up", _steps(64, whole))
    penalty: float = arg.number(0.5, 0.0, "price of a violated SLO in MIX costs", high=1e6)

    def defaults(self) -> Mapping[str, Any]:
        """The preset's values; its limits are the model's, which `slo_classes` has."""
        preset = PRESETS[choose("preset", self.preset, PRESETS)]
        hidden = ("slo",) if self.preset == "dynamic" else ()
        return {**super().defaults(), **{n: x for n, x in preset.items() if n not in hidden}}
