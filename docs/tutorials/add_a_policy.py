"""Add a policy.

A policy is a function of an observation and a mask of legal actions. Wrapped by `from_callable` it
runs wherever a name does. The command line takes a `.py` file, too, if it has one of

- a function `act(observation, action_mask)`, which gets one decision and returns one action, as
  below;
- a class `Policy(BasePolicy)` whose `act` gets a batch of B decisions and returns B actions, for
  what has a state: `self.system` is what an operator knows of the system, `episode_start(mask)`
  says which rows begin an episode. [The next page](add_a_placement_policy.md) has two.

Then `servegym evaluate servegym/LLMRouting-v0 --policy my_router.py --policy greedy_qos` compares
it with another, and `servegym leaderboard --quick --policy my_router.py --at-least greedy_qos` is
a presubmit: short episodes at the routing points of the leaderboard, and exit status 1 if it is
below at one of them. An error in the file is reported with its line.
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


if __name__ == "__main__":  # the file may itself be given to --policy
    mine = from_callable(act, "score_per_load", batched=False)
    rows = evaluate(
        "servegym/LLMRouting-v0",
        [mine, "greedy_qos", "least_outstanding"],
        episodes=4,
        env_kwargs={"rate": 8.0, "episode_requests": 200},
    )
    print_summary(rows)
