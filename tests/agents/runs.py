"""A tiny run of every trained policy, and how tests read and make them."""

import json
from importlib import import_module
from typing import Any

ROUTING = "servegym/LLMRouting-v1"
OFF_POLICY = {"total_timesteps": 340, "num_envs": 4, "batch_size": 32, "eval_every": 240}
OFF_POLICY |= {"eval_rates": (8.0,)}
OFF_POLICY |= {"set": ("num_experts=3", "episode_requests=120", "max_episode_steps=119")}
ON_POLICY = {"total_timesteps": 300, "num_envs": 4, "num_steps": 32, "eval_every": 128}
ON_POLICY |= {"set": ("num_experts=3", "episode_requests=50")}
EPISODES = {"total_timesteps": 720, "num_envs": 4, "updates": 3, "batch_size": 64}
EPISODES |= {"eval_every": 240, "eval_rates": (8.0,)}
EPISODES |= {"set": ("num_experts=3", "episode_requests=60")}
PLANS = {"total_timesteps": 300, "num_envs": 8, "num_steps": 16, "width": 16, "eval_every": 128}
PLANS |= {"set": ("model=toy", "episode_requests=20", "max_episode_steps=17"), "eval_episodes": 2}
SEARCH = {"total_timesteps": 1200, "population": 10, "worlds": 4, "episodes": 2}
SEARCH |= {"eval_every": 600, "eval_worlds": 2, "eval_episodes": 2}
DRAWN = 'fleet_kwargs={"num_experts": [2, 4], "running_capacity": [5, 8]}'
TOY = ("model=toy", "epoch_s=40", "epochs=2", "mean_interarrival_s=4", "history_requests=5")
PLACING = {"set": TOY, "width": 16, "traffic_s": 40.0, "total_timesteps": 40, "eval_every": 16}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "sac_han": ("sac_han", OFF_POLICY),
    "sac_rows": ("sac_rows", OFF_POLICY),
    "baseline_rl": ("sac_rows", OFF_POLICY | {"rows": "experts", "shaping": False}),
    "td_afterstates": ("td_afterstates", EPISODES),
    "ppo": ("ppo", ON_POLICY | {"eval_episodes": 2}),
    "ppo_requests": ("ppo_requests", ON_POLICY | {"eval_episodes": 2, "average": 0.1}),
    "direct_search": ("cem", SEARCH | {"set": ("num_experts=2", "episode_requests=30", "rate=4")}),
    "fleet_search": ("cem", SEARCH | {"set": ("fleet=random", DRAWN, "episode_requests=20")}),
    "prefix_search": ("cem", SEARCH | {"env_id": "servegym/PrefixRouting-v1"}),
    "ppo_serverless": ("ppo_serverless", PLANS),
    "ppo_placement": ("ppo_placement", PLACING | {"num_envs": 16, "group_size": 8}),
    "mappo_placement": ("mappo_placement", PLACING | {"batch_size": 16}),
}
"""Name of the policy -> its agent, and the arguments of a run of about a second."""


def tiny(policy: str, folder: Any, **changes: Any) -> tuple[Any, Any]:
    """The agent's module and the arguments of the tiny run."""
    agent, settings = TINY[policy]
    module = import_module(f"servegym.agents.{agent}")
    given = settings | {"out_dir": str(folder), "run_name": "run"} | changes
    return module, module.Args(**given)


def lines(run):
    """The log without what the clock decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("charts/SPS", "charts/cpu_s")} for row in rows
    ]
