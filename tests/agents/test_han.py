"""The dense HAN against PyG's HANConv, graph by graph, and the symmetry of the heads."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tyro = pytest.importorskip("tyro")

from servegym.agents import sac_han  # noqa: E402
from servegym.baselines.llm_routing.features import impact_features  # noqa: E402
from servegym.baselines.llm_routing.latency import LatencyModel  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.envs.llm_routing.graph import EDGE_TYPES, NODE_TYPES, to_hetero_data  # noqa: E402

LAYOUT = sac_han.Layout(4, 3, 2)
INPUTS = 4 * len(sac_han.HORIZONS)


def a_system():
    return RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)


def tensor_rows(obs):
    return torch.from_numpy(LAYOUT.rows(obs, LatencyModel(a_system()))).float()


def node_features(rows, i, law):
    """The features of graph i, as `to_hetero_data` takes them."""
    parts = rows.split(LAYOUT.sizes, -1)
    return {
        "arrived": parts[0][i].numpy(),
        "expert": np.concatenate([parts[1][i].view(4, 10).numpy(), law.numpy()], -1),
        "running": parts[2][i].view(4, 3, 8).numpy(),
        "waiting": parts[3][i].view(4, 2, 8).numpy(),
    }


def hanconv_like(layer, dims):
    """A HANConv with the layer's weights; attention of one-neighbour edge types stays random."""
    conv = pytest.importorskip("torch_geometric.nn").HANConv(
        dims, sac_han.WIDTH, (list(NODE_TYPES), list(EDGE_TYPES)), heads=sac_han.HEADS
    )
    shape = (1, sac_han.HEADS, sac_han.WIDTH // sac_han.HEADS)
    with torch.no_grad():
        for kind in NODE_TYPES:
            conv.proj[kind].weight.copy_(layer.proj[kind].weight)
            conv.proj[kind].bias.copy_(layer.proj[kind].bias)
        for name in layer.src:
            source, target = name.split("__")
            conv.lin_src[f"{source}__to__{target}"].copy_(layer.src[name].view(shape))
            conv.lin_dst[f"{source}__to__{target}"].copy_(layer.dst[name].view(shape))
        conv.k_lin.load_state_dict(layer.k_lin.state_dict())
        conv.q.copy_(layer.q[None])
    return conv


@pytest.mark.parametrize("empty", [(), (1, 3), (0, 1, 2, 3, 4)])
def test_dense_han_equals_hanconv_on_each_graph(empty, random_obs):
    torch.manual_seed(0)
    law, han = torch.rand(4, 4), sac_han.HAN()
    first = hanconv_like(han.first, {k: p.in_features for k, p in han.first.proj.items()})
    second = hanconv_like(han.second, dict.fromkeys(NODE_TYPES, sac_han.WIDTH))
    obs = random_obs(5, empty=empty)
    rows = tensor_rows(obs)
    with torch.no_grad():
        request, experts = han(rows, LAYOUT, law)
    assert request.abs().max() > 0.01 and experts.abs().max() > 0.01
    for i in range(5):
        graph = to_hetero_data({k: v[i] for k, v in obs.items()}, node_features(rows, i, law))
        with torch.no_grad():
            hidden = first(graph.x_dict, graph.edge_index_dict)
            out = second(hidden, graph.edge_index_dict)
        torch.testing.assert_close(request[i], out["arrived"][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(experts[i], out["expert"], atol=1e-5, rtol=0)


def test_first_layer_embeds_queued_requests_as_hanconv_does(random_obs, monkeypatch):
    torch.manual_seed(1)
    law, han = torch.rand(4, 4), sac_han.HAN()
    conv = hanconv_like(han.first, {k: p.in_features for k, p in han.first.proj.items()})
    obs = random_obs(1, seed=3)
    rows = tensor_rows(obs)
    graph = to_hetero_data({k: v[0] for k, v in obs.items()}, node_features(rows, 0, law))
    seen = {}
    second = sac_han.HANLayer.forward

    def spy(layer, x, index):
        if layer.last:
            seen.update(x)
        return second(layer, x, index)

    monkeypatch.setattr(sac_han.HANLayer, "forward", spy)
    with torch.no_grad():
        han(rows, LAYOUT, law)
        theirs = conv(graph.x_dict, graph.edge_index_dict)
    assert len(seen["running"]) > 2 and len(seen["waiting"]) > 1
    for kind in NODE_TYPES:
        torch.testing.assert_close(seen[kind], theirs[kind], atol=1e-5, rtol=0)


def test_embedding_ignores_batch_neighbours(random_obs):
    torch.manual_seed(0)
    law, han = torch.rand(4, 4), sac_han.HAN()
    rows = tensor_rows(random_obs(6, empty=(2,)))
    with torch.no_grad():
        together = han(rows, LAYOUT, law)
        alone = [han(rows[i : i + 1], LAYOUT, law) for i in range(6)]
    torch.testing.assert_close(together[1], torch.cat([a[1] for a in alone]), atol=1e-6, rtol=0)


def permuted(obs, order):
    per_expert = {k: v[:, order] for k, v in obs.items() if k != "latency_requirement"}
    return per_expert | {"latency_requirement": obs["latency_requirement"]}


def test_permuting_experts_permutes_logits_and_values(random_obs):
    torch.manual_seed(0)
    order, system = np.array([2, 0, 3, 1]), a_system()
    args = sac_han.Args(prior=0.02, privileged_critic=True)
    agent = sac_han.Agent(args, system)
    other = sac_han.Agent(args, system.permuted(order))
    weights = {k: v for k, v in agent.state_dict().items() if k != "law"}
    other.load_state_dict(weights, strict=False)
    obs = random_obs(3)
    mask = torch.tensor([[1, 1, 0, 1, 1]] * 3)
    moved = torch.cat([mask[:, :1], mask[:, 1:][:, order]], -1)
    with torch.no_grad():
        h = agent.encode(torch.from_numpy(agent.rows(obs)).float())
        g = other.encode(torch.from_numpy(other.rows(permuted(obs, order))).float())
        one, two = agent.log_policy(h, mask), other.log_policy(g, moved)
        inputs = torch.rand(3, INPUTS)
        assert (one[:, 1:] - one[:, 1:].mean(1, keepdim=True)).abs().max() > 1e-3
        for a, b in ((one, two), (agent.values(h, inputs)[0], other.values(g, inputs)[0])):
            torch.testing.assert_close(a[:, 1:][:, order], b[:, 1:], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(a[:, 0], b[:, 0], atol=1e-5, rtol=1e-5)


def test_impact_is_what_the_estimator_says(random_obs):
    obs, model = random_obs(6, seed=4), LatencyModel(a_system())
    new, queued = impact_features(obs, model)
    found = model.estimate(obs)
    changes = 0
    for b in range(6):
        limit = float(obs["latency_requirement"][b, 0])
        for n in range(4):
            with_new, without = found.with_new[b, n], found.without[b, n]
            own = obs["request"][b, n, 1] if with_new[-1] <= limit else 0.0
            lost = sum(
                found.scores[b, n, i]
                for i in range(5)
                if without[i] <= limit and not with_new[i] <= limit
            )
            changes += lost > 0
            assert new[b, n, 1:3] == pytest.approx([own, lost])
            assert (new[b, n, 0] < 0) == (with_new[-1] < limit)
            for i in np.flatnonzero(~np.isnan(without[:5])):
                assert queued[b, n, i, 0] == pytest.approx(np.tanh(3 * (without[i] / limit - 1)))
                assert queued[b, n, i, 1] == pytest.approx(np.tanh(3 * (with_new[i] / limit - 1)))
    assert changes > 0 and np.isfinite(queued).all()


def test_to_hetero_data_refuses_a_batch(random_obs):
    pytest.importorskip("torch_geometric")
    with pytest.raises(ValueError, match="take one row"):
        to_hetero_data(random_obs(2))
