"""The planner with what it otherwise has to guess: that it is true, that it is used, the table."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from servegym.baselines.serverless_moe.base import observed_row  # noqa: E402
from servegym.baselines.serverless_moe.system import ServerlessSystem  # noqa: E402
from servegym.baselines.serverless_moe.warm_planner import WarmPlanner  # noqa: E402
from servegym.envs.serverless_moe.vector_env import ServerlessMoEVectorEnv  # noqa: E402
from servegym.experiments.figures.beyond.serverless import information_value  # noqa: E402
from servegym.experiments.output import read_rows  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402

TOY = {"model": "toy", "episode_requests": 12}


@pytest.fixture(scope="module")
def system():
    return ServerlessSystem.from_kwargs(split="eval", **TOY)


def play(policy, episodes=2):
    env = ServerlessMoEVectorEnv(episodes, split="eval", **TOY)
    if policy.needs_env:
        policy.bind(env)
    observation, info = env.reset(seed=0)
    policy.reset(episodes, seed=0)
    actions = []
    for _ in range(TOY["episode_requests"]):
        actions.append(policy.act(observation, info["action_mask"]))
        observation, *_, info = env.step(actions[-1])
    return np.array(actions)


def test_without_information_it_is_the_planner(system):
    plain = WarmPlanner(system, requests=20)
    assert (play(plain) == play(information_value.InformedPlanner(plain, "nothing", ()))).all()
    assert (plain.name, plain.clairvoyant) == ("warm_planner", False)


def test_what_it_knows_is_true(system):
    env = ServerlessMoEVectorEnv(1, split="eval", **TOY)
    observation, info = env.reset(seed=3)
    planner = WarmPlanner(system, requests=20)
    policies = {
        known: information_value.InformedPlanner(planner, known, (known,))
        for known in ("regime", "gap", "request")
    }
    for policy in policies.values():
        policy.bind(env)
        policy.reset(1)
    arrays, kinds = env.batch.arrays, set()
    for index in range(TOY["episode_requests"]):
        observed = observed_row(system, observation, 0)
        # The medians of the regimes are 0.2 and 1 ms.
        regime = int(arrays.trem[0, index + 1].mean() > 0.5e-3)
        for name in ("regime", "request"):
            assert policies[name].regimes(0, observed).tolist() == np.eye(2)[regime].tolist()
        assert sorted(policies["gap"].regimes(0, observed)) == [0.1, 0.9]
        last = index + 1 == TOY["episode_requests"]
        warm = not last and arrays.requests[0, index + 1]["gap"] <= 300.0
        later, worth = policies["gap"].later(0), policies["gap"].worth
        assert later == pytest.approx(worth / system.reuse_chance() if warm else 0 * worth)
        assert (policies["regime"].later(0) == worth).all()
        kinds.add((regime, warm))
        # The reward that it expects of the request is the one that comes.
        action = policies["request"].act(observation, info["action_mask"])
        expected = policies["request"].now(0, observed)[(regime, *action[0])]
        observation, reward, *_, info = env.step(action)
        if not last:
            assert reward[0] == pytest.approx(expected, rel=0.02)
    assert len(kinds) > 2


def test_shares_of_the_gap():
    known = "knows the request and the gap"
    at = {"greedy_warm": -1.0, "warm_planner": -0.8, known: -0.3, "lookahead": 0.0}
    found = information_value.shares({name: np.array([value, value]) for name, value in at.items()})
    assert found == pytest.approx({"planning": 0.2, "information": 0.5, "rest": 0.3})


def test_table_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(information_value, "SETTING", TOY)
    assert information_value.main(["--episodes", "3", "--out", str(tmp_path)]) == 0
    rows = {row["policy"]: row for row in read_rows(tmp_path / "information_value.csv")}
    assert len(rows) == 3 + len(information_value.VARIANTS)
    assert rows["warm_planner"]["minus_planner"] == 0.0
    best = rows["knows the request and the gap"]["mean_reward"]
    assert best > rows["warm_planner"]["mean_reward"]
    assert rows["lookahead"]["mean_reward"] > best - 0.05
    assert (tmp_path / "information_value.png").stat().st_size > 5_000
    (found,) = read_record(tmp_path / "information_value.csv")["notes"]
    assert found["planning"] + found["information"] + found["rest"] == pytest.approx(1.0)
