"""What the files of gateways can say: plugins with their parameters, for many settings at a time.

A gateway's *setting* is a dict of numbers by the names that its file has, the weight of a scorer by
the scorer's type. `GATEWAYS` says which numbers each gateway has, their defaults and in which range
they are searched. Parameters are numbers, or (B, 1) where rows differ. Scores of replicas that are
not in ``keep`` mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import LARGEST, choose, real
from servegym.baselines.prefix_routing.policy import Keep, Numbers, RulePolicy, View, extremes
from servegym.baselines.prefix_routing.system import PrefixSystem

Setting = dict[str, float]


class Knob(NamedTuple):
    """A number of a gateway's file.

    Attributes:
        default: The gateway's own.
        low: Where its search begins; what is below 0 stands for 0, which is without.
        high: Where its search ends.
        log: Whether it is searched on a logarithmic scale.
        whole: Whether the file wants a whole number.
        most: The largest that the gateway takes.
        positive: Whether it must be above 0.
    """

    default: float
    low: float
    high: float
    log: bool = False
    whole: bool = False
    most: float = LARGEST
    positive: bool = False


def _by_range(values: Numbers, keep: Keep) -> Numbers:
    """(max - x) / (max - min) over the replicas that are kept; 1 for all if these are equal."""
    low, high = extremes(values, keep)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(high > low, (high - values) / (high - low), 1.0)


# llm-d: project llm-d/llm-d-router, folder pkg/epp/framework/plugins/scheduling.


def queue(view: View, keep: Keep) -> Numbers:
    """``scorer/queuedepth/queue.go`` @2342697: requests that wait, by range."""
    return _by_range(view.waiting, keep)


def kv_use(view: View, keep: Keep) -> Numbers:
    """``scorer/kvcacheutilization`` @2342697: the share of the KV memory that is free."""
    return 1.0 - view.kv_usage


def prefix(view: View, keep: Keep) -> Numbers:
    """``scorer/prefix/plugin.go`` @068b68d: the matched share of the prompt's blocks."""
    return view.match_share()


def running(view: View, keep: Keep) -> Numbers:
    """``scorer/runningrequests`` @683100d: requests that run, by range."""
    return _by_range(view.running, keep)


def active(view: View, keep: Keep, *, idleThreshold: Any, maxBusyScore: Any) -> Numbers:
    """``scorer/activerequest`` @2b0e757: 1 - requests in flight / the most of any replica.

    Up to ``idleThreshold`` requests count as none; others score at most ``maxBusyScore``.
    """
    most = np.maximum(extremes(view.in_flight, keep)[1], 1)
    busy = (most - view.in_flight) / most * maxBusyScore
    return np.where(view.in_flight <= idleThreshold, 1.0, busy)


def load_aware(view: View, keep: Keep, *, threshold: Any) -> Numbers:
    """``scorer/loadaware`` @683100d: .5 - .5 x requests that wait / ``threshold``, at least 0."""
    return 0.5 - 0.5 * np.minimum(view.waiting, threshold) / threshold


def token_load(view: View, keep: Keep, *, queueThresholdTokens: Any) -> Numbers:
    """``scorer/tokenload/token_load.go`` @1b30d10: 1 - uncached tokens / the threshold, at least 0.

    Tokens of the requests without a first token (``dataproducer/inflightload`` @2f1de8c) and of
    this one.
    """
    tokens = view.prefill_tokens + view.new_tokens()
    return 1.0 - np.minimum(tokens / queueThresholdTokens, 1.0)


def session(view: View, keep: Keep) -> Numbers:
    """``scorer/sessionaffinity`` @3a19b9d: 1 for the replica of the session's last request."""
    return view.session_replica


def card_weight(view: View, keep: Keep, **weights: Any) -> Numbers:
    """``scorer/endpointattributeweight`` @04fc442: a card's weight / the largest of all.

    The attribute is the card; one without a weight has the least. Merged in 2026 (#2204).
    """
    least_of_all = np.minimum.reduce([np.asarray(w, float) for w in weights.values()])
    most = np.maximum.reduce([np.asarray(w, float) for w in weights.values()])
    cards = view.system.cards
    of_cards = [np.asarray(weights.get(card, least_of_all), float) for card in cards]
    return np.concatenate([w.reshape(*w.shape[:-1], 1) for w in of_cards], axis=-1) / most


