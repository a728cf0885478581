"""The environment: what is seen and paid against the log of its requests, copies, refusals."""

import numpy as np
import pytest
from gymnasium.utils.seeding import np_random

from servegym.envs._outcomes import OutcomeReader
from servegym.envs.llm_routing.kernel.iterations import sojourn_s
from servegym.envs.prefix_routing.config import DICT, build_problem
from servegym.envs.prefix_routing.env import PrefixRoutingEnv, PrefixRoutingFlatEnv
from servegym.envs.prefix_routing.kernel import layout
from servegym.envs.prefix_routing.kernel.observation import OF_REPLICA, OF_REQUEST
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.scenarios import SCENARIOS
from servegym.envs.prefix_routing.vector_env import PrefixRoutingVectorEnv
from servegym.envs.prefix_routing.workloads import RecordedSessions, SuperposedTrace

from ..test_conformance import CHATS, PREFIX
from .reference import infinite_hits

TENANTS = PREFIX["workload_kwargs"]
SMALL = PREFIX | {"episode_requests": 120, "warmup_requests": 30}
CHATS = SMALL | CHATS
KINDS = {
    "tenants": SMALL,
    "chats": CHATS,
    "precise": {**CHATS, "index": "precise", "index_kwargs": {"index_delay_s": 0.1}},
    "live": {**SMALL, "scrape_s": 0.0, "reward": "ttft", "length_noise": 0.5},
    "ahead": {**SMALL, "async_scheduling": True},
    "admission": {**SMALL, "admission": True, "index": "none"},
}
FAILURES = {"mean_time_to_failure_s": 0.6, "mean_time_to_repair_s": 0.2}
FAILING = {
    "failing": {**SMALL, "failures": FAILURES},
    "failing-precise": {**KINDS["precise"], "failures": FAILURES},
}


def play(env, seed, actions=None):
    """Observations, rewards and the log of an episode of random actions."""
    chance = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    seen, masks, rewards, done = [observation], [info["action_mask"]], [], False
    while not done:
        action = int(chance.integers(env.action_space.n)) if actions is None else actions.pop(0)
        observation, reward, done, _, info = env.step(action)
        seen.append(observation)
        masks.append(info["action_mask"])
        rewards.append(reward)
    return seen, masks, rewards, env.request_log(), info


@pytest.fixture(scope="module", params=KINDS)
def played(request):
    env = PrefixRoutingEnv(validate=True, **KINDS[request.param])
    return request.param, env, *play(env, 3)


def all_requests(env):
    """What became of all requests, those of the warm-up included, in the order of their numbers."""
    return env.batch.systems.request[: env.batch.problem.num_requests]


