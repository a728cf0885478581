"""The kernel against the slow literal reference: observations, masks, rewards and logs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servegym.envs.llm_routing import config
from servegym.envs.llm_routing.core import OUTCOMES, RoutingBatch
from servegym.envs.llm_routing.kernel import layout
from servegym.envs.llm_routing.kernel.iterations import sojourn_s
from servegym.envs.llm_routing.kernel.law import pack_law
from servegym.hardware_profiles import LawTables
from servegym.hardware_profiles.law import Surplus

from .reference import ExpertConfig, ReferenceConfig, ReferenceSimulator, TableLaw


def random_law(rng: np.random.Generator) -> LawTables:
    """A law of rising, irregular tables; the axes differ from expert to expert."""

    def axis(count: int, top: float) -> np.ndarray:
        # Begins at 1: below it the outermost slope goes on, and must not reach negative times.
        return np.unique(np.append(np.round(rng.uniform(1, top, count)), 1.0))

    dense, chunk, context = axis(6, 400), axis(4, 300), axis(3, 300)
    sequences, length, head = axis(3, 8), axis(6, 500), axis(3, 8)
    rise = lambda x, scale: np.cumsum(rng.uniform(0.2, 1.0, len(x))) * scale  # noqa: E731
    return LawTables(
        dense_tokens=dense,
        dense_s=0.004 + rise(dense, 0.004),
        chunk_tokens=chunk,
        context_tokens=context,
        chunk_attention_s=rise(chunk, 0.001)[:, None] + rise(context, 0.001),
        decode_sequences=sequences,
        decode_context_tokens=length,
        decode_attention_s=rise(sequences, 0.001)[:, None] + rise(length, 0.002),
        head_sequences=head,
        head_s=0.001 + rise(head, 0.0003),
    )


def linear_law(rng: np.random.Generator) -> LawTables:
    base, k1, kb, k2 = rng.uniform([0.0, 1e-5, 1e-4, 1e-6], [0.02, 2e-4, 1e-3, 5e-5])
    b, x = np.array([0.0, 1.0, 64.0]), np.array([0.0, 1000.0])
    return LawTables(
        dense_tokens=np.array([0.0, 1000.0]),
        dense_s=base + k1 * np.array([0.0, 1000.0]),
        chunk_tokens=np.array([0.0]),
        context_tokens=np.array([0.0]),
        chunk_attention_s=np.zeros((1, 1)),
        decode_sequences=b,
        decode_context_tokens=x,
        decode_attention_s=(kb - k1) * b[:, None] + k2 * b[:, None] * x,
        head_sequences=np.array([0.0]),
        head_s=np.zeros(1),
    )


def no_surplus(sequences) -> Surplus:
    return Surplus(0.0, 0.0 * np.asarray(sequences), 0.0 * np.asarray(sequences))


def random_surplus(rng: np.random.Generator):
    """Times for mixed iterations and unequal contexts, in every other system."""
    chunk, decode, mixed = rng.uniform(0, [1e-6, 4e-5, 6e-5])
    if rng.random() < 0.5:
        return no_surplus
    return lambda b: Surplus(chunk, decode / (1.0 + np.asarray(b)), mixed + 0.0 * np.asarray(b))


def profile_of(
    tables, capacity, mixed=1.0, surplus=no_surplus, slopes=None, host=None
) -> SimpleNamespace:
    """What the engines read of a profile."""
    return SimpleNamespace(
        tables=lambda: tables,
        mixed_decode_attention_s=lambda: tables.decode_attention_s * mixed,
        surplus=surplus,
        kv_capacity_tokens=capacity,
        estimator=slopes or SimpleNamespace(k1=0.0, k2=0.0),
        plans_ahead=False,
        host=host or {},
    )


def make_case(seed: int, requests: int = 40, **choices):
    """One random system, its episode, and the reference of the same."""
    rng = np.random.default_rng(seed)
    pick = lambda name, options: choices.get(name, options[rng.integers(len(options))])  # noqa: E731
    n = int(pick("num_experts", [1, 2, 3]))
    scheduler = pick("scheduler", ["orca", "chunked_prefill"])
    memory_policy = pick("memory_policy", ["reserve", "paged"])
    ahead = bool(choices.get("async_scheduling", False))
    running, waiting = int(pick("running", [1, 2, 5])), int(pick("waiting", [1, 3, 5]))
    block = int(pick("block_size", [1, 3, 7, 16]))
    longest = int(pick("max_output_tokens", [1, 12, 60]))
    budget = int(pick("budget", [max(8, running), 64, 500]))
    reward = pick("reward", ["qos_aware", "completed_qos", "paid_forward", "dense"])
    penalty = pick("penalty", ["literal", "new_violations"])
    estimator = pick("estimator", ["true", "predicted"])
    limit = float(pick("limit", [0.02, 0.05, 0.3]))
    rate = float(pick("rate", [2.0, 20.0, 200.0]))
    delay = float(pick("router_delay_s", [0.0, 0.005, 0.2]))
    failures = choices.get("failures")
    longest_prompt = int(choices.get("longest_prompt", 149))
    prompts = rng.integers(1, longest_prompt + 1, requests)
    scores = rng.uniform(0, 1, (requests, n)).astype(np.float32)
    lengths = rng.integers(1, longest + 1, (requests, n))
    said = rng.uniform(0, 1, (requests, n)).astype(np.float32)
    guessed = (rng.uniform(0, longest, (requests, n))).astype(np.float32)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests)) + rng.uniform(0.01, 0.02)
    need = longest_prompt + 1 + longest
    profiles = []
    for _ in range(n):
        tables = linear_law(rng) if rng.random() < 0.3 else random_law(rng)
        mixed = rng.choice([1.0, 1.7])
        # From "one request and a bit" to "never full", so that memory binds in some systems.
        capacity = int(need * rng.choice(choices.get("memory", [0.7, 1.1, 2.0, 6.0]))) + block
        surplus = random_surplus(np.random.default_rng([seed, len(profiles)]))
        slopes = SimpleNamespace(k1=rng.uniform(0, 1e-3), k2=rng.uniform(0, 1e-4))
        profiles.append(profile_of(tables, capacity, mixed, surplus, slopes))

    engine = {
        "scheduler": scheduler,
        "memory_policy": memory_policy,
        "async_scheduling": ahead,
        "running_capacity": running,
        "prefill_token_budget": budget,
        "block_size": block,
        "bandwidth_bps": 1e5,
        "router_delay_s": delay,
    }
    given = config.RoutingArguments.fill(
        {**engine, "waiting_capacity": waiting, "episode_requests": requests, "failures": failures}
    )
    cfg = config.engine_config(given, running)
    c = cfg[0]
    c["num_experts"], c["waiting_capacity"], c["slots"] = n, waiting, running + waiting
    c["num_requests"], c["max_output_tokens"] = requests, longest
    c["reward"], c["penalty"] = config.REWARDS[reward], config.PENALTIES[penalty]
    c["predicted_estimator"] = config.ESTIMATORS[estimator]
    table = np.stack(
        [np.repeat(prompts[:, None], n, 1), scores, lengths, said, guessed], axis=-1
    ).astype(np.float32)
    problem = config.Problem(
        arguments=given,
        cfg=cfg,
        law=pack_law(profiles, running),
        table=table,
        rows=np.arange(requests, dtype=np.int32),
        profiles=tuple(profiles),
        models=tuple(str(k) for k in range(n)),
        catalog=None,
        columns=np.arange(n),
        arrivals=None,
    )
    batch = RoutingBatch(problem, 1)
    batch.arrivals[0], batch.rows[0] = arrivals, np.arange(requests)
    batch.env["latency_requirement"] = limit
    batch.env["failure_seed"] = seed % 2**32
    reference = ReferenceSimulator(
        ReferenceConfig(
            experts=tuple(
                ExpertConfig(
                    TableLaw(p.tables(), p.mixed_decode_attention_s(), p.surplus),
                    p.kv_capacity_tokens,
                    p.estimator.k1,
                    p.estimator.k2,
                    outages(c, seed % 2**32, k) if failures else (),
                )
                for k, p in enumerate(profiles)
            ),
            **engine,
            waiting_capacity=waiting,
            max_output_tokens=longest,
            latency_requirement_s=limit,
            reward=reward,
            penalty=penalty,
            estimator=estimator,
            record_iterations=True,
        ),
        arrivals,
        prompts,
        scores,
        lengths,
        said,
        guessed,
    )
    return batch, reference, rng


def outages(c, seed, n, count=300):
    """Times at which expert n goes down and comes back."""
    changes = np.cumsum([sojourn_s(c, seed, n, k) for k in range(2 * count)])
    return tuple((float(down), float(up)) for down, up in changes.reshape(-1, 2))


def assert_same_observation(batch, reference, where):
    theirs, mask = reference.observe()
    for name, value in theirs.items():
        if name in ("running", "waiting"):
            value = np.minimum(value, [8192, 1, 1e9, 1, 1e9, layout.MAX_LATENCY_S_PER_TOKEN])
        mine = batch.observation[name][0]
        np.testing.assert_allclose(mine, value, rtol=2e-6, atol=1e-7, err_msg=f"{where}: {name}")
    np.testing.assert_array_equal(batch.action_mask[0], mask, err_msg=where)


def run_case(seed: int, **choices) -> dict[str, float]:
    batch, reference, rng = make_case(seed, **choices)
    which = np.ones(1, dtype=np.int8)
    batch.begin(which)
    n = batch.problem.num_experts
    for j in range(batch.problem.arguments.episode_requests):
        assert_same_observation(batch, reference, f"seed {seed}, request {j}")
        action = int(rng.integers(0, n + 1)) if rng.random() < 0.3 else int(rng.integers(1, n + 1))
        batch.step(np.array([action]), which)
        reward, _, ended = reference.step(action)
        assert batch.out[0, 0] + batch.out[0, 1] == pytest.approx(reward, abs=1e-6)
        assert bool(batch.out[0, 2]) == ended
    assert_same_observation(batch, reference, f"seed {seed}, end")
    log = batch.request_log(0)
    for mine, theirs in zip(log, reference.log, strict=True):
        where = f"seed {seed}, request {theirs.request}"
        assert OUTCOMES[mine["outcome"]] == theirs.outcome, where
        assert mine["expert"] == theirs.expert, where
        assert mine["preemptions"] == theirs.preemptions, where
        for name, value in (
            ("available_s", theirs.available),
            ("admitted_s", theirs.admitted),
            ("first_token_s", theirs.first_token),
            ("finish_s", theirs.finish),
        ):
            if theirs.outcome == "completed":
                assert mine[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (where, name)
    kpis = batch.kpis(0)
    limit = reference.config.latency_requirement_s
    done = [e for e in reference.log if e.outcome == "completed"]
    qos = sum(e.qos(limit) for e in reference.log) / len(reference.log)
    assert kpis["avg_qos"] == pytest.approx(qos, abs=1e-6)
    if done:
        assert kpis["mean_e2e_s"] == pytest.approx(np.mean([e.e2e for e in done]))
        assert kpis["mean_ttft_s"] == pytest.approx(np.mean([e.ttft for e in done]))
        parts = [kpis[f"mean_{k}_s"] for k in ("communication", "routing", "waiting", "inference")]
        assert sum(parts) == pytest.approx(kpis["mean_e2e_s"])
        several = [e.tpot for e in done if e.output_tokens > 1]
        if several:
            assert kpis["mean_tpot_s"] == pytest.approx(np.mean(several))
        else:
            assert math.isnan(kpis["mean_tpot_s"])
    outcomes = [OUTCOMES[k] for k in log["outcome"]]
    if batch.problem.cfg["uptime_s"][0] > 0:
        assert kpis["failure_rate"] == pytest.approx(outcomes.count("failed") / len(outcomes))
    history = [each for expert in reference.experts for each in expert.history]
    return {
        "preemptions": float(log["preemptions"].sum()),
        "several": sum(len(each.preempted) > 1 for each in history),
        "running": max((len(each.decodes) + len(each.chunks) for each in history), default=0),
        "full": sum(
            each.blocks == expert.capacity_blocks
            for expert in reference.experts
            for each in expert.history
        ),
        "done": len(done),
        "failed": outcomes.count("failed"),
        "rejected": outcomes.count("rejected"),
    }


@st.composite
def under_pressure(draw, most):
    """Choices for a system with short prompts, long answers and less memory than slots.

    Many requests run and take blocks at once, so that the newest often frees too little.
    """
    running = draw(st.sampled_from([8, 16, 80, most]))
    scheduler, memory_policy = draw(
        st.sampled_from(
            [("orca", "paged")] * 2
            + [("chunked_prefill", "paged")] * 6
            + [("chunked_prefill", "reserve")]
        )
    )
    share = draw(st.sampled_from([0.08, 0.14, 0.2]))  # of the slots that memory lasts for
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "requests": 24 + running * 5 // 4,
        "num_experts": 1,
        "scheduler": scheduler,
        "memory_policy": memory_policy,
        "running": running,
        "waiting": draw(st.sampled_from([running // 2, running])),
        "budget": running + draw(st.sampled_from([8, 64, 500])),
        "block_size": draw(st.sampled_from([1, 2, 4, 16])),
        "longest_prompt": draw(st.sampled_from([6, 30])),
        "max_output_tokens": draw(st.sampled_from([24, 60])),
        "memory": [1.0 + share * running],
        "rate": draw(st.sampled_from([100.0, 300.0, 1000.0])) * math.sqrt(running),
    }


def assert_equal_under_pressure(examples: int, most: int, ahead: bool, **options) -> None:
    """The kernel equals the reference in systems most of which preempt, fill up and reject."""
    seen = []

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), **options
    )
    @given(under_pressure(most))
    def compare(choices):
        chunked = choices["scheduler"] == "chunked_prefill"
        seen.append(run_case(**choices, async_scheduling=ahead and chunked))

    compare()
    share = {name: np.mean([each[name] > 0 for each in seen]) for name in seen[0]}
    assert share["preemptions"] >= 0.5, share
    assert share["several"] >= 0.2, share
    assert share["full"] >= 0.4, share
    assert share["rejected"] >= 0.5, share
    assert max(each["running"] for each in seen) > 64


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1))
def test_equal_on_random_systems(seed):
    run_case(seed)


@pytest.mark.parametrize("scheduler", ["orca", "chunked_prefill"])
@pytest.mark.parametrize("memory_policy", ["reserve", "paged"])
def test_equal_in_every_mode(scheduler, memory_policy):
    for seed in range(6):
        run_case(seed, scheduler=scheduler, memory_policy=memory_policy)


def test_equal_when_iterations_are_planned_ahead():
    """Scarce slots, scarce memory and neither; some requests find the expert idle."""
    preempted = 0.0
    for seed in range(24):
        choices = {}
        if seed % 2:
            choices = {
                "memory_policy": "paged",
                "max_output_tokens": 60,
                "running": 5,
                "waiting": 5,
            }
        preempted += run_case(
            seed,
            scheduler="chunked_prefill",
            async_scheduling=True,
            rate=(5.0, 20.0, 200.0)[seed % 3],
            **choices,
        )["preemptions"]
    assert preempted > 20


@pytest.mark.parametrize("ahead", [False, True])
def test_equal_when_memory_binds(ahead):
    assert_equal_under_pressure(40, most=16, ahead=ahead, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_equal_when_memory_binds_in_more_systems(ahead):
    assert_equal_under_pressure(300, most=256, ahead=ahead)


FAILURES = {"mean_time_to_failure_s": 0.6, "mean_time_to_repair_s": 0.3}


def test_equal_with_failing_experts():
    failed = rejected = 0
    for seed in range(8):
        seen = run_case(seed, failures=FAILURES)
        failed += seen["failed"]
        rejected += seen["rejected"]
    assert failed > 10 and rejected > 10


def test_times_between_failures_and_repairs_are_exponential():
    cfg = np.zeros(1, layout.CONFIG)
    cfg["uptime_s"], cfg["downtime_s"] = 50.0, 4.0
    stays = np.array(
        [[sojourn_s(cfg[0], s, n, k) for k in range(40)] for s in range(50) for n in range(5)]
    )
    for part, mean in ((stays[:, ::2], 50.0), (stays[:, 1::2], 4.0)):
        assert part.mean() == pytest.approx(mean, rel=0.06)  # 5,000 draws: 4 standard errors
        assert part.std() == pytest.approx(mean, rel=0.1)
        assert (part > mean).mean() == pytest.approx(math.exp(-1), abs=0.03)
    assert len(np.unique(stays)) == stays.size


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3000, 500))
def test_equal_on_many_random_systems(first):
    for seed in range(first, first + 500):
        run_case(seed)