def affinity(
    view: View,
    keep: Keep,
    *,
    affinityThreshold: Any,
    explorationProbability: Any,
    maxTTFTPenaltyMs: Any,
    peakPrefillThroughput: Any,
) -> Keep:
    """The replicas that have the prompt, or all: ``filter/prefixcacheaffinity/plugin.go`` @066c20e.

    All are kept with ``explorationProbability``, if none has a share of the prompt of at least
    ``affinityThreshold`` (0: always), and if the best of those that have it is more than
    ``maxTTFTPenaltyMs`` slower to its first token than the best of the others (0: never), by tokens
    in flight / ``peakPrefillThroughput``.
    """
    has = keep & (view.match_share() >= affinityThreshold)
    ttft_s = view.prefill_tokens / peakPrefillThroughput
    with np.errstate(invalid="ignore"):
        penalty_s = extremes(ttft_s, has)[0] - extremes(ttft_s, keep & ~has)[0]
        slow = np.greater(maxTTFTPenaltyMs, 0.0) & (penalty_s > maxTTFTPenaltyMs / 1e3)
    use = has.any(-1, keepdims=True) & ~slow & np.greater(affinityThreshold, 0.0)
    if np.any(np.greater(explorationProbability, 0.0)):
        use = use & (view.random(1) >= explorationProbability)
    return np.where(use, has, keep)


class Plugin(NamedTuple):
    """A scorer, with values in [0, 1], or a filter, and its parameters."""

    function: Callable[..., Numbers]
    knobs: Mapping[str, Knob] = {}


_WEIGHT = Knob(0.0, -2.0, 8.0)
_CARD = Knob(1.0, 0.01, 1.0, log=True, positive=True)
CARDS = "endpoint-attribute-weight-scorer"
FILTER = "prefix-cache-affinity-filter"
SCORERS: dict[str, Plugin] = {
    "queue-scorer": Plugin(queue),
    "kv-cache-utilization-scorer": Plugin(kv_use),
    "prefix-cache-scorer": Plugin(prefix),
    "running-requests-size-scorer": Plugin(running),
    "active-request-scorer": Plugin(
        active,
        {
            "idleThreshold": Knob(0.0, 0.0, 0.0, whole=True),
            "maxBusyScore": Knob(1.0, 1.0, 1.0, most=1.0),
        },
    ),
    "load-aware-scorer": Plugin(
        load_aware, {"threshold": Knob(128.0, 128.0, 128.0, whole=True, positive=True)}
    ),
    "token-load-scorer": Plugin(
        token_load,
        {
            "queueThresholdTokens": Knob(
                4194304.0, 5e3, 4194304.0, log=True, whole=True, positive=True
            )
        },
    ),
    "session-affinity-scorer": Plugin(session),
    CARDS: Plugin(card_weight),
}
FILTERS: dict[str, Plugin] = {
    FILTER: Plugin(
        affinity,
        {
            "affinityThreshold": Knob(0.8, -0.5, 1.0, most=1.0),
            "explorationProbability": Knob(0.0, 0.0, 0.0, most=1.0),
            "maxTTFTPenaltyMs": Knob(18000.0, 100.0, 18000.0, log=True),
            "peakPrefillThroughput": Knob(15928.0, 15928.0, 15928.0, positive=True),
        },
    )
}


def llm_d(view: View, keep: Keep, setting: Mapping[str, Any]) -> tuple[Numbers, Keep]:
    """llm-d: filters, then the largest sum of weights x scores.

    ``pkg/epp/scheduling/scheduler_profile.go`` @0a1a00b. A filter or scorer of which the setting
    has nothing, or whose weight is 0, is not there.
    """
    for kind, plugin in FILTERS.items():
        if f"{kind}.affinityThreshold" in setting:
            keep = plugin.function(view, keep, **_parameters(kind, plugin, setting))
    total: Numbers = np.zeros(keep.shape)
    for kind, plugin in SCORERS.items():
        if np.any(setting.get(kind, 0.0)):
            total = total + setting[kind] * plugin.function(
                view, keep, **_parameters(kind, plugin, setting)
            )
    return -total, keep


