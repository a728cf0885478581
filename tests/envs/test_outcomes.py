"""Outcomes of requests: told once, when they end, with what the log says of them in the end."""

import gymnasium
import numpy as np
import pytest

import servegym  # noqa: F401 - registers the ids
from servegym.envs._outcomes import OutcomeReader

ROUTING, PREFIX = "servegym/LLMRouting-v1", "servegym/PrefixRouting-v1"
LIMITS = {"rate": 9.0, "episode_requests": 120, "latency_requirement_s": (0.02, 0.03)}
REPLICAS = {"num_replicas": 2, "episode_requests": 60, "warmup_requests": 10, "rate": 4.0}
CASES = {
    "routing": (ROUTING, LIMITS | {"reward": "completed_qos"}),
    "slo": (PREFIX, REPLICAS | {"reward": "slo", "admission": True}),
    "ttft": (PREFIX, REPLICAS | {"reward": "ttft"}),
    "score": (PREFIX, REPLICAS | {"reward": "score", "admission": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_request_is_told_once_and_when_it_has_ended(case):
    env_id, arguments = CASES[case]
    steps, routing = arguments["episode_requests"], env_id == ROUTING
    envs = gymnasium.make_vec(env_id, num_envs=2, autoreset_mode="Disabled", **arguments)
    batch = envs.unwrapped.batch
    clock = batch.env if routing else batch.systems.env
    reader, rng = OutcomeReader(envs), np.random.default_rng(0)
    for seed in (1, 2):  # a new episode begins anew
        envs.reset(seed=seed)
        told, paid, before = [], np.zeros(2), np.zeros(2)
        for step in range(steps):
            _, rewards, ended, _, _ = envs.step(rng.integers(envs.single_action_space.n, size=2))
            paid += rewards
            news, now = reader.read(), clock["now"].copy()
            assert (news["decision"] <= step).all()
            finish = news["finish_s"]
            assert not (finish <= before[news["row"]]).any()
            if step < steps - 1:  # the last step drains the replicas
                assert not (finish > now[news["row"]]).any()
            told, before = [*told, news], now
        assert ended.all() and len(reader.read()) == 0
        for row in range(2):
            own = np.concatenate([news[news["row"] == row] for news in told])
            own, log = own[np.argsort(own["decision"])], batch.request_log(row)
            assert own["decision"].tolist() == list(range(steps))
            assert own["qos" if routing else "reward"].sum() == pytest.approx(paid[row])
            np.testing.assert_array_equal(own["outcome"], log["outcome"])
            done = np.isfinite(log["finish_s"])
            assert done.any() and done.all() == (case == "ttft")
            np.testing.assert_array_equal(np.isfinite(own["finish_s"]), done)
            own, log, lost = own[done], log[done], own[~done]
            where = "expert" if routing else "replica"
            for name in ("finish_s", "output_tokens", where, *["score"] * routing):
                np.testing.assert_array_equal(own[name], log[name], err_msg=name)
            if routing:
                assert np.isnan(lost["score"]).all() and not lost["output_tokens"].any()
            else:
                np.testing.assert_allclose(own["ttft_s"], log["first_token_s"] - log["arrival_s"])
                pace = (log["finish_s"] - log["first_token_s"]) / (log["output_tokens"] - 1)
                np.testing.assert_allclose(own["tpot_s"], pace)
