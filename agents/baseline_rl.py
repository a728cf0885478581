"""The paper's Baseline RL: discrete soft actor-critic over the experts' rows alone.

Baseline RL (arXiv:2508.00234, section VI) sees of every expert its memory, running and waiting
requests (Eq. 7), neither the arrived request nor its predictions nor the queues, and is paid the
QoS of a request when it is completed. One small network reads every expert's row and who it is, so
that a policy is made for one number of experts.

Neighbours: `sac_han` is the same learner, to the losses, over the whole graph;
``sac_han.py --set reward=completed_qos`` is the paper's Baseline RL + DSA. `cem` searches
a linear policy over the same state. ``python agents/baseline_rl.py --help`` lists the options.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym._command_line import parse_settings
from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import RunArgs, at_least, run_agent
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.run_log import RunLog, interval_passed

ENV_ID = "servegym/LLMRouting-v1"

# Requests/s; an episode is cut off before the drain, which nothing announces.
ENV = {"rate": 8.0, "reward": "completed_qos"}
ENV |= {"episode_requests": 400, "max_episode_steps": 399}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

WIDTH = 32  # of every hidden layer; a row has three numbers
LENGTH = 16  # steps of a stored piece, over which the returns run
AVERAGE = 0.01  # polyak step of the averaged network, per update
LOG_EVERY = 4_000  # steps between rows of the log
EVAL_EPISODES, EVAL_REQUESTS = 16, 300  # of an evaluation: episodes per rate, requests per episode


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=8 num_experts=3"""
    total_timesteps: int = 250_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    learning_starts: int = 8_192
    """steps of uniform legal actions before the first update, at most a quarter of all steps"""
    buffer_size: int = 250_000
    """steps in the replay buffer"""
    pieces: int = 16
    """pieces of 16 steps in a batch"""
    updates_per_step: int = 2
    """gradient updates after each step of all environments"""
    gamma: float = 0.98
    """discount per decision"""
    lam: float = 0.8
    """lambda of the returns"""
    lr: float = 1e-3
    """learning rate at first; it falls linearly to a twentieth"""
    alpha: float = 0.03
    """temperature: weight of the policy's entropy in the actor's loss"""
    tau: float = 0.05
    """polyak step of the target network, per update"""
    eval_every: int = 25_000
    """steps between evaluations on the validation split; there is one before the first step"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


class Head(nn.Module):
    """Values of the actions: drop from MLP[h], expert n from MLP[h | h_n], h the mean.

    ``copies`` networks of the same form, each with weights of its own, are computed together.
    """

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies
        self.common = nn.Linear(WIDTH, copies * WIDTH)
        self.by_mean = nn.Linear(WIDTH, copies * WIDTH)
        self.by_expert = nn.Linear(WIDTH, copies * WIDTH)
        bound = WIDTH**-0.5
        self.out = nn.Parameter(torch.empty(copies, WIDTH, 3).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(copies, 2))

    def forward(self, experts: Tensor) -> Tensor:
        """Embeddings (B, N, 32) -> (copies, B, N+1); a value common to all is added (dueling)."""
        batch, n, _ = experts.shape
        mean = experts.mean(1)
        hidden = self.common(mean).relu().view(batch, self.copies, WIDTH).transpose(0, 1)
        drop, common = (hidden @ self.out[..., :2] + self.bias[:, None]).split(1, -1)
        hidden = (self.by_mean(mean)[:, None] + self.by_expert(experts)).relu()
        hidden = hidden.view(batch * n, self.copies, WIDTH).transpose(0, 1)
        each = (hidden @ self.out[..., 2:]).view(self.copies, batch, n)
        return torch.cat([drop, each], -1) + common


class Agent(nn.Module):
    """Encoder shared by actor and twin critics; the critics' loss alone trains the encoder.

    An expert's input is its row, the mean row and a learned vector that tells it apart.
    """

    fixed_experts = True

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.who = nn.Parameter(torch.randn(experts, 8))
        self.each = nn.Sequential(
            nn.Linear(14, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.actor, self.critics = Head(1), Head(2)

    def rows(self, obs: Mapping[str, Any]) -> NDArray[np.float16]:
        """Scaled rows (B, 3 N) of a batch of observations.

        Raises:
            ValueError: If the number of experts is not the agent's.
        """
        experts = obs["experts"]
        if experts.shape[1] != len(self.who):
            raise ValueError(f"made for {len(self.who)} experts, got {experts.shape[1]}")
        return (experts * (2, 1 / 3, 1 / 3)).reshape(len(experts), -1).astype(np.float16)

    def encode(self, rows: Tensor) -> Tensor:
        """Embeddings of the experts (B, N, 32)."""
        own = rows.view(len(rows), -1, 3)
        mean, who = own.mean(1, keepdim=True).expand_as(own), self.who.expand(len(own), -1, -1)
        return self.each(torch.cat([own, mean, who], -1))

    def log_policy(self, h: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
        return self.actor(h)[0].masked_fill(mask == 0, -1e8).log_softmax(-1)

    @torch.no_grad()
    def act(self, obs: Mapping[str, Any], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        h = self.encode(torch.as_tensor(self.rows(obs)).float())
        legal = torch.as_tensor(np.asarray(mask))
        return self.log_policy(h, legal).argmax(-1).numpy()


class ReplayBuffer:
    """Time-major ring of steps of all environments; rows of scaled features in float16."""

    def __init__(self, length: int) -> None:
        self.length, self.count, self.data = length, 0, {}

    def add(self, **step: NDArray[Any]) -> None:
        """Append one step of all environments."""
        for key, value in step.items():
            if not self.count:
                self.data[key] = np.zeros((self.length, *value.shape), value.dtype)
            self.data[key][self.count % self.length] = value
        self.count += 1

    def sample(self, pieces: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Pieces of consecutive steps and the state after them: (LENGTH + 1, pieces, ...)."""
        start = rng.integers(max(self.count - self.length, 0), self.count - LENGTH, pieces)
        at = (start + np.arange(LENGTH + 1)[:, None]) % self.length
        env = rng.integers(0, self.data["action"].shape[1], pieces)
        return {key: values[at, env] for key, values in self.data.items()}