@pytest.mark.parametrize("part", ["ttft", "tpot"])
def test_a_request_exactly_at_its_objective_keeps_it(part):
    def played(**slo):
        slo = {"ttft_s": 1e6, "ttft_s_per_token": 0.0, "tpot_s": 1e6} | slo
        tokens = TENANTS | {"output_tokens": [2, 2]}  # one token after the first
        *_, log, info = play(PrefixRoutingEnv(**SMALL | {"slo": slo, "workload_kwargs": tokens}), 3)
        return log, info["episode_kpis"][f"attainment_{part}"]

    log, _ = played()
    start, end = ("arrival_s", "first_token_s") if part == "ttft" else ("first_token_s", "finish_s")
    taken = log[end] - log[start]
    exact = float(np.sort(taken)[len(taken) // 2])
    for limit in (exact, np.nextafter(exact, 0.0)):
        assert played(**{f"{part}_s": float(limit)})[1] == (taken <= limit).mean()


def test_requests_that_take_all_of_the_memory_are_served():
    tokens = {"groups": 1, "users": 1, "prefix_tokens": 15, "question_tokens": [33, 33]}
    tokens |= {"output_tokens": [16, 16], "questions": "fresh"}
    system = {"num_replicas": 1, "kv_tokens": 64, "warmup_requests": 0, "episode_requests": 4}
    env = PrefixRoutingEnv(**SMALL | system | {"workload_kwargs": tokens})
    _, masks, _, log, _ = play(env, 0, [0] * 4)
    assert all(mask[0] == 1 for mask in masks[:-1])
    assert (log["outcome"] == layout.COMPLETED).all()


def test_metrics_are_those_of_the_last_scrape(played):
    kind, env, seen, _, _, log, _ = played
    scrape = KINDS[kind].get("scrape_s", 0.05)
    found = all_requests(env)
    assert found["preemptions"].sum() == 0 or kind != "tenants"
    steady = found["preemptions"] == 0  # a preempted request waits again
    for observation, entry in zip(seen, log, strict=False):
        now = entry["arrival_s"]
        tick = now if scrape == 0.0 else np.floor(now / scrape) * scrape
        replicas = observation["replicas"]
        assert replicas[:, OF_REPLICA["metrics_age_s"]] == pytest.approx(now - tick, abs=1e-6)
        for n in range(env.problem.num_replicas):
            mine = found[(found["replica"] == n) & (found["outcome"] == layout.COMPLETED)]
            unsure = (~steady[found["replica"] == n]).any()
            # Who was routed at this very time is not yet seen.
            there = mine["available"] <= tick if scrape > 0 else mine["available"] < tick
            waiting = (there & ~(mine["admitted"] <= tick)).sum()
            running = ((mine["admitted"] <= tick) & (mine["finish"] > tick)).sum()
            if not unsure:
                assert replicas[n, OF_REPLICA["waiting"]] == waiting
                assert replicas[n, OF_REPLICA["running"]] == running


def test_rewards_are_those_of_the_requests_that_end_in_a_step(played):
    kind, env, _, _, rewards, log, info = played
    p = env.problem.settings[0]
    ends = np.append(log["arrival_s"][1:], np.inf)
    done = log["outcome"] == layout.COMPLETED
    ttft = log["first_token_s"] - log["arrival_s"]
    spent = log["finish_s"] - log["first_token_s"]
    met = done & (ttft <= p["ttft_s"] + p["ttft_s_per_token"] * log["prompt_tokens"])
    met &= spent <= p["tpot_s"] * (log["output_tokens"] - 1)
    at = log["first_token_s"] if kind == "live" else log["finish_s"]
    worth = -ttft if kind == "live" else met
    expected = np.zeros(len(log))
    np.add.at(expected, np.searchsorted(ends, at[done]), worth[done])
    assert rewards == pytest.approx(expected, abs=1e-9)
    kpis = info["episode_kpis"]
    assert kpis["attainment"] == pytest.approx(met.mean())
    assert kpis["mean_ttft_s"] == pytest.approx(ttft[done].mean())
    assert kpis["hit_rate"] == pytest.approx(
        log["hit_tokens"][done].sum() / log["prompt_tokens"][done].sum()
    )
    assert kpis["reject_rate"] == pytest.approx((log["outcome"] == layout.REJECTED).mean())
    claimed = log["match_tokens"][done]
    false = np.maximum(claimed - log["hit_tokens"][done], 0).sum() / max(claimed.sum(), 1)
    assert kpis["false_match_rate"] == pytest.approx(false)
    assert kpis["requests"] == len(log) == KINDS[kind]["episode_requests"]


def test_replicas_serve_as_in_a_replay_of_the_same_assignment(played):
    kind, env, *_ = played
    found = all_requests(env)
    rejected = found["outcome"] == layout.REJECTED
    assert rejected.any() == (kind == "admission")
    if kind == "admission":  # a replay rejects nothing
        assert (found["replica"][rejected] == -1).all()
        return
    problem = env.problem
    requests, _ = problem.draw(np_random(3)[0])
    replayed = replay_prefix(
        problem.profiles,
        requests,
        found["replica"],
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_tokens=6000,
        async_scheduling=problem.arguments.async_scheduling,
    )
    for name, source in (("first_token_s", "first"), ("finish_s", "finish")):
        assert found[source] == pytest.approx(replayed[name], rel=1e-9)
    assert (found["hit"] == replayed["hit_tokens"]).all()
    assert found["hit"].sum() > 0


@pytest.mark.parametrize("kind", ["infinite", "pooled"])
def test_hits_of_infinite_caches_are_those_of_the_definition(kind):
    env = PrefixRoutingEnv(**SMALL | {"prefix_cache": kind})
    *_, log, _ = play(env, 0)
    requests, _ = env.problem.draw(np_random(0)[0])
    found = all_requests(env)
    replica = found["replica"] if kind == "infinite" else None
    hits = requests.block_size * infinite_hits(requests, replica)
    assert (log["outcome"] == layout.COMPLETED).all()
    np.testing.assert_array_equal(found["hit"], hits)
    assert hits.sum() > 0


def test_observations_know_nothing_of_what_comes():
    env = PrefixRoutingEnv(**SMALL)
    twin = PrefixRoutingEnv(**SMALL)
    for each in (env, twin):
        each.reset(seed=1)
    for k in range(40):
        env.step(k % 3)
        twin.step(k % 3)
    # Nothing that has not happened is seen: other outputs of what still runs, other requests.
    found = twin.batch.systems.request
    later = found["outcome"] == layout.PENDING
    later[int(twin.batch.systems.env["index"][0])] = False
    found["output"][later] += 7
    found["prompt"][later] += 16
    now = twin.batch.systems.env["index"][0]
    found["output"][now] += 5
    state = twin.clone_state()
    mine, _ = env.restore_state(env.clone_state())
    theirs, _ = twin.restore_state(state)
    for name, part in mine.items():
        assert (part == theirs[name]).all(), name


def test_flat_view_is_the_dict_scaled():
    flat = PrefixRoutingFlatEnv(validate=True, **SMALL)
    env = PrefixRoutingEnv(**SMALL)
    (a, _), (b, _) = flat.reset(seed=0), env.reset(seed=0)
    for k in range(30):
        a, *_ = flat.step(k % 3)
        b, *_ = env.step(k % 3)
    raw = np.concatenate([b["request"], b["replicas"].ravel()]).astype(np.float64)
    space = env.observation_space
    high = np.concatenate([space["request"].high, space["replicas"].high.ravel()])
    logs = np.sign(raw) * np.log1p(np.abs(raw)) / np.log1p(high.astype(np.float64))
    asked, replicas = np.split(a, [len(OF_REQUEST)])
    shares = replicas.reshape(3, len(OF_REPLICA) + 1)
    told = np.concatenate([asked, shares[:, :-1].ravel()])
    assert told == pytest.approx(np.where(high <= 1, raw, logs), abs=1e-6)
    of = dict(zip(OF_REPLICA, b["replicas"].T.astype(np.float64), strict=True))
    prompt, objective = b["request"][0], 0.5 + 1e-4 * b["request"][0]
    work = of["prefill_tokens"] + np.maximum(prompt - of["match_tokens"], 0)
    expected_s = work / of["prefill_tokens_per_s"]
    assert shares[:, -1] == pytest.approx(np.log2(1 + expected_s / objective), rel=1e-5)


@pytest.mark.parametrize("failures", [None, FAILURES])
def test_score_counts_what_each_request_took_of_its_objectives(failures):
    """One within both objectives, less .3 times the logarithm of one and the larger share."""
    kwargs = SMALL | {"reward": "score", "rate": 60.0, "failures": failures}
    envs = PrefixRoutingVectorEnv(num_envs=3, autoreset_mode="Disabled", **kwargs)
    envs.reset(seed=0)
    reader, paid, told = OutcomeReader(envs), np.zeros(3), np.zeros(3)
    for k in range(envs.problem.arguments.episode_requests):
        _, reward, _, _, info = envs.step(np.full(3, k % 3))
        paid += reward
        for ended in reader.read():
            told[ended["row"]] += ended["reward"]
    np.testing.assert_allclose(paid, told)
    expected = np.zeros(3)
    for row in range(3):
        log = envs.batch.request_log(row)
        slo = envs.problem.ttft_slo_s(log["prompt_tokens"])
        ttft = (log["first_token_s"] - log["arrival_s"]) / slo
        tokens = np.maximum(log["output_tokens"] - 1, 1)
        tpot = (log["finish_s"] - log["first_token_s"]) / tokens / 0.04
        worse = np.maximum(ttft, tpot)
        lost = np.isnan(log["finish_s"])
        expected[row] = np.where(lost, -2.0, (worse <= 1) - 0.3 * np.log2(1 + worse)).sum()
    np.testing.assert_allclose(paid, expected)
    assert len(np.unique(paid)) == 3


@pytest.mark.parametrize("kind", ["tenants", "live", "admission", "failing"])
def test_dense_pays_the_change_of_what_requests_hold(kind):
    """By the observations at the decisions and the log after each step."""
    env = PrefixRoutingEnv(**({**KINDS, **FAILING}[kind] | {"reward": "dense", "rate": 300.0}))
    replicas, chance = env.problem.num_replicas, np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    slo = env.problem.ttft_slo_s
    early, held, ended, done, total = [], 0.0, 0, False, 0.0
    while not done:
        action = int(chance.integers(env.action_space.n))
        prompt = observation["request"][0].astype(float)
        told = observation["replicas"][min(action, replicas - 1)].astype(float)
        speed = told[OF_REPLICA["prefill_tokens_per_s"]]
        uncached = max(prompt - told[OF_REPLICA["match_tokens"]], 0)
        share = (told[OF_REPLICA["prefill_tokens"]] + uncached) / speed / slo(prompt)
        early.append(1 / (1 + share) - 5 * uncached / speed)
        observation, reward, done, _, _ = env.step(action)
        total += reward
        log = env.request_log()
        in_time = log["first_token_s"] - log["arrival_s"] <= slo(log["prompt_tokens"])
        smooth = log["finish_s"] - log["first_token_s"] <= 0.04 * (log["output_tokens"] - 1)
        met = int((in_time & smooth & (log["outcome"] == layout.COMPLETED)).sum())
        before, held = held, 0.0
        for k in np.flatnonzero(log["outcome"] == layout.QUEUED):
            held += early[k] if np.isnan(log["first_token_s"][k]) else float(in_time[k])
        assert reward == pytest.approx(met - ended - 0.8 + held - before, abs=1e-4)
        ended = met
    assert held == 0.0 and 0 < met < len(log)
    assert total == pytest.approx(met - 0.8 * len(log), abs=1e-9)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_can_be_played(scenario):
    problem = build_problem(view=DICT, scenario=scenario, episode_requests=40, warmup_requests=10)
    requests, predicted = problem.draw(np.random.default_rng(0))
    assert len(predicted) == requests.check().num_requests == 50
    longest = requests.prompt_tokens.astype(np.int64) + requests.output_tokens
    assert longest.max() <= (problem.capacity * problem.arguments.block_size).min()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"workload_kwargs": {"group": 3}}, "Did you mean 'groups'"),
        ({"profiles": {"card": "h100", "modle": "llama-3.1-8b"}}, "modle"),
        ({"index_kwargs": {"entry_tokens": 24}}, "entry_tokens"),
        ({"admission": True, "reward": "ttft"}, "admission"),
        ({"failures": FAILURES, "reward": "ttft"}, "failures"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        PrefixRoutingEnv(**arguments)


def test_a_request_beyond_a_replicas_memory_is_rejected():
    large = {**TENANTS, "max_context": None}
    kwargs = {**SMALL, "workload_kwargs": large, "kv_tokens": 640, "warmup_requests": 0}
    env = PrefixRoutingEnv(**kwargs)
    _, masks, _, log, info = play(env, 0)
    need = -(-(log["prompt_tokens"] + 0) // 16)
    assert (log["outcome"] == layout.REJECTED).any()
    assert 0.0 < info["episode_kpis"]["reject_rate"] < 1.0
    for mask, blocks in zip(masks, need, strict=False):
        assert (mask == (blocks <= 40)).all()


@pytest.mark.parametrize("kind", FAILING)
def test_replicas_that_fail_lose_requests_and_cache(kind):
    env = PrefixRoutingEnv(validate=True, **FAILING[kind])
    seen, masks, _, log, info = play(env, 3)
    found = all_requests(env)
    c, seed = env.problem.tables.config[0], env.batch.systems.env["failure_seed"][0]
    changes = [np.cumsum([sojourn_s(c, seed, n, k) for k in range(99)]) for n in range(3)]
    failed = found["outcome"] == layout.FAILED
    assert failed.any() and info["episode_kpis"]["failure_rate"] == pytest.approx(
        (log["outcome"] == layout.FAILED).mean()
    )
    ends = found["finish"].copy()
    for j in np.flatnonzero(failed):  # with the first failure after its arrival
        down = changes[found["replica"][j]][::2]
        ends[j] = down[np.searchsorted(down, found["available"][j])]
    for n, times in enumerate(changes):
        mine = (found["replica"] == n) & (found["outcome"] == layout.COMPLETED)
        before, after = (np.searchsorted(times, found[t][mine]) for t in ("available", "finish"))
        assert (before == after).all() and (before % 2 == 0).all()
    dark = 0
    for observation, mask, entry in zip(seen, masks, log, strict=False):
        now, replicas = entry["arrival_s"], observation["replicas"]
        up = np.array([np.searchsorted(times, now, "right") % 2 == 0 for times in changes])
        assert (replicas[:, OF_REPLICA["up"]] == up).all()
        assert (mask == (up if up.any() else 1)).all()
        dark += not up.all()
        assert (entry["outcome"] == layout.REJECTED) == (not up[entry["replica"]])
        for n in range(3):
            mine = found[found["replica"] == n]
            there = (mine["available"] < now) & (ends[found["replica"] == n] > now)
            assert replicas[n, OF_REPLICA["in_flight"]] == there.sum()
            last = changes[n][: np.searchsorted(changes[n], now, "right")][::2][-1:]
            sent = mine["available"][mine["available"] < now]
            if last.size and not (sent > last[0]).any():  # nothing since it lost its cache
                assert replicas[n, OF_REPLICA["match_tokens"]] == 0
                assert replicas[n, OF_REPLICA["index_tokens"]] == 0
    assert 5 < dark < len(log)


def test_splits_share_no_session():
    for make in (SuperposedTrace, RecordedSessions):
        parts = [set(make(split=split)._rows.tolist()) for split in ("train", "val", "eval")]
        whole = set(make()._rows.tolist())
        assert set.union(*parts) == whole and sum(map(len, parts)) == len(whole)
        assert all(len(part) > 0.05 * len(whole) for part in parts)
