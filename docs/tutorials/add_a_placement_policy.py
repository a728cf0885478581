"""Add a policy for placement or serverless.

The families differ in what `act` gets and returns for a batch of B decisions:

| family | `action_mask` | `act` returns |
| --- | --- | --- |
| routing | int8 (B, N + 1) | int64 (B,): 0 drops, n sends to expert n |
| serverless | int8 (B, all values of all parts) | int64 (B, 5): b, order, w, y and z |
| placement | None, every action is legal | `{"migrate": (B,), "plan": (B, ...)}` |

`migrate` is 0 to keep the placement, whatever the plan, and 1 to adopt the plan. The plan's shape
goes by the environment's `action_mode`, which a policy asks for with `env_kwargs`:
`"layer_budget"` and `"layer_height"` (B, N, L), `"expert_score"` (B, N, L, E) or `"placement"`
(B, G, L, E). The pages of [ExpertPlacement-v0](../environments/ExpertPlacement-v0.md) and
[ServerlessMoE-v0](../environments/ServerlessMoE-v0.md) explain the parts. A file whose class is
named `Policy` can be given to `servegym evaluate --policy`.
"""

from typing import Any

import numpy as np

from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation.evaluate import evaluate, print_summary


class MostUsed(BasePolicy):
    """Each server holds the experts that its own requests use most; decided once, at the start."""

    name = "most_used"
    env_kwargs = {"action_mode": "expert_score"}

    def act(self, observation: Any, action_mask: Any) -> dict[str, np.ndarray]:
        """The more tokens an expert got at a server, the sooner it gets one of its slots."""
        counts = observation["counts"]  # (B, N, L, E)
        first = observation["progress"][:, 0] == 0
        scores = counts / np.maximum(counts.max(axis=(1, 2, 3), keepdims=True), 1)
        return {"migrate": first.astype(np.int64), "plan": scores}


class QuarterRemote(BasePolicy):
    """A quarter of each layer's experts are remote, in an order that lets functions stay warm."""

    name = "quarter_remote"

    def act(self, observation: Any, action_mask: Any) -> np.ndarray:
        """The same plan always; no expert is remote where it cannot be met as predicted."""
        actions = np.zeros((len(action_mask), 5), dtype=np.int64)  # b, order, w, y, z
        actions[:, 0] = np.where(action_mask[:, 4] == 1, 4, 0)  # 4/16; b comes first in the mask
        actions[:, 1] = 1  # the order of the training prompts' mean
        actions[:, 3] = 3  # 800 MB above the least memory of a remote function
        return actions


if __name__ == "__main__":
    rows = evaluate(
        "servegym/ExpertPlacement-v0",
        [MostUsed(), "prism", "uniform"],
        episodes=2,
        env_kwargs={"epochs": 2},
    )
    print_summary(rows)
    rows = evaluate(
        "servegym/ServerlessMoE-v0",
        [QuarterRemote(), "mix", "greedy_warm"],
        episodes=2,
        env_kwargs={"episode_requests": 50},
    )
    print_summary(rows)
