"""PPO: masks, rows that are treated alike, learning, other ids, requests paid for."""

import numpy as np
import pytest
import torch

from servegym.agents import load_policy, ppo, ppo_requests
from servegym.envs._outcomes import OutcomeReader

from .runs import lines, tiny


@pytest.mark.parametrize("shape", [(24,), (3, 8)])
def test_illegal_actions_have_no_probability(shape):
    torch.manual_seed(0)
    net = ppo.Agent(shape, 4, 16)
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    log_pi, value = net(torch.rand(2, *shape), mask)
    assert torch.isfinite(log_pi).all() and value.shape == (2,)
    assert (log_pi.exp()[mask == 0] == 0).all()
    torch.testing.assert_close(log_pi.exp().sum(-1), torch.ones(2))


def test_rows_are_treated_alike_and_their_number_is_free():
    torch.manual_seed(0)
    net, order = ppo.Agent((3, 8), 5, 16), [2, 0, 1]  # one action after those of the rows
    x = torch.rand(5, 3, 8)
    with torch.no_grad():
        net.score.weight.mul_(100)
        one, value = net(x, torch.ones(5, 5))
        two, same = net(x[:, order], torch.ones(5, 5))
        more, again = net(torch.cat([x, x], 1), torch.ones(5, 8))
    assert (one[:, 1] - one[:, 2]).abs().max() > 1e-3
    torch.testing.assert_close(one[:, [0, 3, 1, 2, 4]], two)
    torch.testing.assert_close(value, same)
    torch.testing.assert_close(value, again)
    torch.testing.assert_close(more[:, 1:4], more[:, 4:7])


SHORT = ("episode_requests=20", "warmup_requests=5")


@pytest.mark.parametrize(
    ("env_id", "settings", "view"),
    [
        ("CartPole-v1", (), None),
        ("servegym/PrefixRoutingFlat-v3", ("num_replicas=2", *SHORT), "flat"),
        ("servegym/LLMRoutingExperts-v3", ("episode_requests=20", "num_experts=3"), "experts"),
    ],
)
def test_other_ids_train(tmp_path, env_id, settings, view):
    run = ppo.train(tiny("ppo", tmp_path, env_id=env_id, set=settings)[1])
    log = lines(run)
    assert "charts/episodic_return" in log[-1] or "charts/episodic_return" in log[-2]
    if view is not None:
        policy = load_policy(run)
        assert policy.env_view == view
        with pytest.raises(ValueError, match="trained on"):
            policy.act(np.zeros((1, 3, 1), np.float32), np.ones((1, 4)))


def test_a_decision_is_paid_for_its_own_request(tmp_path, monkeypatch):
    """The rewards of a rollout are those of the requests, by the decisions that sent them."""
    seen = []
    read = OutcomeReader.read
    monkeypatch.setattr(OutcomeReader, "read", lambda self: seen.append(read(self)) or seen[-1])
    prefixed = {"env_id": "servegym/PrefixRoutingSummary-v3", "set": ("num_replicas=2", *SHORT)}
    run = ppo_requests.train(tiny("ppo_requests", tmp_path, **prefixed)[1])
    for ended in seen:  # each decision of each environment once
        pairs = set(zip(ended["row"].tolist(), ended["decision"].tolist(), strict=True))
        rows, steps = ended["row"].max() + 1, ended["decision"].max() + 1
        assert len(pairs) == len(ended) == rows * steps and np.ptp(ended["reward"]) > 0
    assert seen and "charts/episodic_return" in lines(run)[-1]
    assert load_policy(run).env_view == "summary"
    args = tiny("ppo_requests", tmp_path / "b", env_id="servegym/ServerlessMoEFlat-v1")[1]
    with pytest.raises(ValueError, match="env_id: .* are not told when they end"):
        ppo_requests.train(args)
