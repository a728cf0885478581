"""Discrete SAC over the graph and over the experts' rows: network, returns, losses, shaping."""

import numpy as np
import pytest
import torch

from servegym.agents import sac_han, sac_rows
from servegym.agents.lib.environments import make_envs
from servegym.baselines.llm_routing import features
from servegym.baselines.llm_routing.latency import Curves, ExpectedQos
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs.llm_routing.config import setting_problem
from servegym.envs.llm_routing.graph import EDGE_TYPES, NODE_TYPES, to_hetero_data
from servegym.envs.llm_routing.kernel import layout

from .runs import tiny

both = pytest.mark.parametrize("agent", [sac_han, sac_rows])


def a_system():
    return RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)


def an_agent(module, state="features", shaping=True):
    torch.manual_seed(0)
    return module.Agent(state, shaping, a_system())


def tensor_rows(net, obs):
    return torch.as_tensor(net.rows(obs).rows).float()


def test_rows_hold_what_the_estimator_says(random_obs):
    obs = random_obs(6, 4, 3, 2, seed=5)
    model = ExpectedQos(a_system())
    estimate = model.estimate(obs)
    gain, harm, held = estimate.gain, estimate.harm, estimate.held
    rows, expected_held, _ = features.node_rows(features.Facts(obs, model, whole=True))
    of_experts = rows[:, : features.ARRIVED + 4 * features.EXPERT]
    np.testing.assert_array_equal(of_experts, features.expert_rows(features.Facts(obs, model)).rows)
    arrived, expert, queued, kind = features.split_rows(rows, 4)
    names = [feature.name for feature in features.EXPERT_FEATURES]
    column = dict(zip(names, np.moveaxis(expert, -1, 0), strict=True))
    limit, fleet = obs["latency_requirement"], model.fleet(obs)
    ratio = (obs["experts"][..., 1] + obs["experts"][..., 2]) / fleet.batch
    left = estimate.running_tokens / model.system.mean_output_tokens / fleet.batch
    wanted = {"gain": gain, "harm": harm, "work": estimate.work_s * fleet.served}
    wanted |= {"held": held / fleet.batch, "exists": np.ones_like(gain)}
    wanted |= {"outstanding": 2 * ratio / (1 + ratio), "left_running": 2 * left / (1 + left)}
    wanted |= {"distance": np.tanh(3 * (estimate.with_new[..., -1] / limit - 1))}
    wanted |= {"running": 5 / 9 * obs["experts"][..., 1], "length": obs["request"][..., 2] / 150}
    for name, values in wanted.items():
        np.testing.assert_allclose(column[name], values, atol=2e-3, rtol=2e-3, err_msg=name)
    assert np.ptp(held) > 0.1 and harm.max() > 0
    np.testing.assert_allclose(expected_held, held.sum(1))
    np.testing.assert_array_equal(kind == 1, np.pad(obs["running_mask"], [(0, 0)] * 2 + [(0, 2)]))
    np.testing.assert_array_equal(kind == 2, np.pad(obs["waiting_mask"], [(0, 0)] * 2 + [(3, 0)]))
    without = np.tanh(3 * (estimate.without / limit[:, :, None] - 1))
    there = obs["waiting_mask"] > 0
    np.testing.assert_allclose(queued[:, :, 3:][there][:, 6], without[:, :, 3:5][there], atol=2e-3)
    rate = np.log(1 / obs["load"][:, 2, 0] / fleet.total[:, 0]).clip(-3, 3)
    np.testing.assert_allclose(arrived[:, 1], np.log(limit[:, 0]) + 3.5, atol=2e-3)
    np.testing.assert_allclose(arrived[:, 4], rate, atol=2e-3)
    assert (queued[kind == 0] == 0).all()


@pytest.mark.parametrize(
    ("agent", "state"),
    [(sac_han, "features"), (sac_han, "paper"), (sac_rows, "features"), (sac_rows, "experts")],
)
def test_a_policy_reads_its_state_and_no_more(agent, state, random_obs):
    net, obs = an_agent(agent, state), random_obs(4, 4, 3, 2)
    changed = {key: value.copy() for key, value in obs.items()}
    changed["load"] *= 2
    if state == "experts":
        changed["request"][..., 1:] *= 0.5

    def values(obs):
        with torch.no_grad():
            return net.qf1(net.encode(tensor_rows(net, obs)))

    assert torch.equal(values(obs), values(changed)) == (state != "features")
    experts = changed["experts"].copy()
    experts[:, :2, 1] = 1 - experts[:, :2, 1]
    assert not torch.equal(values(obs), values(changed | {"experts": experts}))


