"""PPO and MAPPO for expert placement: symmetries, what they see, learning, resuming, loading."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servegym.agents import load_policy, mappo_placement, ppo_placement  # noqa: E402
from servegym.agents.ppo_placement import (  # noqa: E402
    Args,
    Features,
    greedy,
    group_advantage,
    log_prob,
    make_envs,
)
from servegym.baselines.expert_placement.heuristics import uniform, whole_layer  # noqa: E402
from servegym.baselines.expert_placement.initial_placement import InitialPlacement  # noqa: E402
from servegym.envs.expert_placement.decode import decode_scores  # noqa: E402
from servegym.envs.expert_placement.env import ExpertPlacementEnv, make_problem  # noqa: E402
from servegym.experiments.evaluate import evaluate  # noqa: E402

TOY = ("model=toy",)
QUICK = {
    "set": (*TOY, "epoch_s=40", "history_requests=5"),
    "base": "best_heuristic",
    "num_envs": 8,
    "group_size": 4,
    "width": 16,
    "total_timesteps": 96,
    "eval_every": 32,
    "eval_episodes": 2,
}
agents = pytest.mark.parametrize("module", [ppo_placement, mappo_placement], ids=["ppo", "mappo"])


def cluster_of(order):
    """A toy cluster whose three servers differ in everything, in some order."""
    order = np.array(order)
    latency = np.array([[0.0, 0.002, 0.010], [0.002, 0.0, 0.005], [0.010, 0.005, 0.0]])
    return make_problem(
        {
            "model": "toy",
            "cluster_kwargs": {
                "gpus": [1, 1, 1],
                "slots": np.array([10, 14, 22])[order].tolist(),
                "nic_bps": np.array([500e6, 300e6, 100e6])[order].tolist(),
                "latency_s": latency[np.ix_(order, order)].tolist(),
            },
        }
    ).cluster


def observe(seed, servers=3, layers=4, experts=8, batch=2, first=True):
    rng = np.random.default_rng(seed)
    return {
        "counts": rng.integers(1, 1000, (batch, servers, layers, experts)).astype(np.float32),
        "placement": rng.integers(0, 2, (batch, servers, layers, experts)).astype(np.int8),
        "in_system": rng.integers(0, 9, (batch, servers)).astype(np.float32),
        "arrivals": rng.integers(0, 40, (batch, servers)).astype(np.float32),
        "link_backlog_s": rng.random((batch, servers)).astype(np.float32),
        "window_s": np.full((batch, 1), 300.0, np.float32),
        "progress": np.full((batch, 1), 0.0 if first else 0.5, np.float32),
    }


def trained(module, seed=0):
    """An agent whose outputs are far from those at initialisation."""
    torch.manual_seed(seed)
    agent = module.Agent(module.Features.columns, 16)
    for parameter in agent.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return agent


def zero_plan(features, seen):
    """The plan for one observation with every output of the network zero."""
    _, log_share = features({name: part[None] for name, part in seen.items()})
    return features.plan(torch.zeros(*log_share.shape[:3], features.outputs), log_share)[0]


def test_exchanged_servers_exchange_their_plans():
    order, seen = [2, 0, 1], observe(0)
    exchanged = {
        name: part[:, order] if part.shape[1] == 3 else part for name, part in seen.items()
    }
    agent = trained(ppo_placement)
    plan, other = (
        greedy(agent, Features(cluster_of(servers), "whole_layer"), given)["plan"]
        for servers, given in (([0, 1, 2], seen), (order, exchanged))
    )
    np.testing.assert_array_equal(plan[:, order], other)
    assert (plan[:, order] != plan).any()


def test_exchanged_experts_exchange_their_scores():
    rng, seen = np.random.default_rng(1), observe(1)
    features = Features(cluster_of([0, 1, 2]), "whole_layer")
    # Distinct counts, as scores of equal experts are ranked by number.
    seen["counts"] = rng.permuted(
        np.broadcast_to(np.arange(1, 9) ** 2, seen["counts"].shape), axis=3
    ).astype(np.float32)
    seen["counts"] += np.arange(4, dtype=np.float32)[:, None] / 7
    order = rng.permutation(8)
    exchanged = seen | {name: seen[name][..., order] for name in ("counts", "placement")}
    agent = trained(ppo_placement)
    plan, other = (greedy(agent, features, given)["plan"] for given in (seen, exchanged))
    np.testing.assert_array_equal(plan[..., order], other)


def test_height_orders_layers_and_slope_experts():
    features, seen = Features(cluster_of([0, 1, 2]), "none"), observe(2)
    _, log_share = features(seen)
    z = torch.zeros(2, 3, 4, 2)
    z[:, :, 3, 0] = 100.0  # layer 3 before all others
    ranks = features.plan(z, log_share)
    assert (ranks[:, :, 3].min(-1) > ranks[:, :, :3].max((2, 3))).all()
    assert (np.sort(ranks.reshape(2, 3, -1)) == np.linspace(0, 1, 32, dtype=np.float32)).all()
    flat = features.plan(torch.zeros(2, 3, 4, 2), log_share).reshape(2, 3, -1)
    share = np.take_along_axis(log_share.reshape(2, 3, -1).numpy(), flat.argsort(-1), -1)
    assert (np.diff(share) >= 0).all()  # equal heights: the most frequent experts of all layers


def test_zero_action_is_the_base():
    env = ExpertPlacementEnv(action_mode="expert_score", epochs=1)
    seen, _ = env.reset(seed=0)
    cluster = env.problem.cluster
    features = Features(cluster, "whole_layer")
    plan = zero_plan(features, seen)
    got = cluster.server_view(env.system.decode(plan))
    counts = seen["counts"].astype(float)
    want = cluster.server_view(whole_layer(counts, cluster.slots, cluster.gpu_server))
    assert features.base.sum() == 8 + 8 + 19
    np.testing.assert_array_equal(got.all(axis=2), want.all(axis=2))
    assert (got == want).mean() > 0.97  # single experts that fill the rest


@agents
def test_scrambled_future_leaves_actions_unchanged(module):
    features = module.Features(make_problem({"model": "toy"}).cluster, "none")
    agent = trained(module)
    agent.move.bias.data[:] = 5.0

    def play(known_s):
        """Actions of an episode whose prompts after a time are others."""
        env = ExpertPlacementEnv(
            model="toy", epochs=4, epoch_s=50.0, rotate_s=100.0, action_mode="placement"
        )
        cluster = env.problem.cluster
        seen, _ = env.reset(seed=3)
        late = env.system.requests.arrival > known_s
        env.system.simulator.load.request["prompt"][late] = np.random.default_rng(0).choice(
            env.problem.prompts.tokens.size, late.sum()
        )
        found = []
        for _ in range(4):
            rows = {name: part[None] for name, part in seen.items()}
            if module is mappo_placement:
                action = module.greedy(agent, features, cluster, rows)
                plan = action["plan"][0]
            else:
                action = greedy(agent, features, rows)
                target = env.system.simulator.target()
                plan = decode_scores(cluster, action["plan"][0], env.system.counts(), target)
            migrate = int(action["migrate"][0])
            found.append((migrate, plan.tobytes()))
            seen, *_ = env.step({"migrate": migrate, "plan": plan})
        return found

    plain = play(np.inf)
    for k in range(4):
        assert play(50.0 * k)[: k + 1] == plain[: k + 1]
    assert play(0.0) != plain  # it does react to what it has seen
    assert [moved for moved, _ in plain] == [1, 1, 1, 1]


def test_a_server_of_mappo_sees_only_itself():
    features = mappo_placement.Features(cluster_of([0, 1, 2]), "whole_layer")
    seen = observe(4, first=False)
    agent = trained(mappo_placement)
    mean, move = agent(features(seen)[0])
    other = {name: part.copy() for name, part in seen.items()}
    for name in ("counts", "placement", "in_system", "arrivals", "link_backlog_s"):
        other[name][:, 2] = other[name][:, 2][::-1]
    changed, moved = agent(features(other)[0])
    torch.testing.assert_close(changed[:, :2], mean[:, :2], rtol=0, atol=0)
    torch.testing.assert_close(moved[:, :2], move[:, :2], rtol=0, atol=0)
    assert not torch.equal(changed[:, 2], mean[:, 2])


def test_mappo_plans_alike_in_both_environments():
    args = mappo_placement.Args(set=(*TOY, "epochs=3", "epoch_s=40"))
    many = mappo_placement.make_env(args)
    single = ExpertPlacementEnv(model="toy", epochs=3, epoch_s=40.0, action_mode="placement")
    features = mappo_placement.Features(many.problem.cluster, "none")
    agent = trained(mappo_placement)
    agent.move.bias.data[:] = 0.0
    observations, _ = many.reset(seed=5)
    seen, _ = single.reset(seed=5)
    for _ in range(3):
        x, log_share, first = mappo_placement.local_features(features, [observations])
        rows = {name: part[None] for name, part in seen.items()}
        torch.testing.assert_close(x, features(rows)[0])
        torch.testing.assert_close(x, mappo_placement.state_features(features, [many]))
        with torch.no_grad():
            mean, move = agent(x)
        migrate = ((first > 0) | (move > 0)).long().numpy()
        (observations,), _, _ = mappo_placement.step_all(
            [many], migrate, features.plan(mean, log_share)
        )
        action = mappo_placement.greedy(agent, features, single.problem.cluster, rows)
        seen, *_ = single.step({"migrate": action["migrate"][0], "plan": action["plan"][0]})
        np.testing.assert_array_equal(many.system.simulator.target(), seen["placement"])


def test_a_plan_that_is_not_carried_out_has_no_gradient():
    mean = torch.zeros(2, 3, 4, 2, requires_grad=True)
    z, move = torch.randn(2, 3, 4, 2), torch.zeros(2)
    found = log_prob(mean, 0.5, move, z, torch.tensor([0.0, 1.0]), torch.zeros(2))
    found.sum().backward()
    assert mean.grad[0].abs().max() == 0 and mean.grad[1].abs().min() > 0
    assert found[0].item() == pytest.approx(np.log(0.5))
    free = log_prob(mean, 0.5, move - 50, z, torch.ones(2), torch.ones(2))
    assert free[1].item() == pytest.approx(found[1].item() - np.log(0.5), rel=1e-5)


def test_advantages_forget_what_a_group_shares():
    raw = torch.randn(3, 8)
    noise = torch.tensor([100.0, -7.0]).repeat_interleave(4)
    found = group_advantage(raw + noise, 4)
    torch.testing.assert_close(found, group_advantage(raw, 4), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.view(3, 2, 4).sum(-1), torch.zeros(3, 2), atol=1e-5, rtol=0)
    raw[0, 0] = -1e6
    assert group_advantage(raw, 4).abs().max() < 6


def wish(plan):
    """Mean score of the wished layer, number n at server n, of plans (B, N, L, E)."""
    return np.mean([plan[:, n, n].mean(-1) for n in range(plan.shape[1])], axis=0)


class WishedLayers:
    """Looks like the environments of an agent; the latency is 1 less the score of a layer."""

    def __init__(self, num_envs):
        self.one = make_problem({"model": "toy"})
        self.unwrapped, self.problem, self.num_envs = self, self.one, num_envs
        self.agents = self.possible_agents = [f"server_{n}" for n in range(3)]

    def reset(self, *, seed=None):
        self.agents = self.possible_agents
        seen = observe(0, batch=1)
        self.seen = {name: np.repeat(part, self.num_envs, 0) for name, part in seen.items()}
        self.seen["placement"] = np.repeat(self.seen["placement"], [1, 1, 2], 1)
        return self.seen, {}

    def step(self, action):
        score = wish(action["plan"])
        info = {"episode_kpis": {"mean_latency_s": 1 - score, "migrations": 0 * score + 1}}
        ended = np.ones(self.num_envs, bool)
        return self.seen, score - 1, ended, ~ended, info

    def close(self):
        pass


class WishedByAgents(WishedLayers):
    """The same for PettingZoo."""

    def reset(self, *, seed=None):
        seen, _ = super().reset()
        held = np.zeros((3, 4, 8))
        self.own = {
            agent: {name: part[0, n : n + 1] for name, part in seen.items() if part.shape[1] == 3}
            | {"held": held, "counts": seen["counts"][0, n]}
            | {name: seen[name][0] for name in ("window_s", "progress")}
            for n, agent in enumerate(self.possible_agents)
        }
        return self.own, {}

    def step(self, actions):
        plan = np.stack([action["plan"] for action in actions.values()])
        self.agents = []
        _, reward, _, _, info = super().step({"plan": plan[None]})
        kpis = {name: part[0] for name, part in info["episode_kpis"].items()}
        none = dict.fromkeys(actions, False)
        return (
            self.own,
            dict.fromkeys(actions, float(reward[0])),
            none,
            none,
            dict.fromkeys(actions, {"episode_kpis": kpis}),
        )


@pytest.mark.parametrize(
    "module",
    [ppo_placement, pytest.param(mappo_placement, marks=pytest.mark.slow)],
    ids=["ppo", "mappo"],
)
def test_learns_which_layers_pay(module, tmp_path, monkeypatch):
    if module is ppo_placement:
        monkeypatch.setattr(module, "make_envs", lambda args, n, **kwargs: WishedLayers(n))
    else:
        monkeypatch.setattr(module, "make_env", lambda args, **kwargs: WishedByAgents(1))
        monkeypatch.setattr(
            module,
            "state_features",
            lambda features, envs: torch.zeros(len(envs), *features.shape[:2], features.columns),
        )
    settings = {
        **QUICK,
        "set": TOY,
        "base": "none",
        "epochs": 1,
        "num_envs": 16,
        "group_size": 8,
        "total_timesteps": 2_400,
        "eval_every": 10_000,
        "learning_rate": 3e-3,
    }
    run = module.train(module.Args(**settings, out_dir=str(tmp_path), run_name="run"))
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    scores = [1 - line["eval/mean_latency_s"] for line in lines if "eval/mean_latency_s" in line]
    best = np.linspace(0, 1, 32)[-8:].mean()
    assert scores[0] < 0.6 and scores[-1] > 0.95 * best


def lines_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "charts/SPS"} for line in lines]


@agents
def test_same_seed_same_log_and_a_stopped_run_goes_on(module, tmp_path, monkeypatch):
    runs = [
        module.train(module.Args(**QUICK, out_dir=str(tmp_path), run_name=name)) for name in "ab"
    ]
    want = lines_of(runs[0])
    assert want == lines_of(runs[1])
    assert all(np.isfinite(list(line.values())).all() for line in want)
    calls = []

    def stop(advantage, group_size):
        calls.append(group_size)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return group_advantage(advantage, group_size)

    monkeypatch.setattr(module, "group_advantage", stop)
    args = module.Args(**QUICK, out_dir=str(tmp_path), run_name="c")
    with pytest.raises(KeyboardInterrupt):
        module.train(args)
    monkeypatch.undo()
    args.resume = True
    run = module.train(args)
    assert lines_of(run) == want
    weights = [(r / "last.safetensors").read_bytes() for r in (runs[0], run)]
    assert weights[0][-1000:] == weights[1][-1000:]


@agents
def test_checkpoints_are_policies(module, tmp_path):
    settings = {**QUICK, "total_timesteps": 32}
    run = module.train(module.Args(**settings, out_dir=str(tmp_path), run_name="run"))
    kwargs = {"model": "toy", "epochs": 2, "epoch_s": 40.0}
    rows = evaluate("servegym/ExpertPlacement-v0", [run], 2, env_kwargs=kwargs)
    again = evaluate(
        "servegym/ExpertPlacement-v0", [load_policy(run)], 2, env_kwargs=kwargs, num_envs=1
    )
    assert [r["mean_latency_s"] for r in rows] == [r["mean_latency_s"] for r in again]
    name = module.__name__.rpartition(".")[2]  # which the shipped checkpoint has alone
    assert rows[0]["policy"] == f"{name} ({run})"
    assert np.isfinite(rows[0]["return"])
    assert load_policy(run).step in (0, 32)


@agents
def test_a_start_is_searched_for_once(module, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "START_TRIES", 1)
    monkeypatch.setattr(module, "START_STEPS", 500)
    settings = {**QUICK, "base": "best", "total_timesteps": 8, "out_dir": str(tmp_path)}
    run = module.train(module.Args(**settings, run_name="run"))
    found = InitialPlacement.from_json((run / "start.json").read_text())
    assert found.latency_s.keys() > {"whole_layer", "prism", "proxy_optimum"}, "none was annealed"
    monkeypatch.setattr("servegym.baselines.expert_placement.initial_placement.best_start", None)
    again = module.train(module.Args(**settings, run_name="run"))
    np.testing.assert_array_equal(load_policy(again).start.held, found.held)


@agents
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"base": "prism"}, "base is 'prism'; allowed are best, best_heuristic, whole_layer, none"),
        ({"group_size": 1}, "group_size is 1; allowed is 2 or more"),
        ({"num_envs": 6}, "num_envs is 6"),
        ({"set": ("free_start=false",)}, "free_start"),
    ],
)
def test_bad_arguments_are_named(module, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        module.train(module.Args(**{**QUICK, **settings}, out_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@agents
def test_counts_of_another_model_are_refused(module):
    features = module.Features(cluster_of([0, 1, 2]), "none")
    with pytest.raises(ValueError, match="counts have shape"):
        features(observe(0, experts=16))


def test_environments_are_in_the_mode_of_scores():
    envs = make_envs(Args(set=TOY), 2)
    assert envs.single_action_space["plan"].shape == (3, 4, 8)


def test_no_output_is_the_start_to_the_last_expert():
    env = ExpertPlacementEnv(model="toy", action_mode="expert_score", epochs=1)
    seen, _ = env.reset(seed=0)
    cluster = env.problem.cluster
    counts = seen["counts"].astype(float)
    for place in (whole_layer, uniform):
        held = cluster.server_view(place(counts, cluster.slots, cluster.gpu_server))
        features = Features(cluster, "best", held)
        plan = zero_plan(features, seen)
        got = cluster.server_view(env.system.decode(plan))
        np.testing.assert_array_equal(got[held], True)
    plain = Features(cluster, "best")  # a cluster without a start: whole layers
    np.testing.assert_array_equal(plain.base, Features(cluster, "whole_layer").base)


def test_heights_exchange_layers_and_keep_memory_and_coverage():
    c = make_problem({"model": "toy"}).cluster
    start = c.server_view(whole_layer(np.ones((3, 4, 8)), c.slots, c.gpu_server))
    features = Features(c, "best", start, exchange=True)
    rng = np.random.default_rng(0)
    log_share = torch.as_tensor(rng.normal(size=(1, 3, 4, 8)), dtype=torch.float32)
    height = torch.zeros(1, 3, 4)
    same = features.exchanged(height, log_share)[0].numpy() > 0
    np.testing.assert_array_equal(same, start)
    full = start.all(axis=2)
    n = int(np.argmax(full.sum(axis=1)))
    held, missing = int(np.argmax(full[n])), int(np.argmin(start[n].sum(axis=1)))
    height[0, n, missing] = 10.0
    found = features.exchanged(height, log_share)[0].numpy() > 0
    assert found[n, missing].all() and not start[n, missing].all()
    np.testing.assert_array_equal(found.sum(axis=(1, 2)), start.sum(axis=(1, 2)))
    assert found.any(axis=0).all()
    moved = (found.sum(axis=2) != start.sum(axis=2)).any(axis=0)
    assert moved[missing] and moved.sum() == 2  # one pair of layers has changed places
    other = int(np.flatnonzero(moved & (np.arange(4) != missing))[0])
    np.testing.assert_array_equal(found[:, missing].sum(axis=1), start[:, other].sum(axis=1))
    # The most used experts of a place are the most used ones of the layer that takes it.
    used = np.exp(2 * log_share[0].numpy()).sum(axis=0)
    for level, at in ((missing, other), (other, missing)):
        np.testing.assert_array_equal(
            found[:, level, np.argsort(-used[level])], start[:, at, np.argsort(-used[at])]
        )
    assert held != missing