def _parameters(kind: str, plugin: Plugin, setting: Mapping[str, Any]) -> dict[str, Any]:
    if kind == CARDS:
        start = f"{kind}."
        return {key[len(start) :]: x for key, x in setting.items() if key.startswith(start)}
    return {name: setting.get(f"{kind}.{name}", k.default) for name, k in plugin.knobs.items()}


def sglang(view: View, keep: Keep, setting: Mapping[str, Any]) -> tuple[Numbers, Keep]:
    """SGLang's ``cache_aware``: the best match, unless the load is out of balance; first of ties.

    With the load in requests in flight: if max - min > ``balance-abs-threshold`` and max >
    ``balance-rel-threshold`` x min, the least load; else if m / L > ``cache-threshold``, the best
    match; else the least load.

    Project sgl-project/sglang, ``sgl-model-gateway/src/policies/cache_aware.rs`` @053b63f. Its one
    radix tree of characters evicts by characters; here all rules share the environment's index.
    Load over a worker's weight is proposed (#28933, open since June 2026).
    """
    low, high = extremes(view.in_flight, keep)
    spread, ratio = setting["balance-abs-threshold"], setting["balance-rel-threshold"]
    balanced = ~((high - low > spread) & (high > ratio * low))
    best = extremes(view.match_tokens, keep)[1]
    match = balanced & (best > setting["cache-threshold"] * view.prompt_tokens)
    return np.where(match, -view.match_tokens, view.in_flight), keep


def dynamo(view: View, keep: Keep, setting: Mapping[str, Any]) -> tuple[Numbers, Keep]:
    """Dynamo's cost: weighted prefill blocks, decode blocks and requests; random ties.

    ``prefill_load_scale`` x max((prefill tokens in flight + L) / block - credit x matched blocks,
    0) + decode blocks + ``decode_active_request_weight`` x requests in flight, where the credit is
    ``overlap_score_credit`` / (1 + ``overlap_score_credit_decay`` x blocks of prefill above the
    least / blocks of the prompt). Above a ``router_temperature`` of 0 the replica is drawn.

    Project ai-dynamo/dynamo, ``lib/kv-router/src/scheduling/selector/default.rs`` @07a6c9c. Host
    and disk caches are left out, and so are blocks of this request that others have in flight.
    """
    block, credit = view.system.block_size, setting["overlap_score_credit"]
    if np.any(setting["overlap_score_credit_decay"]):
        above = np.maximum(view.prefill_tokens - extremes(view.prefill_tokens, keep)[0], 0)
        behind = above / (block * np.ceil(view.prompt_tokens / block))
        credit = credit / (1.0 + setting["overlap_score_credit_decay"] * behind)
    tokens = view.prefill_tokens + view.prompt_tokens - credit * view.match_tokens
    prefill = np.maximum(tokens / block, 0.0)
    requests = setting["decode_active_request_weight"] * view.in_flight
    cost = setting["prefill_load_scale"] * prefill + view.decode_blocks + requests
    heat = setting["router_temperature"]
    if not np.any(heat):
        return cost, keep
    # The least of costs with Gumbel noise is a draw by the softmax of -cost / (their range x heat).
    low, high = extremes(cost, keep)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.where(high > low, (cost - low) / (high - low) / heat, 0.0)
    noise = np.log(-np.log(view.random(keep.shape[1])))
    return np.where(np.greater(heat, 0.0), share + noise, cost), keep


AIBRIX = "AIBRIX_PREFIX_CACHE_"