def a_full_ring(agent, net, steps, width=3):
    """A ring of random steps, and all steps that were added."""
    rng, added = np.random.default_rng(0), []
    buffer = agent.ReplayBuffer(5 * agent.LENGTH)
    for t in range(steps):
        step = {"rows": np.full((width, 1), t, np.float32), "action": np.arange(width)}
        step |= {key: rng.random(width).astype(np.float32) for key in ("value", "reward")}
        step["exogenous"] = rng.random((width, features.EXOGENOUS)).astype(np.float32)
        step["done"] = rng.random(width) < 0.05
        added.append(step)
        buffer.add(**step)
        if buffer.count > buffer.targets + 2 * agent.LENGTH:
            buffer.add_targets(net, 0.9, 0.7)
    return buffer, {key: np.array([step[key] for step in added]) for key in added[0]}


@both
def test_targets_are_mixtures_of_all_n_step_returns(agent):
    net = an_agent(agent)
    buffer, steps = a_full_ring(agent, net, 2 * agent.LENGTH + 1)
    size, targets = 2 * agent.LENGTH, agent.LENGTH
    x, y = steps["exogenous"][:targets], steps["reward"][:targets]
    there = ~steps["done"][:targets]
    squares = 0.7 * np.eye(x.shape[-1]) + x[there].T @ x[there]
    fit = np.linalg.solve(squares, x[there].T @ y[there])
    reward = steps["reward"] - steps["exogenous"] @ fit
    with torch.no_grad():
        seen = torch.as_tensor(steps["exogenous"])
        common = [qf.exogenous_value(seen)[..., 0].numpy() for qf in (net.qf1, net.qf2)]
    value, done = steps["value"] + np.minimum(*common), steps["done"]

    def n_step(t, env, n):
        total, discount = 0.0, 1.0
        for k in range(t, t + n):
            if done[k, env]:
                return total + discount * value[k, env]
            total += discount * reward[k, env]
            discount *= 0.9
        return total + discount * value[t + n, env]

    assert done.any() and buffer.targets == targets
    for t in range(targets):
        for env in range(3):
            if done[t, env]:
                continue
            left = size - t - 1
            mixed = sum(0.3 * 0.7 ** (n - 1) * n_step(t + 1, env, n) for n in range(1, left))
            mixed += 0.7 ** (left - 1) * n_step(t + 1, env, left)
            later = 0.9 * (0.3 * value[t + 1, env] + 0.7 * mixed)
            assert buffer.data["later"][t, env] == pytest.approx(later, rel=1e-3)
            assert buffer.data["residual"][t, env] == pytest.approx(reward[t, env], abs=1e-4)


@both
def test_the_losses_of_a_critic_are_of_what_was_done_and_has_targets(agent):
    net, rng, size = an_agent(agent), np.random.default_rng(0), 7
    parts = torch.as_tensor(rng.random((2, size, 5)))
    action, done = torch.as_tensor(rng.integers(0, 5, size)), torch.arange(size) == 3
    batch = {key: torch.as_tensor(rng.random(size)) for key in ("residual", "later")}
    batch |= {"action": action, "done": done}
    batch["exogenous"] = torch.as_tensor(rng.random((size, 12)), dtype=torch.float32)
    loss = agent.critic_loss(net.qf1, parts, batch)
    with torch.no_grad():
        common = net.qf1.exogenous_value(batch["exogenous"])[:, 0]
    wanted = 0.0
    for i in range(size):
        if i != 3:
            now, after = parts[0, i, action[i]], parts[1, i, action[i]] + common[i]
            wanted += float((now - batch["residual"][i]) ** 2 + (after - batch["later"][i]) ** 2)
    assert float(loss) == pytest.approx(wanted / size, rel=1e-5)


