"""PPO that pays each decision what its own request counts.

Rewards of the routing ids come when requests end, hundreds of decisions later and mixed. Here whole
episodes are the rollouts: when one has ended, what became of every request is paid at the decision
that sent it.

Network and losses are those of `ppo`. The weights that are evaluated and saved are an average
(``--average``). ``python agents/ppo_requests.py --help`` lists the options.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from servegym.agents import ppo
from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import Share, run_agent
from servegym.agents.lib.evaluation import Validation
from servegym.agents.lib.run_log import RunLog, evaluation_due, saves_when_interrupted
from servegym.envs._outcomes import OutcomeReader
from servegym.envs.families import find_family


@dataclass
class Args(ppo.Args):
    """Command line of the agent; ``num_steps`` are the decisions of an episode."""

    average: Share = 0.0
    """share of new weights in the average that is evaluated and saved, an update; 0: no average"""


def env_kwargs(args: Args) -> dict[str, Any]:
    """Arguments of the training environment."""
    return ppo.env_kwargs(args, cut=False) | {"episode_requests": args.num_steps}


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> Any:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    policy = ppo.load(meta, weights, system)
    policy.args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    policy.name, policy.training_env = "ppo_requests", env_kwargs(policy.args)
    return policy


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    family = find_family(args.env_id)
    if family is None or not family.outcomes:
        raise ValueError(f"env_id: requests of {args.env_id!r} are not told when they end")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    n, steps = min(args.num_envs, args.total_timesteps), args.num_steps
    updates = -(-args.total_timesteps // (steps * n))
    resets = AutoresetMode.DISABLED
    envs = environments.make_envs(args.env_id, n, autoreset_mode=resets, **env_kwargs(args))
    settings = ppo.network_settings(envs, args)
    agent = ppo.Agent(**settings)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    averaged = copy.deepcopy(agent) if args.average else agent

    def average(*_: Any) -> None:
        for mean, new in zip(averaged.parameters(), agent.parameters(), strict=True):
            mean.data.lerp_(new.data, args.average)

    optimizer.register_step_post_hook(average)
    log = RunLog(args, "ppo_requests", args.env_id, env_kwargs(args))
    meta = {"agent": "ppo_requests", "args": json.dumps(asdict(args))}
    meta |= {"shape": json.dumps(settings)}
    log.save = partial(checkpoint.write_checkpoint, averaged, meta)
    validation = Validation(args.env_id, args.eval_episodes, ppo.env_kwargs(args, cut=False))

    x, mask = agent.observe(*envs.reset(seed=environments.episode_seeds(args.seed, n)))
    parts = {"agent": agent, "optimizer": optimizer, "envs": envs}
    parts |= {"averaged": averaged} if args.average else {}
    update, best, metrics = log.restore(parts, (0, -np.inf, {}))

    obs_buf = torch.zeros((steps, *x.shape))
    mask_buf = torch.zeros((steps, *mask.shape), dtype=torch.int8)
    action_buf = torch.zeros((steps, n), dtype=torch.long)
    logp_buf, rewards, values, zeros = (torch.zeros((steps, n)) for _ in range(4))
    while True:
        step = update * steps * n
        log.snapshot(step, parts, (update, best, metrics))
        # Evaluate: the random weights first, the last policy at the end.
        if evaluation_due(args.eval_every, step - steps * n, step) or update == updates:
            log.phase = "evaluating"
            score = validation.score(averaged.act)
            log.say_score(step, validation.metric, score, validation.rule)
            best = checkpoint.save_best_and_last(log.save, args, log.run, score, best)
        log.write(step, metrics)
        if update == updates:
            break

        # Collect an episode of every environment.
        if update:
            x, mask = agent.observe(*envs.reset())
        with torch.no_grad():
            for t in range(steps):
                obs_buf[t], mask_buf[t] = x, mask
                log_pi, values[t] = agent(x, mask)
                action_buf[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                logp_buf[t] = log_pi.gather(1, action_buf[t][:, None]).squeeze(1)
                obs, reward, terminated, truncated, info = envs.step(action_buf[t].numpy())
                x, mask = agent.observe(obs, info)
                log.add_rewards(reward, terminated | truncated)

        # Pay each decision for its own request.
        ended = OutcomeReader(envs).read()
        rewards[ended["decision"], ended["row"]] = torch.as_tensor(ended["reward"]).float()
        following = torch.cat([values[1:], zeros[:1]])
        advantages = ppo.estimate_advantages(rewards, values, following, zeros, args)

        # Learn.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / updates)
        buffers = (obs_buf, mask_buf, action_buf, logp_buf, advantages, advantages + values)
        metrics = ppo.learn(agent, optimizer, buffers, args)
        averaged.moments.load_state_dict(agent.moments.state_dict())
        update += 1
        metrics["charts/SPS"] = log.advance(update * steps * n)
    envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