def aibrix(view: View, keep: Keep, setting: Mapping[str, Any]) -> tuple[Numbers, Keep]:
    """AIBrix's ``prefix-cache``: the best match whose load is not far above the mean.

    With the load in requests in flight: if max > factor x (mean + 1) and max - min >= gap, only the
    least loaded replicas may match. Replicas with a match are taken by falling match, in whole
    percent, then by rising load, then at random; the first whose load is at most mean + deviations
    x standard deviation (of the sample, over all replicas) is chosen. Without one, the least load
    of all, random ties.

    Project vllm-project/aibrix, ``pkg/plugins/gateway/algorithms/prefix_cache.go`` @01de8a5.
    Versions before have no factor and ask for a gap of more than 8 (the Helm chart: 16, with 2
    deviations); later ones blend this rule with ``load-balance``.
    """
    load, count = view.in_flight, keep.sum(-1, keepdims=True)
    low, high = extremes(load, keep)
    mean = np.where(keep, load, 0).sum(-1, keepdims=True) / count
    square = np.where(keep, (load - mean) ** 2, 0.0).sum(-1, keepdims=True)
    deviation = np.sqrt(square / np.maximum(count - 1, 1))
    entries, of_prompt = view.matched_entries()
    percent = 100 * entries // of_prompt
    gate = (high > setting[f"{AIBRIX}LOAD_IMBALANCE_FACTOR"] * (mean + 1.0)) & (
        high - low >= setting[f"{AIBRIX}LOAD_IMBALANCE_MIN_GAP"]
    )
    fit = keep & (entries > 0) & (~gate | (load == low))
    fit &= load <= mean + setting[f"{AIBRIX}STANDARD_DEVIATION_FACTOR"] * deviation
    any_fit = fit.any(-1, keepdims=True)
    return np.where(any_fit, load - percent * 1e6, load), np.where(any_fit, fit, keep)


@dataclass(frozen=True)
class Gateway:
    """A gateway's rule.

    Attributes:
        name: The gateway.
        decide: From a view, the replicas to choose of and a setting to costs and the replicas that
            are left; the least cost is chosen.
        knobs: The numbers of its file.
        chance: Whether a tie is broken at random; else by the lowest index.
    """

    name: str
    decide: Callable[[View, Keep, Mapping[str, Any]], tuple[Numbers, Keep]]
    knobs: Mapping[str, Knob]
    chance: bool = True

    def default(self) -> Setting:
        """What the gateway does without a file."""
        if self.name == "llm-d":
            return dict(SCORES)
        return {name: knob.default for name, knob in self.knobs.items()}

    def knobs_for(self, cards: Sequence[str]) -> dict[str, Knob]:
        """The numbers that matter for these cards, by name."""
        several = list(dict.fromkeys(cards))
        if self.name != "llm-d" or len(several) == 1:
            return {name: knob for name, knob in self.knobs.items() if name != CARDS}
        by_card = {f"{CARDS}.{card}": _CARD for card in several}
        return {**self.knobs, **by_card}

    def check(self, setting: Mapping[str, Any]) -> Setting:
        """The setting, checked, with the defaults of what it leaves out.

        Raises:
            ValueError: Naming what the gateway does not have, or a number out of range.
        """
        checked = self.default() if self.name != "llm-d" else {}
        for name, value in setting.items():
            knob = self.knobs.get(name)
            if knob is None and self.name == "llm-d" and name.startswith(f"{CARDS}."):
                knob = _CARD
            if knob is None:
                known = ", ".join(self.knobs)
                raise ValueError(f"{name} is nothing that {self.name} has here: {known}")
            checked[name] = real(name, value, 0.0, knob.most, open_low=knob.positive)
            if knob.whole and not checked[name].is_integer():
                raise ValueError(f"{name}={value!r} must be a whole number.")
        if checked.get(CARDS) and not any(name.startswith(f"{CARDS}.") for name in checked):
            raise ValueError(f"{CARDS} needs weights of cards, as {CARDS}.h100.")
        return checked


def _llm_d_knobs() -> dict[str, Knob]:
    knobs = dict.fromkeys(SCORERS, _WEIGHT)
    # Alpha, or level with a scorer that is searched: kept where a file has them.
    knobs |= dict.fromkeys(("session-affinity-scorer", "load-aware-scorer"), Knob(0.0, 0.0, 0.0))
    for kind, plugin in (*FILTERS.items(), *SCORERS.items()):
        knobs |= {f"{kind}.{name}": knob for name, knob in plugin.knobs.items()}
    return knobs


