"""A rule as a policy: what it is shown of the environment, and one rule a row."""

import gymnasium
import pytest

from servegym.baselines.prefix_routing import RulePolicy
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.prefix_routing.view import Rule

SMALL = {
    "workload_kwargs": {"groups": 4, "users": 3, "prefix_tokens": 600, "output_tokens": 50},
    "num_replicas": 3,
    "rate": 20.0,
    "episode_requests": 60,
    "warmup_requests": 20,
    "index_kwargs": {"entry_tokens": 128},
}


class Witness(Rule):
    """Takes turns and remembers what it was shown."""

    name = "witness"

    def __init__(self):
        self.views, self.chosen = [], []

    def choose_of(self, view, replicas):
        self.views.append(view)
        self.chosen.append(int(replicas[len(self.views) % len(replicas)]))
        return self.chosen[-1]


def play(policy, num_envs, seed=0):
    envs = gymnasium.make_vec("servegym/PrefixRouting-v1", num_envs=num_envs, **SMALL)
    observation, info = envs.reset(seed=seed)
    policy.reset(num_envs, seed)
    states = []
    for _ in range(SMALL["episode_requests"]):
        batch = envs.unwrapped.batch
        states.append((batch.gateway.replica.copy(), batch.systems.env.copy()))
        actions = policy.act(observation, info["action_mask"])
        observation, *_, info = envs.step(actions)
    return states, envs.unwrapped


def test_a_rule_is_shown_what_the_gateway_knows():
    made = []

    def make():
        made.append(Witness())
        return made[-1]

    system = PrefixSystem.from_kwargs(**SMALL)
    policy = RulePolicy(system, make, "witness")
    states, envs = play(policy, 2)
    rules = made[-2:]
    prompts = envs.batch.gateway.request["prompt"]
    sessions = envs.batch.episodes.ids[..., 0]
    for row, rule in enumerate(rules):
        assert len(rule.views) == SMALL["episode_requests"]
        last = {}
        decisions = zip(rule.views, rule.chosen, states, strict=True)
        for view, chosen, (known, engine) in decisions:
            index = engine["index"][row]
            assert view.prompt_tokens == prompts[row, index]
            assert view.session == sessions[row, index]
            assert view.now_s == pytest.approx(engine["now"][row], rel=1e-6)
            assert view.block_size == 16 and view.index_block == 128
            for mine, theirs in (
                ("match_tokens", "match"),
                ("in_flight", "in_flight"),
                ("prefill_tokens", "prefill"),
                ("context_tokens", "context"),
                ("decode_blocks", "blocks"),
                ("waiting", "waiting"),
                ("running", "running"),
                ("capacity_tokens", "kv_tokens"),
            ):
                assert (getattr(view, mine) == known[theirs][row]).all(), mine
            assert view.kv == pytest.approx(known["usage"][row])
            if view.session in last:  # else it may have begun in the warm-up
                assert view.last_replica == last[view.session]
            last[view.session] = chosen
        assert len(last) < len(rule.views)
