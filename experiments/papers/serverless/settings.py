"""Table I: settings and constants of the serverless experiments, each with its origin.

``python -m servegym.experiments.papers.serverless.settings`` writes the table. *measured*: by this
project or by those it cites; *derived*: computed from measured or published numbers; *published*:
by the paper, a price list or a model's configuration; *chosen*: an assumption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from servegym._command_line import run_main
from servegym.envs.serverless_moe import equations as eq
from servegym.envs.serverless_moe.config import (
    NEIGHBOURS,
    PRESETS,
    build_system,
    slo_classes,
)
from servegym.envs.workloads.activations import MoeModel, load_activations, load_model
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.serverless.billing import MODELS, N_IN, PROMPTS
from servegym.experiments.papers.serverless.predictors import LARGE_DATA
from servegym.experiments.papers.study import Options, Study, command
from servegym.hardware_profiles.serverless import FEES, GPUS, ORIGINS

__all__ = ["STUDIES", "main", "settings"]

TABULATED = (*MODELS, "gpt2-moe")


class Entry(NamedTuple):
    """A constant of every model.

    Attributes:
        group: What it belongs to.
        symbol: As in the equations.
        name: In words.
        unit: Its unit.
        value: Name of the system's attribute, or (system, model) -> its value.
        origin: A key of the system's provenance, or ``kind: source``; the attribute's by default.
        scale: Factor on an attribute.
    """

    group: str
    symbol: str
    name: str
    unit: str
    value: str | Callable[[eq.SystemModel, MoeModel], Any]
    origin: str = ""
    scale: float | None = None

    def of(self, system: eq.SystemModel, model: MoeModel) -> Any:
        """The value for a model."""
        if not isinstance(self.value, str):
            return self.value(system, model)
        value = getattr(system, self.value)
        return value if self.scale is None else self.scale * value


SIZE = "derived: from the published configuration of the model"
CONFIGURED = "published: configuration of the model"
ENTRIES = (
    Entry("model", "L", "transformer blocks", "1", "layers", CONFIGURED),
    Entry("model", "", "blocks with routed experts", "1", "moe_layers", CONFIGURED),
    Entry("model", "K", "routed experts of a layer", "1", "num_experts", CONFIGURED),
    Entry("model", "Ntopk", "routed experts a token", "1", "top_k", CONFIGURED),
    Entry("model", "", "shared experts", "1", lambda s, m: m.shared_experts, CONFIGURED),
    Entry("model", "mu(e)", "one routed expert", "MB", lambda s, m: float(s.expert_mb[0]), SIZE),
    Entry("model", "sum mu(f)", "non-expert modules, on the GPU", "MB", "all_non_expert_mb", SIZE),
    Entry(
        "model",
        "",
        "embeddings and head (not in Eq. 7: not billed)",
        "MB",
        lambda s, m: m.embedding_mb,
        SIZE,
    ),
    Entry(
        "model",
        "a_l",
        "KV cache of a token in a layer",
        "B",
        lambda s, m: m.kv_bytes_per_token_layer,
        SIZE,
    ),
    Entry("model", "D", "token vector", "B", lambda s, m: m.token_bytes, SIZE),
    Entry(
        "memory",
        "m_1..m_V",
        "main function: lowest, highest, step",
        "MB",
        lambda s, m: _grid(s.main_specs_mb),
        "main_specs_mb",
    ),
    Entry(
        "memory",
        "m_1..m_Ve",
        "remote functions: lowest, highest, step",
        "MB",
        lambda s, m: _grid(s.remote_specs_mb),
        "remote_specs_mb",
    ),
    Entry("latency", "theta1", "expert on CPU", "ms", "expert_theta1_s", scale=1e3),
    Entry("latency", "theta2", "expert on CPU", "1/GB", "expert_theta2_per_gb"),
    Entry("latency", "theta3", "expert on CPU", "ms", "expert_theta3_s", scale=1e3),
    Entry(
        "latency",
        "",
        "a further token of a call, one vCPU",
        "ms",
        "expert_token_s",
        scale=1e3,
    ),
    Entry("latency", "", "vCPUs that shorten it", "1", "max_vcpus"),
    Entry("latency", "tau_sw", "GPU-CPU copy, latency", "us", "swap_base_s", scale=1e6),
    Entry("latency", "tau_sw", "GPU-CPU copy, rate", "MB/s", "swap_mb_s"),
    Entry("latency", "B", "network between functions", "MB/s", "bandwidth_mb_s"),
    Entry("cold start", "", "weights read", "MB/s", "load_mb_s"),
    Entry("cold start", "", "container", "s", "container_start_main_s", "container_start_s"),
    Entry(
        "price",
        "c_c",
        "CPU memory",
        "1e-8 USD/(MB s)",
        "price_cpu",
        "price_cpu_usd_mb_s",
        scale=1e8,
    ),
    Entry(
        "price",
        "c_g / c_c",
        "GPU over CPU memory",
        "1",
        lambda s, m: s.price_gpu / s.price_cpu,
        "price_ratio",
    ),
    Entry("limits", "z_max", "replicas", "1", "z_max"),
    *(
        Entry(
            "price",
            "",
            f"fees {name}: an invocation, durations rounded up to",
            "1e-6 USD, ms",
            lambda s, m, fees=fees: f"{1e6 * fees.invocation_usd:g}, {1e3 * fees.granularity_s:g}",
            f"{fees.kind}: {fees.source}",
        )
        for name, fees in FEES.items()
    ),
    Entry("limits", "U_payload", "body of an invocation", "MB", "payload_mb"),
)

PRESET_ORIGINS = {
    "prompt_tokens": (
        "prompt tokens",
        "derived: 500 characters (V-C)",
        "measured: Azure's conversation trace of 2023, capped",
    ),
    "output_tokens": (
        "output tokens",
        "published: V-C",
        "measured: Azure's conversation trace of 2023, capped",
    ),
    "output_error": ("sigma of the error of the predicted output length", "chosen", "chosen"),
    "idle_s": ("idle gaps: (share, mean in s)", "chosen", "chosen"),
    "keep_alive_s": (
        "a function stays warm, s",
        "chosen: the paper serves single requests",
        "chosen",
    ),
    "bill_cold_start": ("starts are billed", "published: Eq. 6", "chosen"),
    "slo": (
        "(TTFT s, TPOT s)",
        "chosen: the paper gives none",
        "chosen: for deepseek-v2-lite; the others have as many times what they can reach",
    ),
    "trem_s": (
        "overhead of a remote invocation by regime, s",
        "chosen: the paper gives none",
        "chosen",
    ),
    "trem_switch": ("chance to leave the regime at a request", "chosen", "chosen"),
    "trem_sigma": ("sigma of an overhead about the regime's", "chosen", "chosen"),
}
"""Entry of a preset -> words, origin in ``seed``, origin in ``dynamic``."""


def _grid(specs: np.ndarray) -> str:
    return f"{specs[0]:g}, {specs[-1]:g}, {specs[1] - specs[0]:g}"


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _row(group: str, symbol: str, name: str, unit: str, values: Sequence[Any], origin: str) -> dict:
    kind, _, source = origin.partition(": ")
    if kind not in ORIGINS:
        raise ValueError(f"{name}: the origin is {origin!r}; it must begin with one of {ORIGINS}")
    row = {"group": group, "symbol": symbol, "parameter": name, "unit": unit}
    row |= dict(zip(TABULATED, (_text(v) for v in values), strict=True))
    return row | {"kind": kind, "source": source}


def settings() -> list[dict[str, str]]:
    """Rows of the table.

    Returns:
        Dicts of text: ``group``, ``symbol``, ``parameter``, ``unit``, a value a model, ``kind``
        and ``source``, which are those of the first model and name the models that differ.

    Raises:
        ValueError: If a constant or a preset's entry has no origin.
    """
    models = {name: load_model(name) for name in TABULATED}
    systems = {name: build_system(name) for name in TABULATED}
    rows = []
    for entry in ENTRIES:
        values = [entry.of(systems[name], models[name]) for name in TABULATED]
        named = entry.origin or str(entry.value)
        origins = [systems[name].provenance.get(named, named) for name in TABULATED]
        origin = origins[0]
        for name, other in zip(TABULATED[1:], origins[1:], strict=True):
            if other != origin:
                origin += f"; {name} {other}"
        rows.append(_row(entry.group, entry.symbol, entry.name, entry.unit, values, origin))
    for gpu in GPUS:
        built = [build_system(name, gpu) for name in TABULATED]
        values = [
            f"{1e3 * s.gpu_layer_base_s:.3g}, {1e6 * s.gpu_layer_token_s:.2g}, "
            f"{1e3 * s.gpu_experts_s(1):.3g}, {1e3 * s.gpu_experts_s(N_IN):.4g}"
            for s in built
        ]
        name = f"GPU {gpu}: non-expert module ms, us a further token; experts ms, 1, {N_IN} tokens"
        rows.append(_row("latency", "tau_f", name, "", values, built[0].provenance["gpu"]))
    for k, (preset, entries) in enumerate(PRESETS.items(), 1):
        if set(entries) != set(PRESET_ORIGINS):
            raise ValueError(f"preset {preset!r} has entries without an origin: {sorted(entries)}")
        for key, value in entries.items():
            name, origin = PRESET_ORIGINS[key][0], PRESET_ORIGINS[key][k]
            values = [value] * len(TABULATED)
            if (preset, key) == ("dynamic", "slo"):
                values = [slo_classes(model) for model in models.values()]
            rows.append(_row(f"preset {preset}", key, name, "", values, origin))
    recorded = [load_activations(name) for name in TABULATED]
    rows += [
        _row(
            "prompts",
            "",
            "train, val, eval prompts",
            "1",
            [", ".join(str(len(a.rows(s))) for s in ("train", "val", "eval")) for a in recorded],
            "measured: prompts with recorded routing; those of gpt2-moe are drawn",
        ),
        _row(
            "prediction",
            "alpha, beta",
            "SPS, the paper's preset",
            "1",
            [", ".join(str(v) for v in LARGE_DATA.values())] * len(TABULATED),
            "published: V-B",
        ),
        _row(
            "prediction",
            "",
            "neighbours of the environment's `nearest`",
            "1",
            [NEIGHBOURS] * len(TABULATED),
            "published: alpha of V-B",
        ),
    ]
    return rows


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    constants = [row for row in rows if not row["group"].startswith("preset")]
    count = Counter(row["kind"] for row in constants)
    yield note(
        f"There are {len(constants)} constants besides the presets: "
        f"{', '.join(f'{count[kind]} {kind}' for kind in ORIGINS)}.",
        constants=len(constants),
        **{kind: count[kind] for kind in ORIGINS},
    )
    yield (
        "The paper gives no price, no network rate, no overhead, no z_max and no limits of TTFT "
        "and TPOT; what is chosen for them decides the cost, hence the sweeps around Fig. 9."
    )
    yield "gpt2-moe has drawn routing, the other two models have recorded routing."


STUDIES = (Study("table1_settings", "table1", lambda *given: settings(), notes=_notes),)

main = command(__spec__.name, __doc__, STUDIES, PROMPTS)

if __name__ == "__main__":
    run_main(main)