@both
def test_illegal_actions_have_no_probability(agent, random_obs):
    net, obs = an_agent(agent), random_obs(6, 4, 3, 2)
    mask = torch.tensor([[1, 1, 0, 1, 0]] * 6)
    with torch.no_grad():
        state = net.encode(tensor_rows(net, obs))
        policy = net.log_policy(state, mask, 0.1).exp()
        logits = net.actor(state).sum(0)[:, [0, 1, 3]] / 0.1
    assert (policy[:, [2, 4]] == 0).all()
    torch.testing.assert_close(policy[:, [0, 1, 3]], logits.softmax(-1))
    assert np.isin(net.act(obs, mask.numpy()), (0, 1, 3)).all()


def kept(agent, monkeypatch, name, folder, **changes):
    """The steps that the buffer was given and the networks of a tiny run."""
    steps, nets = [], []
    copy = agent.deepcopy

    class Kept(agent.ReplayBuffer):
        def add(self, **step):
            steps.append({key: np.array(value) for key, value in step.items()})
            super().add(**step)

    def copy_kept(net):
        nets.extend([net, copy(net)])
        return nets[-1]

    monkeypatch.setattr(agent, "ReplayBuffer", Kept)
    monkeypatch.setattr(agent, "deepcopy", copy_kept)
    agent.train(tiny(name, folder, save_model=False, **changes)[1])
    return {key: np.array([step[key] for step in steps]) for key in steps[0]}, nets


ENV = ("episode_requests=60", "rate=[11,12]", "num_experts=3", "max_episode_steps=59")
RUN = {"set": (*ENV, 'reward="completed_qos"'), "total_timesteps": 320}


@pytest.fixture(scope="module", params=[sac_han, sac_rows], ids=["sac_han", "sac_rows"])
def trained(request, tmp_path_factory):
    """What `kept` gives of a run without shaping and without an average, and of one with both."""
    agent, folder = request.param, tmp_path_factory.mktemp("runs")
    name = "sac_han" if agent is sac_han else "sac_rows"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "AVERAGED", 1e12)
        plain = kept(agent, patch, name, folder / "a", shaping=False, **RUN)
    with pytest.MonkeyPatch.context() as patch:
        return plain, kept(agent, patch, name, folder / "b", **RUN)


def test_shaped_rewards_are_those_paid_and_the_change_of_what_is_held(trained):
    (paid, _), (shaped, _) = trained
    same = 65  # steps of uniform actions, before anything is learnt
    for key in ("rows", "action", "done"):
        np.testing.assert_array_equal(paid[key][:same], shaped[key][:same])
    assert (paid["done"][58] & ~paid["done"][57]).all() and paid["reward"].max() > 0
    wanted = paid["reward"][: same - 1].astype(float)
    # The columns have what is held a place; all experts of this fleet have five.
    held = [
        5 * features.split_rows(rows, 3)[1][..., features.HELD].astype(float).sum(1)
        for rows in paid["rows"][:same]
    ]
    change = np.array([0.995 * new - old for old, new in zip(held, held[1:], strict=False)])
    live = ~paid["done"][: same - 1]
    wanted = (wanted + change)[live]
    np.testing.assert_allclose(shaped["reward"][: same - 1][live], wanted, atol=0.02)
    assert np.abs(change).max() > 0.1
    assert (np.take_along_axis(paid["mask"], paid["action"][..., None], -1) == 1).all()