def lambda_returns(batch: Mapping[str, Tensor], value: Tensor, gamma: float, lam: float) -> Tensor:
    """Peng's returns G_t = r_t + gamma ((1 - lam) V(s_t+1) + lam G_t+1) of pieces; (LENGTH, P).

    A step that a time limit cut has no successor in the buffer: its return is its own value.
    """
    result = [value[-1]]
    for t in reversed(range(LENGTH)):
        mixed = (1 - lam) * value[t + 1] + lam * result[-1]
        total = batch["reward"][t] + gamma * (1 - batch["terminated"][t]) * mixed
        result.append(torch.where(batch["truncated"][t] > 0, value[t], total))
    return torch.stack(result[:0:-1])


def update(
    agent: Agent, target: Agent, optimizer: torch.optim.Optimizer, batch: Any, args: Args
) -> dict[str, Tensor]:
    """One gradient step on critics, encoder and actor, and a polyak step of the target."""
    rows, mask = batch["rows"].flatten(0, 1), batch["mask"].flatten(0, 1)
    with torch.no_grad():
        h = target.encode(rows)
        value = (target.log_policy(h, mask).exp() * target.critics(h).mean(0)).sum(-1)
        returns = lambda_returns(batch, value.view(LENGTH + 1, -1), args.gamma, args.lam).flatten()
    h = agent.encode(rows)
    q = agent.critics(h)
    taken = q.gather(2, batch["action"].view(1, -1, 1).expand(2, -1, 1))[:, : len(returns), 0]
    error = (taken - returns).square() * (1 - batch["truncated"][:-1].flatten())
    q1_loss, q2_loss = error.mean(1)
    log_pi = agent.log_policy(h.detach(), mask)
    actor_loss = (log_pi.exp() * (args.alpha * log_pi - q.detach().mean(0))).sum(-1).mean()

    optimizer.zero_grad()
    (q1_loss + q2_loss + actor_loss).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    polyak_update(target, agent, args.tau)
    losses = {"losses/qf1_loss": q1_loss, "losses/qf2_loss": q2_loss}
    losses |= {"losses/actor_loss": actor_loss, "losses/qf1_values": q[0].mean()}
    losses["losses/entropy"] = -(log_pi.exp() * log_pi).sum(-1).mean()
    return {key: value.detach() for key, value in losses.items()}


