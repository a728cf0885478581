"""Observations as PyTorch Geometric graphs, in its own loader and layers."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch Geometric needs torch")

import torch

from servegym.envs.llm_routing.graph import EDGE_TYPES, NODE_TYPES, to_hetero_data

from .settings import make

torch.set_num_threads(1)


def graphs(count=8):
    env = make("servegym/LLMRouting-v1")
    observation, _ = env.reset(seed=0)
    out = []
    for n in range(count):
        out.append((observation, to_hetero_data(observation)))
        observation, *_ = env.step(1 + n % 2)
    return out


def test_a_loader_batches_the_graphs():
    loader = pytest.importorskip("torch_geometric.loader")  # takes seconds to import
    seen = graphs()
    (batch,) = loader.DataLoader([data for _, data in seen], batch_size=len(seen))
    batch.validate(raise_on_error=True)
    assert batch.num_graphs == len(seen)
    running = [int(obs["running_mask"].sum()) for obs, _ in seen]
    assert sum(running) > 0
    assert torch.bincount(batch["running"].batch, minlength=len(seen)).tolist() == running
    assert batch["expert"].num_nodes == 3 * len(seen)
    # An edge stays within its graph.
    for source, kind, target in EDGE_TYPES:
        rows, columns = batch[source, kind, target].edge_index
        assert torch.equal(batch[source].batch[rows], batch[target].batch[columns])
    for (_, data), again in zip(seen, batch.to_data_list(), strict=True):
        for kind in NODE_TYPES:
            np.testing.assert_array_equal(data[kind].x.numpy(), again[kind].x.numpy())
