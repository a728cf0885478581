"""Hypothesis strategies for every argument of every environment: what is allowed and what is not.

`FAMILIES` maps a family to its arguments, by name. Bounds and names come from the records of the
families; the tables below add what a record cannot say: with which values episodes are short, and
values of the arguments that have a check of their own.
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
NAN, INF = float("nan"), float("inf")

JUNK: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "text": "no such name",
    "digits": "3",
    "bytes": b"3",
    "nan": NAN,
    "inf": INF,
    "zero": 0,
    "minus": -0.5,
    "half": 2.5,
    "huge": HUGE,
    "-huge": -HUGE,
    "complex": 1j,
    "list": [],
    "nested": [[]],
    "texts": ["a", "b"],
    "numbers": [1, 2, 3, 4, 5, 6, 7],
    "nans": [NAN, NAN],
    "mapping": {},
    "number as key": {1: 2},
    "strange key": {"no such key": 1},
    "array": np.array([1.0, 2.0]),
    "object array": np.array([None, {}], dtype=object),
    "empty array": np.array([]),
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


def number(
    low: float,
    high: float = LARGEST,
    *,
    draw: Any = st.floats,
    open_low: bool = False,
    least: float | None = None,
    most: float | None = None,
    optional: bool = False,
    default: bool = False,
    **more: Any,
):
    """A finite number in [low, high], or above low; episodes run with those in [least, most].

    With `optional` None is allowed; with `default` it is, too, and stands for a larger number.
    """
    start = (TINY if open_low else low) if least is None else least
    valid = draw(start, high if most is None else most)
    valid = valid | valid.map(np.int64 if draw is st.integers else np.float64)
    allowed = ["none"] if optional or default else []
    allowed += ["zero"] if low == 0 and not open_low else []
    if draw is st.integers:
        wrong = st.just(low + 0.5) | draw(max_value=low - 1) | draw(min_value=high + 1)
    else:
        allowed += ["half"] if high >= 2.5 else []
        wrong = draw(max_value=low, exclude_max=not open_low, allow_nan=False)
        wrong = wrong | draw(min_value=high, exclude_min=True)
    return Argument(valid | st.none() if optional else valid, junk(*allowed) | wrong, **more)


def whole(low: int, high: int, **more: Any):
    """A whole number in [low, high]."""
    return number(low, high, draw=st.integers, **more)


def span(low: float, high: float):
    """A positive number, or a pair of them in order, up to `high`."""
    one = st.floats(low, high)
    pair = st.tuples(one, one)
    wrong = pair.filter(lambda p: p[0] > p[1]) | st.lists(one, min_size=3)
    wrong = wrong | one.map(lambda x: [x]) | one.map(lambda x: (x, NAN))
    wrong = wrong | number(0.0, high, open_low=True).bad
    return Argument(one | pair.map(sorted) | pair.map(sorted).map(tuple), wrong)


def name(*names: str, optional: bool = False, **more: Any):
    """One of some names."""
    wrong = st.text(max_size=12) | st.sampled_from(names).map(lambda text: text[:-1])
    wrong = junk(*["none"] * optional) | wrong.filter(lambda x: x not in names)
    return Argument(st.sampled_from([*names, *[None] * optional]), wrong, **more)


def flag(optional: bool = False, **more: Any):
    """True or False."""
    valid = st.sampled_from([True, False, np.True_, np.False_, *[None] * optional])
    wrong = junk("true", "false", *["none"] * optional) | st.integers() | st.text()
    return Argument(valid, wrong, **more)


def other(valid: Any, bad: list[Any], *allowed: str, **more: Any):
    """One with a check of its own: values, such as it refuses, and the names of allowed `JUNK`."""
    if isinstance(valid, list):
        valid = st.sampled_from(valid)
    wrong = junk(*allowed) | st.sampled_from(bad) if bad else junk(*allowed)
    return Argument(valid, wrong, **more)


def keywords(valid: list[Any], bad: list[Any], **more: Any):
    """A mapping of keywords, or None."""
    return other([None, *valid], bad, "none", "mapping", **more)


def from_record(record: type[Arguments], hints: dict[str, Any]) -> dict[str, Argument]:
    """A strategy for each argument of a record, by its kind, its bounds and names.

    Hints say what the record does not: keywords of the helpers above, or the whole strategy.
    """
    makers: dict[str, Any] = {
        "whole": lambda a, **hint: whole(int(a.low), int(a.high), **hint),
        "number": lambda a, **hint: number(a.low, a.high, open_low=a.open_low, **hint),
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
PREDICTORS = name("confusion", "mean", "zero", "exact", "learned")
OUTAGES = {"mean_time_to_failure_s": 1.0, "mean_time_to_repair_s": 1e-3}
FAILURES = other(
    [None, OUTAGES, dict.fromkeys(OUTAGES, LARGEST)],
    [OUTAGES | {"mean_time_to_failure_s": x} for x in (0.0, None, "1", NAN, INF, HUGE, True, 1e-4)]
    + [{"mean_time_to_failure_s": 1.0}, OUTAGES | {"x": 1}],
    "none",
)

ROUTING: dict[str, Any] = {
    # What "random" and settings take and refuse is in tests/envs/llm_routing/test_fleets.py: they
    # do without most of the other arguments.
    "fleet": name(*list_fleets(), *ROUTING_DEPLOYMENTS, optional=True),
    "arrivals": name("poisson", "gamma", "mmpp", "burstgpt", "azure"),  # a trace needs its path
    "fleet_kwargs": other([None], [], "none"),
    "num_experts": {"most": 6},
    "arrivals_kwargs": keywords(
        [{"cv": 0.0}, {"cv": 3.5}, {"cv": 20.0}],
        [{"cv": -1.0}, {"cv": HUGE}, {"cv": [1]}, {"cv": 1e300}, {"shape": 0.0}]
        + [{"cv": 1.0, "shape": 1.0}, {"fit": "nowhere"}, {"rate": 3.0}],
        needs={"arrivals": "gamma"},
        called=("cv=", "shape=", "fit=", "arrivals 'gamma'"),
    ),
    "catalog_kwargs": keywords(
        [{"num_models": 3, "num_prompts": 10}, {"seed": 2**31}, {"max_output_tokens": 1}],
        [{"num_models": 0}, {"num_prompts": 1}, {"num_prompts": HUGE}, {"seed": 1.5}]
        + [{"max_output_tokens": 301}, {"name": "synthetic"}],
        needs={"catalog": "synthetic"},
        called=("num_models", "num_prompts", "seed=", "max_output_tokens", "catalog 'synthetic'"),
    ),
    "profiles": other(
        st.sampled_from([*list_fleets(), *CARDS])
        | st.lists(st.sampled_from(CARDS), min_size=3, max_size=4),
        [[None], [3], [[]], [CARDS[0]], [CARDS[0], "nowhere"], ("a",), ["\0"], ["/"], ".", "x"],
    ),
    "models": other(
        st.lists(st.sampled_from(FIVE), min_size=3, max_size=5) | st.none(),
        [FIVE, [*FIVE, "nobody"], [None] * 3, [3] * 3, [[]] * 3],
        "none",
        called=("model=",),
    ),
    "score_predictor": PREDICTORS,
    "length_predictor": PREDICTORS,
    "predictor_kwargs": keywords(
        [{}, {"score": {}}, {"score": {}, "length": {}}],
        [{"score": 3}, {"score": {"tables": "nobody"}}, {"scores": {}}, {"length": {"table": 3}}],
        called=("table=",),
    ),
    "async_scheduling": {"needs": CHUNKED},
    "running_capacity": {"most": 64},
    "waiting_capacity": {"most": 64},
    "prefill_token_budget": {"least": 5, "needs": CHUNKED},
    "block_size": {"most": 64},
    "failures": FAILURES,
    "step_factors": keywords(
        [{}], [{"nobody": [1, 1]}, {"rtx4090-llama-3.1-8b": 1}, {3: [1, 1]}, [1, 1]]
    ),
    "max_output_tokens": {"most": 2000},
    "episode_requests": {"most": 60, "optional": False, "default": True},
    "requests_file": other([None], ["no/such/file.csv"], "none"),
}


# ---------------------------------------------------------------------------------- serverless

NO_STEPS = [[1], [0, 5, 1], [0, "1"], [0, INF], [0, 2e7], [0, HUGE], [0, True, 1], [*range(65)]]
NO_PAIRS = [[x] for x in (1.0, (1.0, 2.0, 3.0), ("1", "2"), (0.0, 1.0), (1.0, NAN), (HUGE, 1.0))]
NO_GRIDS = [(1.0, 2.0), (1.0, 2.0, 0.0), (2.0, 1.0, 1.0), ("1", 2, 3), (1.0, 1e7, 1e-3)]
NO_GRIDS += [(1, 2, HUGE), (1.0, 2.0, 1.0)]  # the last one is too small for the model


def book_of(change: Any) -> Any:
    """A predictor that changes the frequencies of what is recorded."""
    return lambda book: change(book.frequencies())


SERVERLESS: dict[str, Any] = {
    "model": name("toy"),
    "predictor": other(
        ["task_mean", "global_mean", book_of(lambda shares: shares)],
        [book_of(change) for change in (lambda _: None, lambda _: "no table", lambda x: x[:1])]
        + [book_of(lambda x: -x), book_of(lambda x: NAN * x), "mean"],
        "function",
    ),
    "activations": other([None], [], "none"),
    "episode_requests": {"most": 12},
    "levels": whole(2, 9, optional=True),
    "w_headroom_mb": other([[0], (0, 1e-3, 1e7)], NO_STEPS),
    "y_headroom_mb": other([[0], [0, 5.0, 30.5]], NO_STEPS),
    "z_headroom": other([[0], [0, 1, 64]], NO_STEPS),
    "prompt_tokens": other([1, 5000, "azure", None], [-1, 100_001], "none"),
    "output_tokens": other([1, 1000, "azure", None], [-1, 100_001], "none"),
    "max_prompt_tokens": {"most": 5000},
    "max_output_tokens": {"most": 1000},
    "idle_s": other([None, [(1.0, 1e6)], [[0.25, 1e-3], [0.75, 900.0]]], NO_PAIRS, "none"),
    "slo": other([None, [(30.0, 2.0)], [[1e12, 2.0], [30.0, 1e12]]], NO_PAIRS, "none"),
    "trem_s": other(
        [None, [TINY], [1.0, LARGEST]],
        [[0.0], [-1.0], ["1"], [None], [NAN], [HUGE]],
        *("none", "numbers"),
    ),
    "payload_mb": {"least": 1.0},
    "main_specs_mb": other([None, (1.0, 4e3, 500.0), (2e3, 1e5, 250.0)], NO_GRIDS, "none"),
    "remote_specs_mb": other([None, (1.0, 2e3, 250.0), (1e3, 1e5, 250.0)], NO_GRIDS, "none"),
    "fees": other(
        [*sorted(FEES), (0.0, 0.0), (1.0, 1e-6), [0.5, 60.0]],
        ["aws", (0.0,), (1.1, 0.0), (-1e-7, 0.0), (0.0, 1e-9), (0.0, 61.0)],
    ),
}

# ----------------------------------------------------------------------------------- placement

TOY_TASKS = ("task0", "task1")


def per(shape: tuple[int, ...], least: float, *allowed: str, **more: Any):
    """A number, or an array of a shape; episodes run with those from `least` on."""

    def filled(value: Any) -> Any:
        return np.full(shape, value, dtype=object).tolist()

    one = st.floats(least, LARGEST)
    bad = [-1.0, [1.0] * 9, [[1.0], [1.0, 2.0]]]
    bad += [filled(x) for x in ("1", None, NAN, INF, -1.0, True, HUGE)]
    valid = one | one.map(filled)
    return other(valid | st.none() if "none" in allowed else valid, bad, *allowed, **more)


PLACEMENT: dict[str, Any] = {
    "scenario": name("edge_hetero", "edge_decode", "paper_testbed", "drift", "scale_4"),
    "model": name("toy"),
    "epochs": {"most": 6},
    "epoch_s": {"least": 0.1, "most": 1e9, "needs": {"mean_interarrival_s": 1e8}},
    "skew": name("measured"),
    "mean_interarrival_s": other(
        st.floats(2.0, 1e9) | st.lists(st.floats(2.0, 1e9), min_size=3, max_size=3),
        [0.0, [1.0], [1.0, 2.0, 0.0], ["1", "2", "3"], [HUGE] * 3, [[1.0]] * 3, 1e-7, [1e299] * 3],
        *("none", "half"),
    ),
    "output_tokens": other(
        [1, 60, (1, 21), [20, 60], None],
        [-1, 1 << 21, (1,), (5, 4), (1, "2"), (None, None), (1, 2.5), [True, 2], (1, HUGE)],
        "none",
    ),
    "tasks": other(
        st.lists(st.sampled_from(TOY_TASKS), min_size=1, max_size=5) | st.none(),
        [["nothing"], [None], [3], [np.array(["a", "b"])]],
        "none",
    ),
    "rotate_s": {"least": 1e-7},  # at most 1e9 turns an episode
    "history_requests": {"most": 50},
    "cache": {"needs": {"serving": "offload"}},
    "cluster_kwargs": keywords(
        [{}, {"link_model": "nic"}, {"link_model": "pairwise"}],
        [{"link_model": "no"}, {"gpus": 3}, {"model": "toy"}],
        called=("link_model", "gpus"),
    ),
}

CLUSTER_HINTS: dict[str, Any] = {
    "gpus": other(
        st.lists(st.integers(1, 3), min_size=3, max_size=5),
        [[0, 1], [1, 2.5], [None], [True, 1], [65], ["1"], [HUGE]],
        "numbers",
    ),
    "gpu_bytes": per((4,), 40e9, called=("GPU",)),
    "memory_fraction": {"least": 0.003},
    "slots": other(
        st.lists(st.integers(16, 10**6), min_size=4, max_size=4) | st.none(),
        [[40] * 3, [-1] * 4, [1.5] * 4, ["40"] * 4, [True] * 4, "abcd", [0] * 4, [-HUGE] * 4],
        "none",
        called=("fit",),
    ),
    "nic_bps": per((3,), TINY, "half"),
    "latency_s": per((3, 3), 0.0, "half", "zero"),
    "gpu_speed": per((4,), TINY, "half"),
    "sizes": other([None], [], "none"),
}
CLUSTER = from_record(ClusterArguments, CLUSTER_HINTS)

# ------------------------------------------------------------------- prefix-cache-aware routing

_CARD = {"card": "h100", "model": "llama-3.1-8b"}
PREFIX: dict[str, Any] = {
    "scenario": {
        "needs": {"workload": "tenants", "workload_kwargs": None, "profiles": _CARD, "rate": 5.0}
    },
    "workload_kwargs": keywords(
        [{}, {"groups": 1}, {"groups": 9}],
        [{"groups": 0}, {"groups": 1.5}, {"group": 3}, {1: 2}],
        needs={"workload": "tenants"},
        called=("groups", "keyword", "keyword argument"),
    ),
    "rate": {"low": 0.1},
    "episode_requests": {"most": 30},
    "warmup_requests": {"most": 20},
    "profiles": other(
        [_CARD, "h100-llama-3.1-8b", ["l40s-llama-3.1-8b", _CARD]],
        [{"card": "h100"}, {**_CARD, "tp": 3}, {**_CARD, "card": 1}, ["h100", None]],
        needs={"num_replicas": None},
        called=("profile", "card", "model", "tp"),
    ),
    "num_replicas": {"most": 4, "needs": {"profiles": _CARD}},
    "max_num_seqs": {"most": 64},
    "max_num_batched_tokens": {"least": 128, "most": 8192},
    "block_size": {"most": 512},
    "kv_tokens": {"least": 1 << 14, "most": 1 << 20},
    "index_kwargs": keywords(
        [{}, {"heat_s": 0.1}, {"heat_s": 1e6}],
        [{"heat_s": 0.0}, {"heats": 1.0}, {"smoothing": 2.0}, {"index_entries": 0}],
        called=("heat_s", "keyword", "smoothing", "index_entries"),
    ),
    "scrape_s": {"least": 1e-3, "most": 1e3},
    "slo": keywords(
        [{}, {"ttft_s": 0.0}, {"ttft_s": 1e6}],
        [{"ttft_s": -1.0}, {"ttft": 1.0}, {"tpot_s": NAN}],
        called=("keyword",),
    ),
    "reward": {"needs": {"admission": False, "failures": None}},
    "admission": {"needs": {"reward": "slo"}},
    "failures": dataclasses.replace(FAILURES, needs={"reward": "slo"}),
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

# --------------------------------------------------------------- what every environment takes

COMMON = {"render_mode": name("ansi", "rgb_array", optional=True), "validate": flag()}
VECTOR = {
    **COMMON,
    "num_envs": whole(1, 1 << 31, most=5),
    "autoreset_mode": name("NextStep", "SameStep", "Disabled"),
    "copy": flag(),
    "max_episode_steps": whole(1, 1 << 31, optional=True),
}
PARALLEL = {
    "routing": {
        "num_access_points": whole(1, 4096, most=6),
        "view": name("graph", "flat", "experts"),
        "shared_reward": flag(),
        "render_mode": COMMON["render_mode"],
    },
    "placement": {"shared_reward": flag(), "render_mode": COMMON["render_mode"]},
}