@torch.no_grad()
def polyak_update(target: nn.Module, net: nn.Module, tau: float) -> None:
    """Move the target's weights towards the network's by a share of tau."""
    torch._foreach_lerp_(list(target.parameters()), list(net.parameters()), tau)  # pyright: ignore


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> Any:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = ENV | parse_settings(args.set)
    env_kwargs.pop("max_episode_steps", None)  # cuts off the training alone
    agent = Agent(len(weights["who"]))
    if system is not None and system.num_experts != len(agent.who):
        raise ValueError(f"made for {len(agent.who)} experts, got {system.num_experts}")
    checkpoint.load_weights(agent, weights)
    return checkpoint.CheckpointPolicy("baseline_rl", "graph", args, agent, agent.act, env_kwargs)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    at_least("buffer_size", args.buffer_size, (LENGTH + 2) * args.num_envs)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs, n = environments.make_envs(ENV_ID, args.num_envs, **env_kwargs), args.num_envs
    run = Path(args.out_dir) / (args.run_name or f"baseline_rl_{args.seed}")

    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    agent = Agent(info["action_mask"].shape[1] - 1)
    target, averaged = (deepcopy(agent).requires_grad_(False) for _ in range(2))
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    mask, rows = info["action_mask"], agent.rows(obs)
    buffer = ReplayBuffer(args.buffer_size // n)
    learning_starts = min(args.learning_starts, args.total_timesteps // 4)
    every = args.eval_every or args.total_timesteps
    step, mean_reward, cpu_s, evaluated = 0, 0.0, 0.0, -1
    returns, episodic_returns = np.zeros(n), []
    log = RunLog(run, args, "baseline_rl")
    losses: dict[str, Tensor] = {}
    while True:
        # Evaluate the averaged policy, at first that of random weights.
        if step // every > evaluated or step >= args.total_timesteps:
            evaluated, log.phase = step // every, "evaluating"
            result = evaluate_router(
                averaged.act, ENV_ID, env_kwargs, args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            )
            log.write(step, result | {"charts/cpu_s": cpu_s})
            log.print_qos(step, result)
        if step >= args.total_timesteps:
            break

        # Act: uniformly at first, then by the policy; step the environments and store the step.
        begin = time.process_time()
        score = rng.gumbel(size=mask.shape)
        if step >= learning_starts:
            with torch.no_grad():
                h = agent.encode(torch.as_tensor(rows).float())
                score += agent.log_policy(h, torch.as_tensor(mask)).numpy()
        action = np.where(mask, score, -1e30).argmax(-1)
        obs, reward, terminated, truncated, info = envs.step(action)
        ends = {"terminated": terminated, "truncated": truncated & ~terminated, "reward": reward}
        ends = {key: value.astype(np.float32) for key, value in ends.items()}
        buffer.add(rows=rows, mask=mask, action=action, **ends)
        mean_reward += (reward.mean() - mean_reward) * max(0.002, 1 / buffer.count)
        mask, rows = info["action_mask"], agent.rows(obs)
        before, step = step, step + n
        returns, done = returns + reward, terminated | truncated
        episodic_returns += returns[done].tolist()
        returns[done] = 0

        # Learn.
        if step >= learning_starts and buffer.count > LENGTH:
            optimizer.param_groups[0]["lr"] = args.lr * (1 - 0.95 * step / args.total_timesteps)
            for _ in range(args.updates_per_step):
                sample = buffer.sample(args.pieces, rng)
                sample["reward"] -= np.float32(mean_reward)
                batch = {k: torch.as_tensor(v) for k, v in sample.items()}
                batch["rows"] = batch["rows"].float()
                losses = update(agent, target, optimizer, batch, args)
                polyak_update(averaged, agent, AVERAGE)
        cpu_s += time.process_time() - begin

        # Log.
        if interval_passed(LOG_EVERY, before, step) or step >= args.total_timesteps:
            metrics = {"charts/SPS": log.advance(step), "charts/cpu_s": cpu_s}
            metrics |= {k: float(v) for k, v in losses.items()}
            if episodic_returns:
                metrics["charts/episodic_return"] = float(np.mean(episodic_returns))
            log.write(step, metrics)
            episodic_returns = []
    if args.save_model:
        meta = {"agent": "baseline_rl", "args": json.dumps(asdict(args))}
        checkpoint.write_checkpoint(averaged, meta, run / "last.safetensors")
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    run_agent(train, Args)
