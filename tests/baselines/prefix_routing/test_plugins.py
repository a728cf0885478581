"""Rules of gateways against loops over plain numbers, for rows with settings."""

import math

import numpy as np
import pytest

from servegym.baselines.prefix_routing.plugins import (
    AIBRIX,
    CARDS,
    FILTER,
    GATEWAYS,
    GatewayPolicy,
)
from servegym.baselines.prefix_routing.policy import View

from .states import observation_of, system_of

pytestmark = pytest.mark.filterwarnings("error")

N, BLOCK, ENTRY = 5, 16, 64
FLEET = ("h100", "l40s", "h100", "a100", "l40s")


def system(admission=False):
    return system_of(N, cards=FLEET, block=BLOCK, entry=ENTRY, admission=admission)


# What the gateways do, with a dict `v` of a request and of lists by replica.


def least_of(costs):
    """Costs by replica and those of the least."""
    least = min(costs.values())
    return costs, [n for n, cost in costs.items() if cost <= least + 1e-9]


def share(v, n):
    total = v["prompt_tokens"] // ENTRY
    return (v["match_tokens"][n] // ENTRY) / total if total else 0.0


def filtered(v, ups, setting):
    """llm-d's filter: what is left of the replicas."""

    def of(name, default):
        return setting.get(f"{FILTER}.{name}", default)

    if len(ups) <= 1 or of("affinityThreshold", 0.0) <= 0 or of("explorationProbability", 0) == 1:
        return ups
    sticky = [n for n in ups if share(v, n) >= of("affinityThreshold", 0.0)]
    others = [n for n in ups if n not in sticky]
    if not sticky:
        return ups
    if of("maxTTFTPenaltyMs", 18000) > 0 and others:
        peak = of("peakPrefillThroughput", 15928)
        wait = [
            min(v["prefill_tokens"][n] / peak * 1000 for n in some) for some in (sticky, others)
        ]
        if wait[0] - wait[1] > of("maxTTFTPenaltyMs", 18000):
            return ups
    return sticky


def score(kind, v, n, left, setting):
    """A scorer of llm-d."""

    def of(name, default):
        return setting.get(f"{kind}.{name}", default)

    if kind in ("queue-scorer", "running-requests-size-scorer"):
        x = v["waiting" if kind == "queue-scorer" else "running"]
        high, low = max(x[k] for k in left), min(x[k] for k in left)
        return 1.0 if high == low else (high - x[n]) / (high - low)
    if kind == "kv-cache-utilization-scorer":
        return 1 - v["kv_usage"][n]
    if kind == "prefix-cache-scorer":
        return share(v, n)
    if kind == "active-request-scorer":
        count, most = v["in_flight"][n], max(v["in_flight"][k] for k in left)
        if count <= of("idleThreshold", 0):
            return 1.0
        return (most - count) / most * of("maxBusyScore", 1.0)
    if kind == "load-aware-scorer":
        threshold = of("threshold", 128)
        return 0.5 * (1 - min(v["waiting"][n], threshold) / threshold)
    if kind == "token-load-scorer":
        limit = of("queueThresholdTokens", 4194304)
        tokens = v["prefill_tokens"][n] + v["prompt_tokens"] - v["match_tokens"][n]
        return 1.0 if tokens <= 0 else 1 - min(tokens, limit) / limit
    if kind == "session-affinity-scorer":
        return v["session_replica"][n]
    weights = {
        name.split(".", 1)[1]: w
        for name, w in setting.items()
        if name.startswith(CARDS) and "." in name
    }
    return weights.get(FLEET[n], min(weights.values())) / max(weights.values())


def llm_d(v, ups, setting):
    left = filtered(v, ups, setting)
    kinds = [kind for kind in setting if "." not in kind]
    costs = {}
    for n in left:
        total = 0.0
        for kind in kinds:
            if setting[kind] != 0:
                total += setting[kind] * min(max(score(kind, v, n, left, setting), 0.0), 1.0)
        costs[n] = -total
    return least_of(costs)


def sglang(v, ups, setting):
    """Over the replicas that are up; the first of equals."""
    load = {n: v["in_flight"][n] for n in ups}
    high, low = max(load.values()), min(load.values())
    if not (
        high - low > setting.get("balance-abs-threshold", 64)
        and high > low * setting.get("balance-rel-threshold", 1.5)
    ):
        best = max(ups, key=lambda n: (v["match_tokens"][n], -n))
        if v["match_tokens"][best] / v["prompt_tokens"] > setting.get("cache-threshold", 0.3):
            return None, [best]
    return None, [min(ups, key=lambda n: (load[n], n))]


def dynamo(v, ups, setting):
    def of(name, default):
        return setting.get(name, default)

    costs = {}
    for n in ups:
        active = v["prefill_tokens"][n]
        above = (active - min(v["prefill_tokens"][k] for k in ups)) / BLOCK
        ratio = above / math.ceil(v["prompt_tokens"] / BLOCK)
        credit = of("overlap_score_credit", 1.0)
        credit /= 1 + of("overlap_score_credit_decay", 0.0) * ratio
        raw = (active + v["prompt_tokens"]) / BLOCK
        prefill = max(raw - credit * v["match_tokens"][n] / BLOCK, 0)
        requests = of("decode_active_request_weight", 0.0) * v["in_flight"][n]
        costs[n] = of("prefill_load_scale", 1.0) * prefill + v["decode_blocks"][n] + requests
    return least_of(costs)


def aibrix(v, ups, setting):
    factor = setting.get(f"{AIBRIX}LOAD_IMBALANCE_FACTOR", 2.0)
    gap = setting.get(f"{AIBRIX}LOAD_IMBALANCE_MIN_GAP", 8)
    deviations = setting.get(f"{AIBRIX}STANDARD_DEVIATION_FACTOR", 1)
    load = {n: v["in_flight"][n] for n in ups}
    high, low, mean = max(load.values()), min(load.values()), sum(load.values()) / len(ups)
    squares = sum((x - mean) ** 2 for x in load.values())
    sigma = math.sqrt(squares / (len(ups) - 1)) if len(ups) > 1 else 0.0
    may = ups
    if high > factor * (mean + 1) and high - low >= gap:
        may = [n for n in ups if load[n] == low]
    blocks = {n: v["match_tokens"][n] // ENTRY for n in may}
    percent = {n: 100 * blocks[n] // (v["prompt_tokens"] // ENTRY) for n in may if blocks[n]}
    order = sorted(percent, key=lambda n: (-percent[n], load[n]))
    for n in order:
        if load[n] <= mean + deviations * sigma:
            same = (percent[n], load[n])
            return None, [k for k in order if (percent[k], load[k]) == same]
    return None, [n for n in ups if load[n] == low]


REFERENCES = {"llm-d": llm_d, "sglang": sglang, "dynamo": dynamo, "aibrix": aibrix}


def drawn_setting(gateway, rng):
    """Some numbers of a gateway, often at 0, at a default or where they matter."""
    if gateway == "sglang":
        whole = {"balance-abs-threshold": int(rng.integers(0, 9))}
        ratio = {"balance-rel-threshold": float(rng.choice([0.0, 1.0, 1.5, 2.0]))}
        return whole | ratio | {"cache-threshold": float(rng.choice([0.0, 0.25, 0.5, 1.0]))}
    if gateway == "aibrix":
        numbers = rng.choice([0.0, 0.5, 1.0, 2.0]), rng.integers(0, 9), rng.integers(0, 3)
        names = ("LOAD_IMBALANCE_FACTOR", "LOAD_IMBALANCE_MIN_GAP", "STANDARD_DEVIATION_FACTOR")
        given = {f"{AIBRIX}{name}": float(x) for name, x in zip(names, numbers, strict=True)}
        return given if rng.random() < 0.8 else {}
    if gateway == "dynamo":
        names = list(GATEWAYS["dynamo"].knobs)[:-1]
        return {
            name: float(rng.choice([0.0, 0.7, 1.0, 5.0])) for name in names if rng.random() < 0.8
        }
    setting = {}
    for kind in rng.permutation([name for name in GATEWAYS["llm-d"].knobs if "." not in name])[:4]:
        setting[str(kind)] = float(rng.choice([0.0, 0.5, 1.0, 3.0]))
    choices = {
        "active-request-scorer.idleThreshold": (0.0, 2.0),
        "active-request-scorer.maxBusyScore": (0.0, 0.5, 1.0),
        "load-aware-scorer.threshold": (1.0, 4.0),
        "token-load-scorer.queueThresholdTokens": (200.0, 3000.0),
        f"{FILTER}.affinityThreshold": (0.0, 0.5, 0.8, 1.0),
        f"{FILTER}.explorationProbability": (0.0, 1.0),
        f"{FILTER}.maxTTFTPenaltyMs": (0.0, 50.0),
        f"{FILTER}.peakPrefillThroughput": (5000.0, 15928.0),
    }
    for name, values in choices.items():
        if rng.random() < 0.5:
            setting[name] = float(rng.choice(values))
    for card in dict.fromkeys(FLEET):
        if rng.random() < 0.6:
            setting[f"{CARDS}.{card}"] = float(rng.choice([0.1, 1.0, 2.5]))
    if not any(name.startswith(f"{CARDS}.") for name in setting):
        setting.pop(CARDS, None)
    return setting


def drawn_states(rows, rng):
    """Observation and mask of rows in small numbers, so that many are equal."""
    prompt = ENTRY * rng.integers(1, 30, rows) + rng.integers(0, ENTRY, rows)
    draws = {
        "waiting": rng.integers(0, 4, (rows, N)),
        "running": rng.integers(0, 4, (rows, N)),
        "kv_usage": rng.integers(0, 5, (rows, N)) / 4,
        "in_flight": rng.integers(0, rng.integers(1, 20, rows)[:, None] + 1, (rows, N)),
        "prefill_tokens": 160 * rng.integers(0, 8, (rows, N)),
        "decode_blocks": 10 * rng.integers(0, 6, (rows, N)),
        "match_tokens": (prompt // ENTRY)[:, None] * rng.integers(0, 5, (rows, N)) // 4 * ENTRY,
        "session_replica": np.eye(N + 1, N)[rng.integers(0, N + 1, rows)],
    }
    seen = observation_of(N, prompt, rows, **draws)
    return seen, (rng.random((rows, N)) < rng.choice([0.2, 0.7, 1], rows)[:, None]).astype(np.int8)


def numbers_of(seen, row):
    """What the references read of a row, as plain numbers and lists."""
    view = View({name: part[row : row + 1] for name, part in seen.items()}, system())
    names = "waiting running in_flight prefill_tokens decode_blocks match_tokens kv_usage".split()
    lists = {name: getattr(view, name)[0].tolist() for name in (*names, "session_replica")}
    return lists | {"prompt_tokens": view.prompt_tokens.item()}


@pytest.mark.parametrize("admission", [False, True])
@pytest.mark.parametrize("gateway", GATEWAYS)
def test_rules_do_what_the_gateways_do(gateway, admission):
    fleet, nowhere = system(admission), N if admission else 0
    rows, ties, drawn, downs = 60, 0, 0, 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        settings = [drawn_setting(gateway, rng) for _ in range(rows)]
        seen, mask = drawn_states(rows, rng)
        policy = GatewayPolicy(fleet, gateway, *settings)
        found = []
        for again in range(6):
            policy.reset(rows, again)
            found.append(policy.act(seen, mask))
        able = mask.any(-1)[:, None]
        view = View(seen, fleet, policy.rng.spawn(rows))
        mine, keep = policy.decide(view, (mask > 0) | ~able)
        for row, setting in enumerate(settings):
            ups, chosen = np.flatnonzero(mask[row]).tolist(), {int(act[row]) for act in found}
            if not ups:
                assert chosen == {nowhere}
                downs += 1
                continue
            costs, best = REFERENCES[gateway](numbers_of(seen, row), ups, setting)
            if costs is not None:
                assert np.flatnonzero(keep[row]).tolist() == list(costs)
                np.testing.assert_allclose(
                    mine[row, keep[row]], list(costs.values()), rtol=0, atol=1e-9
                )
            assert chosen <= set(best)
            ties += len(best) > 1
            drawn += len(chosen) > 1
    assert downs > 2
    # Six equal draws of two are 1 in 32.
    assert drawn > 0.8 * ties > 5 if GATEWAYS[gateway].chance else drawn == ties == 0


def test_dynamos_temperature_draws_by_the_softmax_of_the_costs():
    seen, mask = drawn_states(1, np.random.default_rng(0))
    seen, mask = {name: np.repeat(part, 6000, 0) for name, part in seen.items()}, np.ones((6000, N))
    setting = {"router_temperature": 0.5}
    policy = GatewayPolicy(system(), "dynamo", setting)
    policy.reset(6000, 0)
    costs, _ = dynamo(numbers_of(seen, 0), list(range(N)), setting)
    spread = max(costs.values()) - min(costs.values())
    weights = np.exp([-cost / (spread * 0.5) for cost in costs.values()])
    counts = np.bincount(policy.act(seen, mask), minlength=N)
    np.testing.assert_allclose(counts / 6000, weights / weights.sum(), atol=0.025)
    policy = GatewayPolicy(system(), "dynamo", {"router_temperature": 1e-300})
    policy.reset(6000, 0)
    assert set(policy.act(seen, mask)) == {min(costs, key=costs.get)}


@pytest.mark.parametrize(
    ("gateway", "name", "value"),
    [
        ("llm-d", "queue-scorer", -1.0),
        ("llm-d", "active-request-scorer.maxBusyScore", 1.1),
        ("llm-d", "token-load-scorer.queueThresholdTokens", 0),
        ("llm-d", f"{FILTER}.affinityThreshold", 1.1),
        ("llm-d", CARDS, 1.0),  # without a card's weight
        ("sglang", "cache-threshold", math.nan),
        ("sglang", "balance-abs-threshold", 2.5),
        ("dynamo", "router_temperature", -0.1),
        ("aibrix", f"{AIBRIX}STANDARD_DEVIATION_FACTOR", -1),
    ],
)
def test_a_setting_out_of_range_or_unknown_is_refused_by_name(gateway, name, value):
    with pytest.raises(ValueError, match=name):
        GatewayPolicy(system(), gateway, {name: value})


def test_unknown_cards_and_gateways_are_refused():
    with pytest.raises(ValueError, match="b200.*h100, l40s, a100"):
        GatewayPolicy(system(), "llm-d", {CARDS: 1.0, f"{CARDS}.b200": 2.0})
    with pytest.raises(ValueError, match="llmd.*'llm-d'"):
        GatewayPolicy(system(), "llmd", {})
