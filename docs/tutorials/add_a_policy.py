"""Add a policy.

A policy is a function of an observation and a mask of legal actions. Wrapped by `from_callable` it
runs wherever a name does. The command line takes a `.py` file, too, if it has one of

- a function `act(observation, action_mask)`, which gets one decision and returns one action, as
  below;
- a class `Policy(BasePolicy)` whose `act` gets a batch of B decisions and returns B actions, for
  what has a state: `self.system` is what an operator knows of the system, `episode_start(mask)`
  says which rows begin an episode. [The next page](add_a_placement_policy.md) has two;
- in the place of `act`, `predict(observation)`, which gets a batch and returns the actions, or as
  in Stable-Baselines3 the actions and a state. By their names it gets `state`, `episode_start`,
  `deterministic` and `action_masks`.

It reads the observation of the id that it is evaluated on; `env_view = "flat"` (or `"graph"`,
`"experts"`, `"summary"`), in the class or beside the function, names another. A model that
Stable-Baselines3 saved is [a policy by its `.zip`](../interop.md#your-model-beside-the-rules).

Then `servegym evaluate servegym/LLMRouting-v1 --policy my_router.py --policy greedy_qos` compares
it with another, and `servegym leaderboard --quick --policy my_router.py --at-least greedy_qos` is
a presubmit: 64 short episodes at each routing point of the leaderboard, and exit status 1 if it is
below at one of them, or clairvoyant, 3 if that is not told. An error in the file is reported with
its line.

## What a guest may do

A policy that is not the package's is a guest, and its rows say so (`source`):

- It runs in a process of its own, a fresh one for every episode (or block of `--num-envs`
  episodes), and gets copies: the description of the system, observations, masks, and the rewards
  of what has ended. It has 60 s for an answer (`--time-limit`). An object or a function is pickled
  and sent there; what comes back is read as numbers, of the action's types, and never unpickled.
- Of `env_kwargs` it may set what changes the interface: `reward` for routing, `granularity` for
  serverless, `action_mode` for placement. Everything else changes the world and is refused by
  name.
- It gets no number that the episodes are drawn from. Its own seed is the number of its block's
  first episode, and where `--seed` names none, the episodes are drawn with a seed that nobody
  knew before; the seeds printed at the end repeat them. Each point of the leaderboard, each rate of
  `presubmit` and each of `--profile-draws` has other episodes, so that nothing is gained by
  remembering them. An author who knows the seed can draw the episodes beforehand: whoever judges
  others' policies leaves it out, and uses no seed twice.
- Taking the environment (`needs_env`, `bind`) needs `--in-process`, which runs the file in the
  evaluator's process. Such rows read "guest in process", and "clairvoyant" whatever the policy
  says of itself. So is one that asks for `reward="paid_forward"`, which pays before an answer
  exists. With `needs_outcomes = True` its `outcomes(ended)` is told what became of a request when
  the request ends.
- Its process, and those that it has started, end with its block, or with the evaluator's process.
  What it compiles goes to a folder of its own.
- Its rows have the time of all its decisions over their number (`decision_s`) and that of the
  slowest (`slowest_decision_s`). In LLM routing a request waits for its own decision where that
  took 50 ms or longer, the first one too: compile and load in `reset` or before.
- Its name is not that of a policy or checkpoint of the package.

The prompts of the evaluation split come with the package, and a policy may carry their true scores
and recognise them. So `--at-least` plays routing guests on prompts that nobody has seen, too (a
synthetic catalog), and the worse result counts; a guest that is as good as a policy that knows the
future is remarked on.

This is no sandbox: code that sets out to break its process or the machine is not defended against.
A guest can still read and write the files and processes of its user, the evaluator's memory and the
package among them, and use the network; so read a stranger's file, or evaluate it in a container,
before you believe its row.
"""

import numpy as np

from servegym.baselines.registry import from_callable
from servegym.experiments.evaluation.evaluate import evaluate, print_summary


def act(observation: dict[str, np.ndarray], action_mask: np.ndarray) -> int:
    """The best predicted score per request already there; one decision, one action."""
    score = observation["request"][:, 1]
    load = observation["experts"][:, 1] + observation["experts"][:, 2]  # running and waiting
    value = np.where(action_mask[1:] == 1, score / (1.0 + load), -1.0)
    return 1 + int(value.argmax())  # 0 would drop the request


if __name__ == "__main__":  # the file may itself be given to --policy
    policy = from_callable(act, "score_per_load", batched=False)
    rows = evaluate(
        "servegym/LLMRouting-v1",
        [policy, "greedy_qos", "least_outstanding"],
        episodes=4,
        env_kwargs={"rate": 8.0, "episode_requests": 200},
    )
    print_summary(rows)
