"""The paper's Baseline RL: discrete soft actor-critic over the experts' rows alone.

Baseline RL (arXiv:2508.00234, section VI) sees of every expert its memory, running and waiting
requests (Eq. 7), neither the arrived request nor its predictions nor the queues, and is paid the
QoS of a request when it is completed. One small network reads every expert's row and who it is, so
that a policy is made for one number of experts. In training, as in `sac_han`, what no action
changes is regressed out: the arrivals and the requests' predictions.

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
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym._command_line import parse_settings
from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import RunArgs, at_least, run_agent
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.baselines.llm_routing.features import exogenous
from servegym.envs.llm_routing.outcomes import OutcomeReader

ENV_ID = "servegym/LLMRouting-v1"

# Requests/s; an episode is cut off before the drain, which nothing announces.
ENV = {"rate": 8.0, "reward": "completed_qos"}
ENV |= {"episode_requests": 400, "max_episode_steps": 399}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

WIDTH = 32  # of every hidden layer; a row has three numbers
LENGTH = 32  # steps of a stored piece, over which the returns run
ENDS_WITHIN = 80  # decisions; a request that has not ended then is late, or its episode is cut off
LOAD = 18  # numbers of `ReplayBuffer.load`
LATER = ((8, 0), (32, 1), (64, 2))  # decisions ahead at which a mean gap of so many is seen
LOG_EVERY = 4_000  # steps between rows of the log
EVAL_EPISODES, EVAL_REQUESTS = 16, 300  # of an evaluation: episodes per rate, requests per episode


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=8 num_experts=3"""
    total_timesteps: int = 480_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 256
    """parallel environments"""
    buffer_size: int = 100_000
    """steps in the replay buffer"""
    pieces: int = 8
    """pieces of 32 steps in a batch"""
    updates_per_step: int = 2
    """gradient updates after each step of all environments"""
    gamma: float = 0.995
    """discount per decision"""
    lam: float = 0.97
    """lambda of the returns"""
    lr: float = 3e-3
    """learning rate at first; it falls linearly to a twentieth"""
    alpha: float = 0.03
    """temperature of the policy, the weight of its entropy"""
    tau: float = 0.005
    """polyak step of the target network, per update"""
    eval_every: int = 40_000
    """steps between evaluations on the validation split; there is one before the first step"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with rectifiers between them."""
    layers = [[nn.ReLU(), nn.Linear(i, o)] for i, o in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*sum(layers, [])[1:])


