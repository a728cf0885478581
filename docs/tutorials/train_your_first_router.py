"""Train your first router.

A short training of PPO on the flat routing observation, then the learned policy beside two
heuristics on the same evaluation episodes. With the default of three million steps in place of
this minute's worth, PPO becomes a serious router; see the agents' pages.
"""

import tempfile

from servegym.agents.ppo import Args, train
from servegym.experiments.evaluate import evaluate, print_summary

with tempfile.TemporaryDirectory() as folder:
    run = train(
        Args(
            total_timesteps=20_000,
            num_envs=16,
            num_steps=64,
            set=("num_experts=3", "episode_requests=200", "rate=[3,5]"),  # of the environment
            eval_every=10_000,
            eval_rate=4.0,
            out_dir=folder,
        )
    )
    rows = evaluate(
        "servegym/LLMRouting-v0",
        [run / "best.safetensors", "greedy_qos", "random"],
        episodes=4,
        env_kwargs={"num_experts": 3, "episode_requests": 200, "rate": 4.0},
    )
print_summary(rows)