def test_the_evaluated_weights_are_an_average_of_the_learnt_ones(trained):
    (_, (fast, last)), (_, (net, averaged)) = trained
    pairs = zip(net.parameters(), averaged.parameters(), strict=True)
    assert any(not torch.equal(learnt, slow) for learnt, slow in pairs)
    for learnt, slow in zip(fast.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(learnt, slow)


def node_features(row):
    """The features of one graph, as `to_hetero_data` takes them."""
    sizes = (sac_han.ARRIVED, 4 * sac_han.EXPERT, 4 * 5 * sac_han.REQUEST, 20)
    arrived, expert, held, _ = row.split(sizes)
    held = held.view(4, 5, -1).numpy()
    return {
        "arrived": arrived.numpy(),
        "expert": expert.view(4, -1).numpy(),
        "running": held[:, :3],
        "waiting": held[:, 3:],
    }


def hanconv_like(layer, dims):
    """A HANConv with the layer's weights; attention of one-neighbour edge types stays random."""
    conv = pytest.importorskip("torch_geometric.nn").HANConv(
        dims, sac_han.WIDTH, (list(NODE_TYPES), list(EDGE_TYPES)), heads=sac_han.HEADS
    )
    with torch.no_grad():
        for kind in NODE_TYPES:
            conv.proj[kind].load_state_dict(layer.proj[kind].state_dict())
        ends = {"arrived": "expert__to__arrived"}
        ends |= {k: f"{k}__to__expert" for k in ("running", "waiting")}
        for name, edge in ends.items():
            conv.lin_src[edge].copy_(layer.src[name][None])
            conv.lin_dst[edge].copy_(layer.dst[name][None])
        conv.k_lin.load_state_dict(layer.k_lin.state_dict())
        conv.q.copy_(layer.q[None])
    return conv


@pytest.mark.parametrize("empty", [(), (1, 3), (0, 1, 2, 3, 4)])
def test_dense_han_equals_hanconv_on_each_graph(empty, random_obs):
    agent, obs = an_agent(sac_han), random_obs(5, empty=empty)
    first = hanconv_like(agent.first, {k: p.in_features for k, p in agent.first.proj.items()})
    second = hanconv_like(agent.second, dict.fromkeys(NODE_TYPES, sac_han.WIDTH))
    rows = tensor_rows(agent, obs)
    with torch.no_grad():
        *nodes, queued, index, there = agent.nodes(rows)
        h_a, h_e, *h_q = agent.first(*nodes, queued, index, there)
        held = dict(zip(queued, h_q, strict=True))
        request, experts = agent.second(h_a, h_e, held, index, there)
    h_q = torch.cat(h_q)
    assert request.abs().max() > 0.01 and experts.abs().max() > 0.01
    seen = 0
    for i in range(5):
        graph = to_hetero_data({k: v[i] for k, v in obs.items()}, node_features(rows[i]))
        with torch.no_grad():
            hidden = first(graph.x_dict, graph.edge_index_dict)
            out = second(hidden, graph.edge_index_dict)
        of_graph = index % 20 // 4 == i
        theirs = torch.cat([hidden["running"], hidden["waiting"]])
        torch.testing.assert_close(h_q[of_graph], theirs, atol=1e-5, rtol=0)
        torch.testing.assert_close(request[i], out["arrived"][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(experts.view(5, 4, -1)[i], out["expert"], atol=1e-5, rtol=0)
        seen += len(theirs)
    assert seen == len(index)


@both
def test_one_set_of_weights_reads_drawn_fleets_as_each_alone(agent):
    """Padding changes nothing, whatever the sizes of the other rows' fleets."""
    envs = make_envs("servegym/LLMRouting-v1", 4, fleet="random", episode_requests=100)
    drawn = RoutingSystem.from_env(envs)
    obs, info = envs.reset(seed=[3, 4, 5, 6])
    rng = np.random.default_rng(0)
    for _ in range(40):
        chance = np.where(info["action_mask"] > 0, rng.random(info["action_mask"].shape), -1.0)
        obs, *_, info = envs.step(chance.argmax(1))
    torch.manual_seed(0)
    together = agent.Agent("features", True, drawn)
    with torch.no_grad():
        whole = together.qf1(together.encode(tensor_rows(together, obs)))
    for row in range(4):
        setting = envs.unwrapped.batch.fleets[row]
        system = RoutingSystem.from_problem(setting_problem(setting, view=layout.GRAPH))
        count, slots = system.num_experts, (system.running_capacity, system.waiting_capacity)
        own = {key: value[row : row + 1] for key, value in obs.items() if key != "fleet"}
        for key in ("experts", "request", "running", "waiting", "running_mask", "waiting_mask"):
            own[key] = own[key][:, :count]
        for key, size in zip(("running", "waiting"), slots, strict=True):
            own |= {key: own[key][:, :, :size], f"{key}_mask": own[f"{key}_mask"][:, :, :size]}
        alone = agent.Agent("features", True, system)
        alone.load_state_dict(together.state_dict())
        # Lengths are pooled over the catalog's models there, over the fleet's here.
        models = obs["fleet"][row, :count, 2].astype(int)
        alone.model.curves = Curves(*(table[models] for table in together.model.curves))
        with torch.no_grad():
            found = alone.qf1(alone.encode(tensor_rows(alone, own)))
        wanted = whole[:, row : row + 1, : count + 1]
        assert wanted.std() > 1e-3
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)
