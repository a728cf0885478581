"""Hypothesis strategies for every argument of every environment: what is allowed and what is not.

`FAMILIES` maps a family to its arguments, by name. Bounds and names come from the records of the
families; the tables below add what a record cannot say.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from servegym.envs._arguments import Arguments
from servegym.envs.expert_placement.arguments import PlacementArguments
from servegym.envs.expert_placement.cluster import ClusterArguments
from servegym.envs.llm_routing.config import RoutingArguments
from servegym.envs.llm_routing.deployments import DEPLOYMENTS as ROUTING_DEPLOYMENTS
from servegym.envs.prefix_routing.arguments import PrefixArguments
from servegym.envs.serverless_moe.arguments import ServerlessArguments
from servegym.hardware_profiles import list_fleets, list_profiles
from servegym.hardware_profiles.serverless import FEES

HUGE = 10**400
TINY, LARGEST = 1e-50, 1e50

JUNK: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "text": "no such name",
    "digits": "3",
    "empty text": "",
    "bytes": b"3",
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "zero": 0,
    "minus one": -1,
    "minus": -0.5,
    "half": 2.5,
    "huge": HUGE,
    "-huge": -HUGE,
    "complex": 1j,
    "list": [],
    "nested": [[]],
    "texts": ["a", "b"],
    "numbers": [1, 2, 3, 4, 5, 6, 7],
    "nans": [float("nan"), float("nan")],
    "mapping": {},
    "no text for a key": {1: 2},
    "strange key": {"no such key": 1},
    "array": np.array([1.0, 2.0]),
    "text array": np.array(["a", "b"]),
    "object array": np.array([None, {}], dtype=object),
    "empty array": np.array([]),
    "type": int,
    "function": len,
    "set": {1, 2},
}
"""What no argument should choke on, by name."""


def junk(*allowed: str) -> st.SearchStrategy[Any]:
    """One of `JUNK`, without those that the argument allows."""
    assert set(allowed) <= set(JUNK), allowed
    return st.sampled_from([name for name in JUNK if name not in allowed]).map(JUNK.__getitem__)


@dataclasses.dataclass(frozen=True)
class Argument:
    """Values of an argument with which an episode must run, and values that must be refused."""

    valid: st.SearchStrategy[Any]
    bad: st.SearchStrategy[Any]
    needs: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments that it goes with
    called: tuple[str, ...] = ()  # what a message may call it besides its name


def _optional(valid: Any, allowed: list[str], optional: bool) -> tuple[Any, list[str]]:
    return (valid | st.none(), [*allowed, "none"]) if optional else (valid, allowed)


def whole(
    low: int,
    high: int,
    least: int | None = None,
    most: int | None = None,
    optional: bool = False,
    default: bool = False,
    **more: Any,
):
    """A whole number in [low, high]; episodes run with those in [least, most].

    With `default` None is allowed and stands for a larger number.
    """
    valid = st.integers(low if least is None else least, high if most is None else most)
    valid = valid | valid.map(np.int64)
    valid, allowed = _optional(valid, ["zero"] if low <= 0 else [], optional)
    allowed += ["none"] if default else []
    outside = st.integers(max_value=low - 1) | st.integers(min_value=high + 1)
    fraction = st.floats(low, min(high, 1e6)).filter(lambda x: x != int(x))
    return Argument(valid, junk(*allowed) | outside | fraction, **more)


def real(
    low: float,
    high: float = LARGEST,
    open_low: bool = False,
    least: float | None = None,
    most: float | None = None,
    optional: bool = False,
    **more: Any,
):
    """A finite number in [low, high], or above low; episodes run with those in [least, most]."""
    start = low if least is None else least
    end = high if most is None else most
    valid = st.floats(start or (TINY if open_low else 0.0), end)
    valid = valid | valid.map(np.float64)
    allowed = ["half"] if high >= 2.5 else []
    allowed += ["zero"] if low == 0 and not open_low else []
    valid, allowed = _optional(valid, allowed, optional)
    bad = junk(*allowed) | st.floats(max_value=low, exclude_max=not open_low, allow_nan=False)
    return Argument(valid, bad | st.floats(min_value=high, exclude_min=True), **more)


def name(*names: str, optional: bool = False, **more: Any):
    """One of some names."""
    valid, allowed = _optional(st.sampled_from(names), [], optional)
    wrong = st.text(max_size=12).filter(lambda text: text not in names)
    near = st.sampled_from(names).map(lambda text: text[:-1])
    return Argument(valid, junk(*allowed) | wrong | near.filter(lambda x: x not in names), **more)


def flag(optional: bool = False, **more: Any):
    """True or False."""
    valid, allowed = _optional(st.booleans() | st.booleans().map(np.bool_), [], optional)
    return Argument(valid, junk("true", "false", *allowed) | st.integers() | st.text(), **more)


def span(low: float, high: float, **more: Any):
    """A positive number, or a pair of them in order, up to `high`."""
    one = st.floats(low, high)
    pair = st.tuples(one, one).map(sorted) | st.tuples(one, one).map(sorted).map(tuple)
    falling = st.tuples(one, one).filter(lambda p: p[0] > p[1])
    wrong = st.floats(max_value=0.0, allow_nan=False) | falling | st.lists(one, min_size=3)
    wrong = wrong | one.map(lambda x: [x]) | one.map(lambda x: (x, float("nan")))
    wrong = wrong | st.floats(min_value=high, exclude_min=True)
    return Argument(one | pair, junk("half") | wrong if high >= 2.5 else junk() | wrong, **more)


def steps(top: float, each: st.SearchStrategy[Any], **more: Any):
    """Increasing numbers that begin with 0."""
    valid = st.lists(each, max_size=4, unique=True).map(lambda x: [0, *sorted(x)])
    wrong = st.lists(each, min_size=1, max_size=3)  # no 0
    wrong = wrong | st.lists(each, min_size=2, max_size=4, unique=True).map(
        lambda x: [0, *sorted(x, reverse=True)]
    )
    wrong = wrong | st.sampled_from(
        [[0, "1"], [0, float("inf")], [0, top * 2], [0, HUGE], [0, True, 1], list(range(65))]
    )
    return Argument(valid, junk() | wrong, **more)


def pairs(valid: st.SearchStrategy[Any], **more: Any):
    """A list of pairs of positive numbers."""
    entries = (1.0, (1.0, 2.0, 3.0), ("1", "2"), (0.0, 1.0), (1.0, float("nan")), (HUGE, 1.0))
    return Argument(valid, junk("none") | st.sampled_from(entries).map(lambda x: [x]), **more)


def kwargs(valid: st.SearchStrategy[Any], *bad: Any, **more: Any):
    """A mapping of keywords, or None."""
    wrong = junk("none", "mapping", "list", "empty array")
    wrong = wrong | st.just([]) | st.just(np.array([]))
    return Argument(valid | st.none(), wrong | st.sampled_from(bad) if bad else wrong, **more)


def grid(low: float, **more: Any):
    """(low, high, step) of a memory grid; episodes run from `low` on."""
    tops = st.floats(low, 1e5)
    valid = st.tuples(st.floats(1.0, low / 2), tops, st.floats(1.0, low / 8))
    wrong = st.sampled_from(
        [(1.0, 2.0), (1.0, 2.0, 0.0), (2.0, 1.0, 1.0), ("1", 2, 3), (1.0, 1e7, 1e-3), (1, 2, HUGE)]
    ) | st.just((1.0, 2.0, 1.0))  # too small for the model
    return Argument(valid | st.none(), junk("none") | wrong, **more)


def from_record(record: type[Arguments], hints: dict[str, Any]) -> dict[str, Argument]:
    """A strategy for each argument of a record, by its kind, its bounds and names.

    Hints say what the record does not: keywords of the helpers above, or the whole strategy.
    """
    makers: dict[str, Any] = {
        "whole": lambda a, **hint: whole(int(a.low), int(a.high), **hint),
        "number": lambda a, **hint: real(a.low, a.high, a.open_low, **hint),
        "span": lambda a, optional, low=TINY: span(low, a.high),
        "choice": lambda a, **hint: name(*a.choices, **hint),
        "switch": lambda a, **hint: flag(**hint),
    }
    found = {}
    for key, argument in record.described().items():
        hint = hints.get(key, {})
        if not isinstance(hint, Argument):
            hint = makers[argument.kind](argument, **{"optional": argument.optional, **hint})
        found[key] = hint
    assert set(hints) <= set(found), "a hint for no argument"
    return found


# ------------------------------------------------------------------------------------- routing

CARDS = [card for card in list_profiles() if "8b" in card or "paper" in card]
FIVE = ["gemma-7b-it", "vicuna-7b-v1.5"]
CHUNKED = {"scheduler": "chunked_prefill"}

FAILURES = st.fixed_dictionaries(
    dict.fromkeys(("mean_time_to_failure_s", "mean_time_to_repair_s"), st.floats(1e-3, LARGEST))
)

ROUTING: dict[str, Any] = {
    # What "random" and settings take and refuse is in tests/envs/llm_routing/test_fleets.py: they
    # do without most of the other arguments.
    "fleet": name(*list_fleets(), *ROUTING_DEPLOYMENTS, optional=True),
    "arrivals": name("poisson", "gamma", "mmpp", "burstgpt", "azure"),  # a trace needs its path
    "fleet_kwargs": Argument(st.none(), junk("none")),
    "num_experts": {"most": 6},
    "arrivals_kwargs": kwargs(
        st.fixed_dictionaries({"cv": st.floats(0.0, 20.0)}),
        *({"cv": -1.0}, {"cv": HUGE}, {"cv": [1]}, {"cv": 1e300}, {"shape": 0.0}),
        *({"cv": 1.0, "shape": 1.0}, {"fit": "nowhere"}, {"rate": 3.0}),
        needs={"arrivals": "gamma"},
        called=("cv=", "shape=", "fit=", "arrivals 'gamma'"),
    ),
    "catalog_kwargs": kwargs(
        st.fixed_dictionaries(
            {},
            optional={
                "num_models": st.integers(3, 9),
                "num_prompts": st.integers(10, 60),
                "seed": st.integers(0, 2**31),
                "max_output_tokens": st.integers(1, 300),
            },
        ),
        *({"num_models": 0}, {"num_prompts": 1}, {"num_prompts": HUGE}, {"seed": 1.5}),
        *({"max_output_tokens": 301}, {"name": "synthetic"}),
        needs={"catalog": "synthetic"},
        called=("num_models", "num_prompts", "seed=", "max_output_tokens", "catalog 'synthetic'"),
    ),
    "profiles": Argument(
        st.sampled_from([*list_fleets(), *CARDS])
        | st.lists(st.sampled_from(CARDS), min_size=3, max_size=4),
        junk()
        | st.text(min_size=1, max_size=8)
        | st.sampled_from(
            [[None], [3], [[]], [CARDS[0]], [CARDS[0], "nowhere"], ("a",), ["\0"], ["/"], "."]
        ),
    ),
    "models": Argument(
        st.lists(st.sampled_from(FIVE), min_size=3, max_size=5) | st.none(),
        junk("none") | st.sampled_from([FIVE, [*FIVE, "nobody"], [None] * 3, [3] * 3, [[]] * 3]),
        called=("model=",),
    ),
    "score_predictor": name("confusion", "mean", "zero", "exact", "learned"),
    "length_predictor": name("confusion", "mean", "zero", "exact", "learned"),
    "predictor_kwargs": kwargs(
        st.sampled_from([{}, {"score": {}}, {"score": {}, "length": {}}]),
        *({"score": 3}, {"score": {"tables": "nobody"}}, {"scores": {}}, {"length": {"table": 3}}),
        called=("table=",),
    ),
    "async_scheduling": {"needs": CHUNKED},
    "running_capacity": {"most": 64},
    "waiting_capacity": {"most": 64},
    "prefill_token_budget": {"least": 5, "needs": CHUNKED},
    "block_size": {"most": 64},
    "failures": Argument(
        FAILURES | st.none(),
        junk("none")
        | st.sampled_from([0.0, -1.0, None, "1", float("nan"), float("inf"), HUGE, True, 1e-4]).map(
            lambda x: {"mean_time_to_failure_s": x, "mean_time_to_repair_s": 1.0}
        )
        | st.sampled_from([{}, {"mean_time_to_repair_s": 1e-4}, {"x": 1}]).map(
            lambda x: {"mean_time_to_failure_s": 1.0, **x}
        ),
    ),
    "step_factors": Argument(
        st.none() | st.just({}),
        junk("none", "mapping")
        | st.sampled_from([{"nobody": [1, 1]}, {"rtx4090-llama-3.1-8b": 1}, {3: [1, 1]}, [1, 1]]),
    ),
    "max_output_tokens": {"most": 2000},
    "episode_requests": {"most": 60, "optional": False, "default": True},
    "requests_file": Argument(st.none(), junk("none") | st.just("no/such/file.csv")),
}

_MODULATED = {
    "cv": real(0.0, 100.0),
    "rate_cv": real(0.0, 100.0),
    "rho": real(0.0, most=0.999),
    "block_requests": real(0.01),
    "window": flag(),
}
PROCESSES = {
    "gamma": {"cv": real(0.0, 100.0), "shape": real(1e-4), "fit": name("burstgpt", "azure")},
    "mmpp": {
        "rate_ratio": real(1.0, 1e6),
        "busy_share": real(0.0, open_low=True, most=0.999),
        "cycle_requests": real(0.01),
        "fit": name("burstgpt", "azure"),
    },
    "burstgpt": _MODULATED,
    "azure": _MODULATED,
}
"""Parameters of the arrival processes."""

# ---------------------------------------------------------------------------------- serverless


def _idle(draws: list[float]) -> list[tuple[float, float]]:
    total = sum(draws)
    return [(x / total, 1000.0 * x) for x in draws]


SERVERLESS: dict[str, Any] = {
    "model": name("toy"),
    "predictor": Argument(
        st.sampled_from(["task_mean", "global_mean", lambda book: book.frequencies()]),
        junk("type", "function")
        | st.text(max_size=6)
        | st.sampled_from([lambda book: None, lambda book: "no table"])
        | st.sampled_from([-1.0, np.nan]).map(lambda x: lambda book: x * book.frequencies())
        | st.just(lambda book: book.frequencies()[:1]),
    ),
    "activations": Argument(st.none(), junk("none")),
    "episode_requests": {"most": 12},
    "levels": whole(2, 9, optional=True),
    "w_headroom_mb": steps(1e7, st.floats(1e-3, 1e7)),
    "y_headroom_mb": steps(1e7, st.floats(1e-3, 1e7)),
    "z_headroom": steps(64, st.integers(1, 64)),
    "prompt_tokens": Argument(
        st.integers(1, 5000) | st.just("azure") | st.none(),
        junk("none") | st.integers(max_value=0) | st.integers(min_value=100_001),
    ),
    "output_tokens": Argument(
        st.integers(1, 1000) | st.just("azure") | st.none(),
        junk("none") | st.integers(max_value=0) | st.integers(min_value=100_001),
    ),
    "max_prompt_tokens": {"most": 5000},
    "max_output_tokens": {"most": 1000},
    "idle_s": pairs(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=3).map(_idle) | st.none()),
    "slo": pairs(
        st.lists(st.tuples(st.floats(30.0, 1e12), st.floats(2.0, 1e12)), min_size=1, max_size=3)
        | st.none()
    ),
    "trem_s": Argument(
        st.lists(st.floats(TINY, LARGEST), min_size=1, max_size=3) | st.none(),
        junk("none", "numbers")
        | st.sampled_from([[0.0], [-1.0], ["1"], [None], [float("nan")], [HUGE]]),
    ),
    "payload_mb": {"least": 1.0},
    "main_specs_mb": grid(4000.0),
    "remote_specs_mb": grid(2000.0),
    "fees": Argument(
        st.sampled_from(sorted(FEES))
        | st.tuples(st.floats(0.0, 1.0), st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 60.0])),
        junk("numbers")
        | st.sampled_from(["aws", (0.0,), (1.1, 0.0), (-1e-7, 0.0), (0.0, 1e-9), (0.0, 61.0)]),
    ),
}

# ----------------------------------------------------------------------------------- placement

OFFLOAD = {"serving": "offload"}
TOY_TASKS = ("task0", "task1")


def per(
    shape: tuple[int, ...], least: float, open_low: bool, *bad: Any, optional=False, **more: Any
):
    """A number, or an array of a shape; episodes run with those from `least` on."""

    def filled(value: Any) -> Any:
        for size in reversed(shape):
            value = [value] * size
        return value

    one = st.floats(least, LARGEST)
    array = one
    for size in reversed(shape):
        array = st.lists(array, min_size=size, max_size=size)
    wrong = [-1.0, [], [1.0] * 9, [[1.0], [1.0, 2.0]], *bad]
    wrong += [filled(x) for x in ("1", None, float("nan"), float("inf"), -1.0, True, HUGE, [1.0])]
    allowed = ["half"] if least <= 2.5 else []
    allowed += [] if open_low else ["zero"]
    valid, allowed = _optional(one | array, allowed, optional)
    return Argument(valid, junk(*allowed) | st.sampled_from(wrong), **more)


PLACEMENT: dict[str, Any] = {
    "scenario": name("edge_hetero", "edge_decode", "paper_testbed", "drift", "scale_4"),
    "model": name("toy"),
    "epochs": {"most": 6},
    "epoch_s": {"least": 0.1, "most": 1e9, "needs": {"mean_interarrival_s": 1e8}},
    "skew": name("measured"),
    "mean_interarrival_s": Argument(
        st.floats(2.0, 1e9) | st.lists(st.floats(2.0, 1e9), min_size=3, max_size=3),
        junk("none", "half")
        | st.floats(max_value=0.0, allow_nan=False)
        | st.sampled_from(
            [[1.0], [1.0, 2.0, 0.0], ["1", "2", "3"], [HUGE] * 3, [[1.0]] * 3, 1e-7, [1e299] * 3]
        ),
    ),
    "output_tokens": Argument(
        st.integers(1, 60) | st.tuples(st.integers(1, 20), st.integers(21, 60)) | st.none(),
        junk("none")
        | st.integers(max_value=0)
        | st.integers(min_value=(1 << 20) + 1)
        | st.sampled_from(
            [(1,), (5, 4), (1, "2"), (None, None), (1, 2.5), [True, 2], (1, HUGE), ([], [])]
        ),
    ),
    "tasks": Argument(
        st.lists(st.sampled_from(TOY_TASKS), min_size=1, max_size=5) | st.none(),
        junk("none") | st.sampled_from([["nothing"], [None], [3], [[]], [np.array(["a", "b"])]]),
    ),
    "rotate_s": {"least": 1e-7},  # at most 1e9 turns an episode
    "history_requests": {"most": 50},
    "cache": {"needs": OFFLOAD},
    "cluster_kwargs": kwargs(
        st.fixed_dictionaries({}, optional={"link_model": st.sampled_from(["nic", "pairwise"])}),
        *({"link_model": "no"}, {"gpus": 3}, {"model": "toy"}),
        called=("link_model", "gpus"),
    ),
}

CLUSTER_HINTS: dict[str, Any] = {
    "gpus": Argument(
        st.lists(st.integers(1, 3), min_size=3, max_size=5),
        junk("numbers")
        | st.sampled_from([[0, 1], [1, 2.5], [None], [True, 1], [65], ["1"], [HUGE]]),
    ),
    "gpu_bytes": per((4,), 40e9, True, 0.5, called=("GPU",)),
    "memory_fraction": {"least": 0.003},
    "slots": Argument(
        st.lists(st.integers(16, 10**6), min_size=4, max_size=4) | st.none(),
        junk("none")
        | st.sampled_from(
            [[40] * 3, [-1] * 4, [1.5] * 4, ["40"] * 4, [True] * 4, "abcd", [0] * 4, [-HUGE] * 4]
        ),
        called=("fit",),
    ),
    "nic_bps": per((3,), TINY, True),
    "bandwidth_bps": per((3, 3), TINY, True, optional=True),
    "latency_s": per((3, 3), 0.0, False),
    "gpu_speed": per((4,), TINY, True),
    "sizes": Argument(st.none(), junk("none")),
}
CLUSTER = from_record(ClusterArguments, CLUSTER_HINTS)

# --------------------------------------------------------------- what every environment takes

COMMON = {"render_mode": name("ansi", "rgb_array", optional=True), "validate": flag()}
VECTOR = {
    **COMMON,
    "num_envs": whole(1, 1 << 31, most=5),
    "autoreset_mode": name(
        "NextStep", "SameStep", "Disabled", "NEXT_STEP", "SAME_STEP", "DISABLED"
    ),
    "copy": flag(),
    "max_episode_steps": whole(1, 1 << 31, optional=True),
}
VECTORS = dict.fromkeys(("routing", "serverless", "placement", "prefix"), VECTOR)
PARALLEL = {
    "routing": {
        "num_access_points": whole(1, 4096, most=6),
        "view": name("graph", "flat", "experts"),
        "shared_reward": flag(),
        "render_mode": COMMON["render_mode"],
    },
    "placement": {"shared_reward": flag(), "render_mode": COMMON["render_mode"]},
}
# ------------------------------------------------------------------- prefix-cache-aware routing

_CARD = {"card": "h100", "model": "llama-3.1-8b"}
PREFIX: dict[str, Any] = {
    "scenario": {
        "needs": {"workload": "tenants", "workload_kwargs": None, "profiles": _CARD, "rate": 5.0}
    },
    "workload_kwargs": kwargs(
        st.fixed_dictionaries({}, optional={"groups": st.integers(1, 9)}),
        *({"groups": 0}, {"groups": 1.5}, {"group": 3}, {1: 2}),
        needs={"workload": "tenants"},
        called=("groups", "keyword", "keyword argument"),
    ),
    "rate": {"low": 0.1},
    "episode_requests": {"most": 30},
    "warmup_requests": {"most": 20},
    "profiles": Argument(
        st.sampled_from([_CARD, "h100-llama-3.1-8b", ["l40s-llama-3.1-8b", _CARD]]),
        junk("mapping", "list")
        | st.sampled_from(
            [[], {}, {"card": "h100"}, {**_CARD, "tp": 3}, {**_CARD, "card": 1}, ["h100", None]]
        ),
        needs={"num_replicas": None},
        called=("profile", "card", "model", "tp"),
    ),
    "num_replicas": {"most": 4, "needs": {"profiles": _CARD}},
    "max_num_seqs": {"most": 64},
    "max_num_batched_tokens": {"least": 128, "most": 8192},
    "block_size": {"most": 512},
    "kv_tokens": {"least": 1 << 14, "most": 1 << 20},
    "index_kwargs": kwargs(
        st.fixed_dictionaries({}, optional={"heat_s": st.floats(0.1, 1e6)}),
        *({"heat_s": 0.0}, {"heats": 1.0}, {"smoothing": 2.0}, {"index_entries": 0}),
        called=("heat_s", "keyword", "smoothing", "index_entries"),
    ),
    "scrape_s": {"least": 1e-3, "most": 1e3},
    "slo": kwargs(
        st.fixed_dictionaries({}, optional={"ttft_s": st.floats(0.0, 1e6)}),
        *({"ttft_s": -1.0}, {"ttft": 1.0}, {"tpot_s": float("nan")}),
        called=("keyword",),
    ),
    "reward": {"needs": {"admission": False, "failures": None}},
    "admission": {"needs": {"reward": "slo"}},
    "failures": dataclasses.replace(ROUTING["failures"], needs={"reward": "slo"}),
}

FAMILIES = {
    "routing": from_record(RoutingArguments, ROUTING),
    "serverless": from_record(ServerlessArguments, SERVERLESS),
    "placement": from_record(PlacementArguments, PLACEMENT),
    "prefix": from_record(PrefixArguments, PREFIX),
}
BASE: dict[str, dict[str, Any]] = {
    "routing": {"num_experts": 3, "episode_requests": 12},
    "serverless": {"model": "toy", "episode_requests": 5, "slo": [[1e6, 1e6]]},
    "placement": {"model": "toy", "epochs": 2, "epoch_s": 20.0, "history_requests": 5},
    "prefix": {"num_replicas": 2, "episode_requests": 12, "warmup_requests": 3},
}
"""Arguments of small systems."""
