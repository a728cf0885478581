"""Add a policy.

A policy maps an observation and a mask of legal actions to an action. `from_callable` makes one of
a function. The command line takes a `.py` file with

- `act(observation, action_mask)`, for one decision, as below;
- a class `Policy(BasePolicy)`, whose `act` takes a batch ([examples](add_a_placement_policy.md)):
  `self.system` describes the system, `episode_start(mask)` says which rows begin an episode; or
- `predict(observation)`, which takes a batch and returns actions, or as in Stable-Baselines3
  actions and a state. It may take `state`, `episode_start`, `deterministic` and `action_masks`.

It reads the observation of the id that it is evaluated on. `env_view = "flat"` (`"graph"`,
`"experts"`, `"summary"`) in the class or the file names another.

    servegym evaluate servegym/LLMRouting-v1 --policy my_router.py --policy greedy_qos
    servegym leaderboard --quick --policy my_router.py --at-least greedy_qos

The second line is a presubmit: 64 short episodes at each routing point of the leaderboard. Exit
status 1 says that the policy is below `greedy_qos` at one of them or clairvoyant, 3 that the
episodes do not tell.

The file below prints (interquartile means over episodes, 95 % intervals):

```text
 policy                                       QoS   drop %   reject %   late %   ms/token     P99
 five_at_most (guest)        0.624 [0.619, 0.629]      9.3        0.0      1.3       20.1    30.1
 greedy_qos                  0.574 [0.566, 0.586]      8.8        0.0      8.8       26.6    65.5
 least_outstanding           0.575 [0.550, 0.600]      0.0        0.0     16.3       25.4    97.0
```

## What a guest may do

A policy that is not the package's is a guest (`source` in its rows).

- **Process.** It runs in a process of its own, a fresh one for each episode or block of
  `--num-envs` episodes. It gets copies of the system's description, the observations, the masks and
  the rewards of what has ended. Objects and functions must pickle.
- **Time.** It has 60 s for an answer (`--time-limit`). In LLM routing a request waits for its own
  decision where that takes 50 ms or longer: compile and load in `reset` or before. Rows have the
  mean and the longest time (`decision_s`, `slowest_decision_s`).
- **Arguments.** `env_kwargs` may set `reward` (routing), `granularity` (serverless) or
  `action_mode` (placement). Others change the world and are refused.
- **Chance.** It gets no number that the episodes are drawn from. Without `--seed` they have a fresh
  seed, which is printed: leave it out to judge other people's policies.
- **Environment.** `needs_env` and `bind` need `--in-process` and make a guest clairvoyant, as does
  `reward="paid_forward"`, paid before an answer exists.
- **Outcomes.** With `needs_outcomes = True`, `outcomes(ended)` is told what became of requests.

The evaluation prompts ship with the package, so a policy could carry their true scores. Therefore
`--at-least` also plays routing guests on a synthetic catalog; the worse result counts.

This is no sandbox: read a stranger's file, or evaluate it in a container.
"""

import numpy as np

from servegym.baselines.registry import from_callable
from servegym.experiments.evaluation.evaluate import evaluate, print_summary


def act(observation: dict[str, np.ndarray], action_mask: np.ndarray) -> int:
    """Best predicted score less a price on the requests there; at most five on an expert."""
    score = observation["request"][:, 1]
    load = observation["experts"][:, 1] + observation["experts"][:, 2]  # running and waiting
    free = (action_mask[1:] == 1) & (load < 5)
    return 1 + int(np.where(free, score - load / 6, -np.inf).argmax()) if free.any() else 0  # drop


if __name__ == "__main__":  # the file may itself be given to --policy
    rows = evaluate(
        "servegym/LLMRouting-v1",
        [from_callable(act, "five_at_most", batched=False), "greedy_qos", "least_outstanding"],
        episodes=16,
        seed=1,
        env_kwargs={"rate": 8.0},
        num_envs=16,
    )
    print_summary(rows)