GATEWAYS: dict[str, Gateway] = {
    "llm-d": Gateway("llm-d", llm_d, _llm_d_knobs()),
    "sglang": Gateway(
        "sglang",
        sglang,
        {
            "cache-threshold": Knob(0.3, 0.0, 1.0, most=1.0),
            "balance-abs-threshold": Knob(64.0, 0.0, 128.0, whole=True),
            "balance-rel-threshold": Knob(1.5, 1.0, 4.0),
        },
        chance=False,
    ),
    "dynamo": Gateway(
        "dynamo",
        dynamo,
        {
            "overlap_score_credit": Knob(1.0, 0.0, 6.0),
            "overlap_score_credit_decay": Knob(0.0, 0.0, 4.0),
            "prefill_load_scale": Knob(1.0, 0.05, 20.0, log=True),
            "decode_active_request_weight": Knob(0.0, 0.0, 200.0),
            "router_temperature": Knob(0.0, 0.0, 0.0),
        },
    ),
    "aibrix": Gateway(
        "aibrix",
        aibrix,
        {
            f"{AIBRIX}LOAD_IMBALANCE_FACTOR": Knob(2.0, 0.0, 4.0),
            f"{AIBRIX}LOAD_IMBALANCE_MIN_GAP": Knob(8.0, 0.0, 64.0, whole=True),
            f"{AIBRIX}STANDARD_DEVIATION_FACTOR": Knob(1.0, 0.0, 8.0, whole=True),
        },
    ),
}
"""The gateways whose files can be read, by name; defaults are those of their command lines."""
SCORES = {"queue-scorer": 2.0, "kv-cache-utilization-scorer": 2.0, "prefix-cache-scorer": 3.0}
"""What llm-d's router weighs without a file, ``pkg/epp/config/loader/defaults.go`` @0b59e4e."""
GUIDE = {"token-load-scorer": 1.0, f"{FILTER}.affinityThreshold": 0.8}
"""Of llm-d's guides since August 2026, for Qwen-32B on two H100 each."""


def absent(name: str) -> float:
    """What a number that a setting has not stands for."""
    if name in SCORERS or name == f"{FILTER}.affinityThreshold" or name.startswith(f"{CARDS}."):
        return float(name.startswith(f"{CARDS}."))
    return next(g.knobs[name].default for g in GATEWAYS.values() if name in g.knobs)


def _for_cards(setting: Setting, system: PrefixSystem) -> Setting:
    """The setting with the least weight of any card for those that have none, if it has any."""
    given = [name for name in setting if name.startswith(f"{CARDS}.")]
    if not given:
        return setting
    known = dict.fromkeys(f"{CARDS}.{card}" for card in system.cards)
    for name in given:
        if name not in known:
            cards = ", ".join(dict.fromkeys(system.cards))
            raise ValueError(f"{name}: weights are of cards of the fleet, {cards}")
    return dict.fromkeys(known, min(setting[name] for name in given)) | setting


class GatewayPolicy(RulePolicy):
    """A gateway's rule with a setting.

    Args:
        system: The system.
        gateway: One of `GATEWAYS`.
        settings: One for all rows, or one a row.
        name: The policy's name.
        repeat: How often the settings follow one another in the rows.
    """

    def __init__(
        self,
        system: PrefixSystem,
        gateway: str,
        *settings: Mapping[str, Any],
        name: str = "",
        repeat: int = 1,
    ) -> None:
        self.gateway = GATEWAYS[choose("gateway", gateway, GATEWAYS)]
        super().__init__(system, name or gateway, self._decide, self.gateway.chance)
        checked = [_for_cards(self.gateway.check(setting), system) for setting in settings]
        self.setting: dict[str, Any] = {}
        for key in dict.fromkeys(name for setting in checked for name in setting):
            values = [setting.get(key, absent(key)) for setting in checked]
            self.setting[key] = np.tile(values, repeat)[:, None] if len(checked) > 1 else values[0]

    def _decide(self, view: View, keep: Keep) -> tuple[Numbers, Keep]:
        return self.gateway.decide(view, keep, self.setting)
