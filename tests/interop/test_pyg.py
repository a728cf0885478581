"""Observations as PyTorch Geometric graphs, in its own loader."""

import pytest

pytest.importorskip("torch", reason="PyTorch Geometric needs torch")

import torch

from servegym.envs.llm_routing.graph import EDGE_TYPES, to_hetero_data

from .settings import make


def test_a_loader_batches_the_graphs():
    loader = pytest.importorskip("torch_geometric.loader")  # takes seconds to import
    env = make("servegym/LLMRouting-v1")
    seen = [env.reset(seed=0)[0], *(env.step(1 + n % 2)[0] for n in range(7))]
    (batch,) = loader.DataLoader([to_hetero_data(one) for one in seen], batch_size=len(seen))
    batch.validate(raise_on_error=True)
    running = [int(one["running_mask"].sum()) for one in seen]
    assert sum(running) > 0 and batch["expert"].num_nodes == 3 * len(seen)
    assert torch.bincount(batch["running"].batch, minlength=len(seen)).tolist() == running
    for source, kind, target in EDGE_TYPES:  # an edge stays within its graph
        rows, columns = batch[source, kind, target].edge_index
        assert torch.equal(batch[source].batch[rows], batch[target].batch[columns])
