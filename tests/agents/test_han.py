"""The dense HAN against PyG's HANConv, graph by graph, and the symmetry of the heads."""

import numpy as np
import pytest
import torch

from servegym.agents import sac_han
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs.llm_routing.graph import EDGE_TYPES, NODE_TYPES, to_hetero_data

from ..routing_systems import moved, permuted


def a_system():
    return RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)


def an_agent(seed=0):
    torch.manual_seed(seed)
    return sac_han.Agent("features", True, a_system())


def tensor_rows(agent, obs):
    return torch.from_numpy(agent.rows(obs)).float()


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
    agent, obs = an_agent(), random_obs(5, empty=empty)
    first = hanconv_like(agent.first, {k: p.in_features for k, p in agent.first.proj.items()})
    second = hanconv_like(agent.second, dict.fromkeys(NODE_TYPES, sac_han.WIDTH))
    rows = tensor_rows(agent, obs)
    with torch.no_grad():
        *nodes, queued, index = agent.nodes(rows)
        h_a, h_e, *h_q = agent.first(*nodes, queued, index)
        request, experts = agent.second(h_a, h_e, dict(zip(queued, h_q, strict=True)), index)
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


def test_permuting_experts_permutes_policy_and_values(random_obs):
    order, system = np.array([2, 0, 3, 1]), a_system()
    agent = an_agent()
    other = sac_han.Agent("features", True, permuted(system, order))
    other.load_state_dict(agent.state_dict())
    obs = random_obs(3)
    mask = torch.tensor([[1, 1, 0, 1, 1]] * 3)
    there = torch.cat([mask[:, :1], mask[:, 1:][:, order]], -1)
    with torch.no_grad():
        states = (
            agent.encode(tensor_rows(agent, obs)),
            other.encode(tensor_rows(other, moved(obs, order))),
        )
        one, two = agent.qf1(states[0]), other.qf1(states[1])
        assert (one[..., 1:] - one[..., 1:].mean(-1, keepdim=True)).abs().amax((1, 2)).min() > 1e-3
        policies = (agent.log_policy(states[0], mask, 0.1), other.log_policy(states[1], there, 0.1))
        for a, b in (policies, (one, two)):
            torch.testing.assert_close(a[..., 1:][..., order], b[..., 1:], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(a[..., 0], b[..., 0], atol=1e-5, rtol=1e-5)
