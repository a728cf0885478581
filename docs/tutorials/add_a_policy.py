"""Add a policy.

A policy is a function of an observation and a mask of legal actions. Wrapped by `from_callable` it
runs wherever a name does; as a `.py` file with a function `act`, the command line takes it too:
`servegym evaluate servegym/LLMRouting-v0 --policy my_router.py --policy greedy_qos`, or as a
presubmit `servegym leaderboard --quick --policy my_router.py --at-least greedy_qos`.
"""

import numpy as np

from servegym.baselines.registry import from_callable
from servegym.experiments.evaluate import evaluate, print_summary


def act(observation: dict[str, np.ndarray], action_mask: np.ndarray) -> int:
    """The best predicted score per request already there; one decision, one action."""
    score = observation["request"][:, 1]
    load = observation["experts"][:, 1] + observation["experts"][:, 2]  # running and waiting
    value = np.where(action_mask[1:] == 1, score / (1.0 + load), -1.0)
    return 1 + int(value.argmax())  # 0 would drop the request


mine = from_callable(act, "score_per_load", batched=False)
rows = evaluate(
    "servegym/LLMRouting-v0",
    [mine, "greedy_qos", "least_outstanding"],
    episodes=4,
    env_kwargs={"rate": 8.0, "episode_requests": 200},
)
print_summary(rows)
