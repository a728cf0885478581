"""The routing observation as PyTorch Geometric graphs (section V-B, Eq. 6-12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

NODE_TYPES = ("arrived", "expert", "running", "waiting")
EDGE_TYPES = (
    ("arrived", "self", "arrived"),
    ("expert", "to", "arrived"),
    ("expert", "self", "expert"),
    ("arrived", "to", "expert"),
    ("running", "to", "expert"),
    ("waiting", "to", "expert"),
    ("running", "self", "running"),
    ("expert", "to", "running"),
    ("waiting", "self", "waiting"),
    ("expert", "to", "waiting"),
)


def to_hetero_data(
    obs: Mapping[str, NDArray[Any]], features: Mapping[str, NDArray[Any]] | None = None
) -> HeteroData:
    """Turn one observation of ``servegym/LLMRouting-v1`` into a ``HeteroData`` graph.

    Nodes: one arrived request (p, L), N experts (e, running, waiting, p, s_n, d_n) and the running
    and waiting requests that exist (Eq. 6's six features). Every expert is linked with the arrived
    request and with the requests it holds, in both directions, and every node with itself. A node
    or edge type without members is present and empty.

    Args:
        obs: An unbatched Dict observation.
        features: Other features in the same padded shapes, by node type: arrived (F,),
            expert (N, F), running (N, R, F), waiting (N, W, F). Default: the raw ones above.

    Returns:
        A ``HeteroData`` with ``x`` float32 for `NODE_TYPES` and ``edge_index`` for `EDGE_TYPES`.

    Raises:
        ValueError: if the observation is batched.
    """
    import torch
    from torch_geometric.data import HeteroData

    if np.ndim(obs["request"]) != 2:
        raise ValueError(
            f"obs: request must be of shape (N, 3), got {np.shape(obs['request'])}; "
            "take one row of a batch"
        )
    if features is None:
        features = {
            "arrived": np.concatenate([obs["request"][0, :1], obs["latency_requirement"]]),
            "expert": np.concatenate([obs["experts"], obs["request"]], -1),
            "running": obs["running"],
            "waiting": obs["waiting"],
        }
    experts = np.arange(len(obs["request"]))
    data = HeteroData()

    def link(source: str, kind: str, target: str, pairs: Any) -> None:
        index = np.stack([np.asarray(p, np.int64) for p in pairs])
        data[source, kind, target].edge_index = torch.from_numpy(index)

    data["arrived"].x = torch.as_tensor(features["arrived"], dtype=torch.float32)[None]
    data["expert"].x = torch.as_tensor(features["expert"], dtype=torch.float32)
    one = np.zeros(1)
    link("arrived", "self", "arrived", (one, one))
    link("expert", "to", "arrived", (experts, 0 * experts))
    link("expert", "self", "expert", (experts, experts))
    link("arrived", "to", "expert", (0 * experts, experts))
    for queue in ("running", "waiting"):
        mask = np.asarray(obs[f"{queue}_mask"]) == 1
        data[queue].x = torch.as_tensor(features[queue][mask], dtype=torch.float32)
        owner, node = np.nonzero(mask)[0], np.arange(mask.sum())
        link(queue, "to", "expert", (node, owner))
        link(queue, "self", queue, (node, node))
        link("expert", "to", queue, (owner, node))
    return data