class Agent(nn.Module):
    """The critic, whose softmax is the policy; a learned vector tells an expert apart."""

    fixed_experts = True

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.slots = 1  # running slots of an expert
        self.who = nn.Parameter(torch.randn(experts, 8))
        self.each = mlp(14, WIDTH, WIDTH)
        self.drop, self.send = mlp(WIDTH, WIDTH, 1), mlp(2 * WIDTH, WIDTH, 1)
        self.expert_value = mlp(11, WIDTH, WIDTH, 1)
        self.load_value = mlp(LOAD, WIDTH, WIDTH, 1)

    def rows(self, obs: Mapping[str, Any]) -> NDArray[np.float16]:
        """Scaled rows (B, 3 N) of a batch of observations.

        Raises:
            ValueError: If the number of experts is not the agent's.
        """
        experts, self.slots = obs["experts"], obs["running"].shape[2]
        if experts.shape[1] != len(self.who):
            raise ValueError(f"made for {len(self.who)} experts, got {experts.shape[1]}")
        return (experts * (2, 1 / 3, 1 / 3)).reshape(len(experts), -1).astype(np.float16)

    def parts(self, rows: Tensor) -> Tensor:
        """Reward and value of the state after each action (2, B, N+1); Q is their sum.

        The reward is MLP[mean h] of a drop, MLP[mean h | h_n] of an expert; the value a sum over
        the experts, the chosen one with a request more. `load_value` is not in it.
        """
        x = rows.view(len(rows), -1, 3)
        mean, who = x.mean(1, keepdim=True).expand_as(x), self.who.expand(len(x), -1, -1)
        h = self.each(torch.cat([x, mean, who], -1)).relu()
        mean = h.mean(1)
        each = self.send(torch.cat([mean[:, None].expand_as(h), h], -1)).squeeze(-1)
        runs, after = (3 * x[..., 1] < self.slots - 0.5).float(), x.clone()
        after[..., 1] += runs / 3
        after[..., 2] += (1 - runs) / 3
        inputs = torch.cat([torch.stack([x, after]), who.expand(2, -1, -1, -1)], -1)
        before, after = self.expert_value(inputs).squeeze(-1)
        value = before.sum(-1, keepdim=True) + F.pad(after - before, (1, 0))
        return torch.stack([torch.cat([self.drop(mean), each], -1), value])

    @torch.no_grad()
    def act(self, obs: Mapping[str, Any], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        q = self.parts(torch.as_tensor(self.rows(obs)).float()).sum(0)
        return log_policy(q, torch.as_tensor(np.asarray(mask)), 1.0).argmax(-1).numpy()


def log_policy(q: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
    return (q / alpha).masked_fill(mask == 0, -1e8).log_softmax(-1)


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

    def settle(self, ended: NDArray[Any], begun: NDArray[Any], done: NDArray[np.bool_]) -> None:
        """Pay the QoS of ended requests (K,) to their decisions; cut the untold end of episodes."""
        at = begun[ended["row"]] + ended["request"]
        qos = np.where(at < self.count - self.length, 0.0, ended["qos"])
        self.data["reward"][at % self.length, ended["row"]] += qos
        last = np.arange(max(self.count - ENDS_WITHIN, 0), self.count) % self.length
        self.data["cut"][np.ix_(last, done)] = 1

    def load(self, at: NDArray[np.int64], env: NDArray[np.int64]) -> NDArray[np.float32]:
        """The request and the arrivals before and after the steps ``at``, (..., LOAD)."""
        seen = self.data["exogenous"]
        later = [seen[(at + k) % self.length, env, j, None] for k, j in LATER]
        gaps = np.concatenate([seen[at % self.length, env, :3], *later], -1)
        own = seen[at % self.length, env, 3:]
        return np.concatenate([np.ones_like(gaps[..., :1]), gaps, gaps**2, own], -1)

    def sample(self, pieces: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Pieces of consecutive steps, whose requests have ended: (LENGTH + 1, pieces, ...)."""
        oldest, newest = max(self.count - self.length, 0), self.count - LENGTH - ENDS_WITHIN
        at = rng.integers(oldest, newest, pieces) + np.arange(LENGTH + 1)[:, None]
        env = rng.integers(0, self.data["action"].shape[1], pieces)
        found = {key: values[at % self.length, env] for key, values in self.data.items()}
        return found | {"load": self.load(at, env)}


def lambda_returns(batch: Mapping[str, Tensor], value: Tensor, gamma: float, lam: float) -> Tensor:
    """Peng's G_t = r_t + gamma ((1 - lam) V(s_t+1) + lam G_t+1) (LENGTH, P); V(s_t) if t is cut."""
    result = [value[-1]]
    for t in reversed(range(LENGTH)):
        total = batch["reward"][t] + gamma * ((1 - lam) * value[t + 1] + lam * result[-1])
        result.append(torch.where(batch["cut"][t] > 0, value[t], total))
    return torch.stack(result[:0:-1])


def update(
    agent: Agent, target: Agent, optimizer: torch.optim.Optimizer, batch: Any, args: Args
) -> dict[str, Tensor]:
    """One gradient step on the critic and a polyak step of the target."""
    rows, mask, load = (batch[key].flatten(0, 1) for key in ("rows", "mask", "load"))
    reward, known = batch["reward"][:-1].flatten(), 1 - batch["cut"][:-1].flatten()
    with torch.no_grad():
        q = target.parts(rows).sum(0)
        value = (log_policy(q, mask, args.alpha).exp() * q).sum(-1) + target.load_value(load)[:, 0]
        returns = lambda_returns(batch, value.view(LENGTH + 1, -1), args.gamma, args.lam).flatten()
    parts = agent.parts(rows)
    now, after = parts[:, torch.arange(len(reward)), batch["action"][:-1].flatten().long()]
    after = after + agent.load_value(load[: len(reward)])[:, 0]
    reward_loss = ((now - reward).square() * known).mean()
    value_loss = ((after - (returns - reward)).square() * known).mean()

    optimizer.zero_grad()
    (reward_loss + value_loss).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_([*target.parameters()], [*agent.parameters()], args.tau)  # pyright: ignore
    log_pi = log_policy(parts.detach().sum(0), mask, args.alpha)
    losses = {"losses/reward_loss": reward_loss, "losses/value_loss": value_loss}
    losses["losses/entropy"] = -(log_pi.exp() * log_pi).sum(-1).mean()
    return {key: value.detach() for key, value in losses.items()}


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
    at_least("buffer_size", args.buffer_size, (LENGTH + ENDS_WITHIN + 2) * args.num_envs)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs, n = environments.make_envs(ENV_ID, args.num_envs, **env_kwargs), args.num_envs
    for key in ("episode_requests", "max_episode_steps"):
        at_least(key, env_kwargs[key] or LENGTH + ENDS_WITHIN, LENGTH + ENDS_WITHIN)
    run = Path(args.out_dir) / (args.run_name or f"baseline_rl_{args.seed}")

    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    agent = Agent(info["action_mask"].shape[1] - 1)
    target = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    mask, rows = info["action_mask"], agent.rows(obs)
    buffer, outcomes = ReplayBuffer(args.buffer_size // n), OutcomeReader(envs)
    begun = np.zeros(n, np.int64)  # step of the buffer at which an environment's episode began
    every = args.eval_every or args.total_timesteps
    squares, products = np.eye(LOAD), np.zeros(LOAD)  # of the fit of the rewards to the load
    step, cpu_s, evaluated, losses = 0, 0.0, -1, {}
    log = RunLog(run, args, "baseline_rl")
    while True:
        # Evaluate the target's policy, at first that of random weights.
        if step // every > evaluated or step >= args.total_timesteps:
            evaluated, log.phase = step // every, "evaluating"
            size = args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            result = evaluate_router(target.act, ENV_ID, env_kwargs, *size)
            log.write(step, result | {"charts/cpu_s": cpu_s})
            log.print_qos(step, result)
        if step >= args.total_timesteps:
            break

        # Act: uniformly at first, then by the policy; step the environments and store the step.
        begin, learns = time.process_time(), buffer.count > LENGTH + ENDS_WITHIN
        score = rng.gumbel(size=mask.shape)
        if learns:
            with torch.no_grad():
                q = agent.parts(torch.as_tensor(rows).float()).sum(0)
                score += log_policy(q, torch.as_tensor(mask), args.alpha).numpy()
        action = np.where(mask, score, -1e30).argmax(-1)
        seen, cut = exogenous(obs), np.zeros(n, np.float32)
        obs, reward, terminated, truncated, info = envs.step(action)
        paid = cut + info.get("reward_terms", {}).get("penalty", cut).astype(np.float32)
        buffer.add(rows=rows, mask=mask, action=action, exogenous=seen, reward=paid, cut=cut)
        done = terminated | truncated
        buffer.settle(outcomes.read(), begun, done)
        begun[done] = buffer.count
        mask, rows = info["action_mask"], agent.rows(obs)
        before, step = step, step + n
        log.add_rewards(reward, done)

        # Learn.
        if learns:
            optimizer.param_groups[0]["lr"] = args.lr * (1 - 0.95 * step / args.total_timesteps)
            for _ in range(args.updates_per_step):
                sample = buffer.sample(args.pieces, rng)
                x, y = (sample[key][sample["cut"] == 0] for key in ("load", "reward"))
                squares, products = 0.99 * squares + x.T @ x, 0.99 * products + x.T @ y
                sample["reward"] -= sample["load"] @ np.linalg.lstsq(squares, products, 1e-8)[0]
                batch = {k: torch.as_tensor(v).float() for k, v in sample.items()}
                losses = update(agent, target, optimizer, batch, args)
        cpu_s += time.process_time() - begin

        if interval_passed(LOG_EVERY, before, step) or step >= args.total_timesteps:
            metrics = {"charts/SPS": log.advance(step), "charts/cpu_s": cpu_s}
            log.write(step, metrics | {k: float(v) for k, v in losses.items()})
    if args.save_model:
        meta = {"agent": "baseline_rl", "args": json.dumps(asdict(args))}
        checkpoint.write_checkpoint(target, meta, run / "last.safetensors")
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    run_agent(train, Args)
