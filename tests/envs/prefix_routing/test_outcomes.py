"""Outcomes of requests: told once, when they end, with what the log says of them in the end."""

import gymnasium
import numpy as np
import pytest

from servegym.envs._outcomes import OutcomeReader
from servegym.envs.prefix_routing.core import OUTCOMES

ARGUMENTS = {"num_replicas": 2, "episode_requests": 60, "warmup_requests": 10, "rate": 4.0}


@pytest.mark.parametrize(("reward", "admission"), [("slo", True), ("ttft", False), ("score", True)])
def test_every_request_is_told_once_and_when_it_has_ended(reward, admission):
    arguments = ARGUMENTS | {"admission": admission, "reward": reward}
    envs = gymnasium.make_vec("servegym/PrefixRouting-v1", num_envs=2, **arguments)
    envs.reset(seed=5)
    reader, told, paid = OutcomeReader(envs), [], np.zeros(2)
    rng = np.random.default_rng(0)
    for step in range(60):
        _, rewards, ended, _, _ = envs.step(rng.integers(0, 2 + admission, 2))
        paid += rewards
        now = envs.unwrapped.batch.systems.env["now"]
        news = reader.read()
        if step < 59:  # the last step drains the replicas
            assert not (news["finish_s"] > now[news["row"]]).any()
        told.append(news)
    assert ended.all() and len(reader.read()) == 0
    told = np.concatenate(told)
    for row in range(2):
        own = told[told["row"] == row]
        own = own[np.argsort(own["decision"])]
        log = envs.unwrapped.request_log(row)
        assert own["decision"].tolist() == list(range(60))
        assert own["reward"].sum() == pytest.approx(paid[row])
        np.testing.assert_array_equal(own["outcome"], log["outcome"])
        np.testing.assert_array_equal(own["output_tokens"], log["output_tokens"])
        done = log["outcome"] == OUTCOMES.index("completed")
        assert done.any() and done.all() != admission
        np.testing.assert_array_equal(np.isfinite(own["finish_s"]), done)
        log, own = log[done], own[done]
        np.testing.assert_array_equal(own["replica"], log["replica"])
        np.testing.assert_array_equal(own["finish_s"], log["finish_s"])
        np.testing.assert_allclose(own["ttft_s"], log["first_token_s"] - log["arrival_s"])
        pace = (log["finish_s"] - log["first_token_s"]) / (log["output_tokens"] - 1)
        np.testing.assert_allclose(own["tpot_s"], pace)
