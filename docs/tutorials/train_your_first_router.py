"""Train your first router.

A short training of PPO from random weights on the routing id with a row for each expert, then the
learned policy beside two heuristics on the same evaluation episodes. With the default number of
steps in place of these few seconds' worth, PPO becomes a serious router; see the agents' pages.
`python agents/ppo.py` leaves its run in a folder, whose curve `servegym plot runs/ppo_1` draws.
"""

import tempfile

from servegym.agents.ppo import Args, train
from servegym.experiments.evaluation.evaluate import evaluate, print_summary

with tempfile.TemporaryDirectory() as folder:
    run = train(
        Args(
            total_timesteps=50_000,
            set=("rate=8",),  # of the environment
            eval_every=25_000,
            eval_episodes=4,
            out_dir=folder,
        )
    )
    rows = evaluate(
        "servegym/LLMRouting-v1",
        [run / "last.safetensors", "least_outstanding", "random"],
        episodes=4,
        env_kwargs={"rate": 8.0},
    )
print_summary(rows)
