"""Add a policy for placement or serverless.

`act` gets and returns, for a batch of B decisions:

| family | `action_mask` | `act` returns |
| --- | --- | --- |
| routing | int8 (B, N + 1) | int64 (B,): 0 drops, n sends to expert n |
| serverless | int8 (B, all values of all parts) | int64 (B, 5): b, order, w, y and z |
| placement | None, every action is legal | `{"migrate": (B,), "plan": (B, ...)}` |

`migrate` is 1 to adopt the plan and 0 to keep the placement. `action_mode` in `env_kwargs` gives
the plan's form: `"layer_budget"` or `"layer_height"` (B, N, L), `"expert_score"` (B, N, L, E) or
`"placement"` (B, G, L, E). `ExpertPlacement-v0` and `ServerlessMoE-v0` document the parts.

It prints (interquartile means over episodes, 95 % intervals):

```text
 policy                            latency s   P99 s   TTFT s
 most_used (guest)   20.795 [19.202, 26.004]   46.21     4.88
 prism               17.461 [16.049, 21.434]   36.03     3.90

 policy                          reward a request   cost / MIX   late TTFT %   late TPOT %
 quarter_remote (guest)   -0.594 [-0.613, -0.578]        0.513          14.9           7.1
 mix                      -0.660 [-0.692, -0.647]        0.594          20.6           0.0
 greedy_warm              -0.566 [-0.591, -0.525]        0.513           9.6           5.4
```
"""

import numpy as np

from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation.evaluate import evaluate, print_summary


class MostUsed(BasePolicy):
    """Each server holds the experts that its own requests use most; decided once, at the start."""

    name = "most_used"
    env_kwargs = {"action_mode": "expert_score"}

    def act(self, observation, action_mask):
        """The more tokens an expert got at a server, the sooner it gets one of its slots."""
        counts = observation["counts"]  # (B, N, L, E)
        first = observation["progress"][:, 0] == 0
        return {"migrate": first.astype(np.int64), "plan": counts / max(counts.max(), 1)}


class QuarterRemote(BasePolicy):
    """A quarter of each layer's experts are remote, in an order that lets functions stay warm."""

    name = "quarter_remote"

    def act(self, observation, action_mask):
        """The same plan always; no expert is remote where it cannot be met as predicted."""
        actions = np.zeros((len(action_mask), 5), dtype=np.int64)  # b, order, w, y, z
        actions[:, 0] = np.where(action_mask[:, 4] == 1, 4, 0)  # 4/16; b comes first in the mask
        actions[:, 1] = 1  # the order of the training prompts' mean
        actions[:, 3] = 3  # 800 MB above the least memory of a remote function
        return actions


if __name__ == "__main__":
    for env_id, policies, settings in (
        ("servegym/ExpertPlacement-v0", [MostUsed(), "prism"], {"epochs": 2}),
        ("servegym/ServerlessMoE-v0", [QuarterRemote(), "mix", "greedy_warm"], {}),
    ):
        rows = evaluate(env_id, policies, episodes=5, seed=1, env_kwargs=settings, num_envs=5)
        print_summary(rows)
