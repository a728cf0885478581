"""Proximal policy optimisation over the sets of the routing graph, as a correction of a heuristic.

One small network reads every expert and the sums of its queue. The actor starts at `priced_greedy`:
its logits are that heuristic's value of every action over a temperature, plus what the network
adds, nearly zero at first (residual policy learning, Silver et al. 2018). In training alone the
critic reads the coming arrivals, see `privileged_inputs`.

Neighbours: `ppo` begins with nothing, on flat observations; `rpi` has the same network and learns
from rollouts on copies of the simulator. ``python agents/ppo_sets.py --help`` lists the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym._command_line import parse_settings
from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import ResumableRunArgs, run_agent
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.run_log import RunLog, interval_passed, saves_when_interrupted
from servegym.agents.lib.snapshots import env_states, restore_envs
from servegym.baselines.llm_routing.features import Layout, priced_values, privileged_inputs
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem

ENV_ID = "servegym/LLMRouting-v1"
Observation = Mapping[str, NDArray[Any]]

ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "paid_forward",
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

WIDTH = 64  # of every hidden layer
TEMPERATURE = 0.02  # in scores, of the heuristic that the actor corrects
NUM_MINIBATCHES = 4  # per epoch
CLIP_COEF = 0.2  # clipping of the probability ratio
VF_COEF = 0.5  # weight of the value loss
CRITIC_WARMUP = 0.04  # share of the training in which the critic alone learns
AVERAGE = 0.05  # polyak step of the averaged network, which is evaluated and saved, per round
EVAL_EPISODES, EVAL_REQUESTS = 8, 500  # of an evaluation: episodes per rate, requests per episode
HORIZONS = (2, 8, 24, 72)  # numbers of coming requests that the critic reads ...
INPUTS = 4 * len(HORIZONS)  # ... four numbers of each


@dataclass
class Args(ResumableRunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    total_timesteps: int = 1_000_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    num_steps: int = 32
    """steps of each environment between updates"""
    learning_rate: float = 2e-3
    """learning rate at first; it falls linearly to zero"""
    gamma: float = 0.99
    """discount per decision"""
    gae_lambda: float = 0.9
    """lambda of the generalised advantage estimate"""
    update_epochs: int = 4
    """passes over the collected steps"""
    eval_every: int = 100_000
    """steps between evaluations on the validation split; the best policy is saved"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


def queued_score(obs: Observation) -> NDArray[np.float32]:
    """Predicted score of all queued requests, (B,): the potential P behind ``paid_forward``.

    The environment pays completed + P(s') - P(s). Shaping is exact for a discounted return with
    gamma P(s') (Ng et al. 1999), so the agent takes (1 - gamma) P(s') off the reward.
    """
    run, wait = ((obs[k][..., 1] * obs[f"{k}_mask"]).sum((1, 2)) for k in ("running", "waiting"))
    return run + wait


class Sets(nn.Module):
    """One small network over every expert and the sums of its queue.

    An expert's input is its features and latency law, the arrived request's features, and mean and
    maximum of those of its queued requests; the request's embedding is that of the mean expert.
    """

    def __init__(self) -> None:
        super().__init__()
        inputs = 2 + Layout.EXPERT + 4 + 2 * Layout.REQUEST
        self.each = nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.all = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, rows: Tensor, layout: Layout, law: Tensor) -> tuple[Tensor, Tensor]:
        """Embed a batch of flat rows; law (N, 4)."""
        batch, n = len(rows), layout.experts
        arrived, expert, running, waiting, mr, mw = rows.split(layout.sizes, -1)
        held = torch.cat([x.view(batch, n, -1, Layout.REQUEST) for x in (running, waiting)], 2)
        mask = torch.cat([x.view(batch, n, -1) for x in (mr, mw)], 2)
        mean = held.sum(2) / mask.sum(2, keepdim=True).clamp(min=1)
        top = held.masked_fill(mask[..., None] == 0, -2.0).amax(2)
        parts = [arrived[:, None].expand(batch, n, 2), expert.view(batch, n, -1), mean, top]
        experts = self.each(torch.cat([*parts, law.expand(batch, *law.shape)], -1))
        return self.all(experts.mean(1)), experts


class Head(nn.Module):
    """One logit per action (B, N+1): drop from MLP[h_r | mean h], expert n from MLP[h_r | h_n]."""

    def __init__(self) -> None:
        super().__init__()
        self.request = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        self.by_request, self.by_expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        with torch.no_grad():  # what is added to the heuristic is small at first
            for linear in (self.request[2], self.out):
                for weight in linear.parameters():
                    weight.mul_(0.1 if weight.ndim > 1 else 0.0)  # no bias

    def forward(self, request: Tensor, experts: Tensor) -> Tensor:
        """Embeddings -> (B, N+1); a value common to all actions is added (dueling)."""
        drop, common = self.request(torch.cat([request, experts.mean(1)], -1)).split(1, -1)
        hidden = (self.by_request(request)[:, None] + self.by_expert(experts)).relu()
        return torch.cat([drop, self.out(hidden).squeeze(-1)], -1) + common


class Agent(nn.Module):
    """Encoder, actor and critic; the encoder learns from both losses."""

    law: Tensor

    def __init__(self, system: RoutingSystem) -> None:
        super().__init__()
        capacities = (system.running_capacity, system.waiting_capacity)
        self.layout = Layout(system.num_experts, *capacities)
        self.model = LatencyModel(system)
        # base_s, k1, k2 and seconds per sequence of Eq. 13/14, (N, 4)
        law = (system.estimator / (0.02, 1e-4, 5e-6, 1e-3)).astype(np.float32)
        self.register_buffer("law", torch.as_tensor(law))
        self.encoder, self.actor = Sets(), Head()
        self.critic = nn.Sequential(
            nn.Linear(2 * WIDTH + INPUTS, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def rows(self, obs: Observation) -> NDArray[np.float16]:
        """Flat rows of a batch of observations, of any capacities.

        Raises:
            ValueError: If the number of experts is not that of the agent's system.
        """
        experts, running = obs["running"].shape[1:3]
        if experts != len(self.law):
            raise ValueError(
                f"made for {len(self.law)} experts, got {experts}; "
                "a policy over the graph takes another fleet with load_policy(path, system)"
            )
        self.layout = Layout(experts, running, obs["waiting"].shape[2])
        return self.layout.rows(obs, self.model)

    def forward(self, rows: Tensor, mask: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, N+1), illegal actions at a large negative, and values (B,).

        The critic alone reads ``inputs`` (B, 16), see `privileged_inputs`.
        """
        request, experts = self.encoder(rows, self.layout, self.law)
        start = priced_values(self.layout.expert(rows), self.layout.running)
        logits = self.actor(request, experts) + F.pad(start, (1, 0)) / TEMPERATURE  # a drop: 0
        log_pi = logits.masked_fill(mask == 0, -1e8).log_softmax(-1)
        known = torch.cat([request, experts.mean(1), inputs], -1)
        return log_pi, self.critic(known).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        rows = torch.as_tensor(self.rows(obs), device=self.law.device).float()
        legal = torch.as_tensor(np.asarray(mask), device=self.law.device)
        nothing = rows.new_zeros(len(rows), INPUTS)  # the actor does not read them
        return self(rows, legal, nothing)[0].argmax(-1).cpu().numpy()


@torch.no_grad()
def polyak_update(target: nn.Module, net: nn.Module, tau: float) -> None:
    """Move the target's weights towards the network's by a share of tau."""
    for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, tau)


def advantages(
    reward: Tensor, done: Tensor, value: Tensor, next_value: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimate, all (T, E); `next_value` is the value after each step."""
    out, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * next_value[t] - value[t]
        running = delta + gamma * lam * (1 - done[t]) * running
        out[t] = running
    return out


class Rollout(NamedTuple):
    """What is collected: (T, B, ...) of T steps of B environments."""

    rows: Tensor
    mask: Tensor
    inputs: Tensor
    action: Tensor
    logp: Tensor
    reward: Tensor
    value: Tensor
    next: Tensor  # values after the steps, 0 after an episode's end
    done: Tensor


def empty_rollout(agent: Agent, steps: int, num_envs: int, columns: int) -> Rollout:
    """Room for steps with flat rows of so many columns."""
    shape, device = (steps, num_envs), agent.law.device
    return Rollout(
        torch.zeros((*shape, columns), dtype=torch.float16),
        torch.zeros((*shape, agent.layout.experts + 1), dtype=torch.int8, device=device),
        torch.zeros((*shape, INPUTS), device=device),
        torch.zeros(shape, dtype=torch.long, device=device),
        *torch.zeros((5, *shape), device=device),
    )


@torch.no_grad()
def collect(
    agent: Agent, envs: Any, obs: Observation, mask: NDArray[Any], data: Rollout, untimely: float
) -> tuple[Observation, NDArray[Any], list[float]]:
    """Fill ``data`` with steps by the policy; returns where they end, and ended episodes' QoS.

    ``untimely`` is the share of `queued_score` that is taken off a reward.
    """
    episodic_qos, device = [], agent.law.device
    for t in range(len(data.rows) + 1):
        rows = torch.as_tensor(agent.rows(obs))
        legal = torch.as_tensor(mask, device=device)
        inputs = torch.as_tensor(privileged_inputs(envs, HORIZONS), device=device)
        log_pi, value = agent(rows.to(device).float(), legal, inputs)
        if t:
            data.next[t - 1] = (1 - data.done[t - 1]) * value
        if t == len(data.rows):
            break
        data.rows[t], data.mask[t], data.value[t], data.inputs[t] = rows, legal, value, inputs
        data.action[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
        data.logp[t] = log_pi.gather(1, data.action[t][:, None]).squeeze(1)
        obs, reward, done, _, info = envs.step(data.action[t].cpu().numpy())
        mask = info["action_mask"]
        if untimely:
            reward = reward - np.where(done, 0, untimely * queued_score(obs))
        data.reward[t], data.done[t] = torch.as_tensor(reward), torch.as_tensor(done)
        if done.any():
            episodic_qos += info["final_info"]["episode_kpis"]["avg_qos"][done].tolist()
    return obs, mask, episodic_qos


def evaluate(agent: Agent, log: RunLog, step: int) -> dict[str, float]:
    """`evaluate_router` of a policy, told in the log."""
    args, log.phase = log.args, "evaluating"
    numbers = (args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS)
    env_kwargs = ENV | parse_settings(args.set)
    result = evaluate_router(agent.act, ENV_ID, env_kwargs, *numbers)
    log.say_qos(step, result)
    return result


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = ENV | parse_settings(args.set)
    agent = Agent(system or RoutingSystem.from_kwargs(**env_kwargs))
    checkpoint.load_weights(agent, weights, recomputed=("law",))
    return CheckpointPolicy("ppo_sets", "graph", args, agent, agent.act, env_kwargs)


@saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    if env_kwargs.get("max_episode_steps") is not None:
        raise ValueError("set: max_episode_steps must be left out: the critic reads whole episodes")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = environments.make_envs(ENV_ID, args.num_envs, **env_kwargs), args.num_envs

    agent = Agent(RoutingSystem.from_env(envs)).to(device)
    actions = agent.layout.experts + 1
    averaged = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate)

    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    mask, step, best, mean_reward = info["action_mask"], 0, -np.inf, 0.0
    size: Tensor | None = None  # of the advantages, by environment
    learned = {"agent": agent, "averaged": averaged, "optimizer": optimizer}
    log = RunLog(args, "ppo_sets", ENV_ID, env_kwargs)
    meta = {"agent": "ppo_sets", "args": json.dumps(asdict(args))}
    write = log.save = partial(checkpoint.write_checkpoint, averaged, meta)
    if log.saved is not None:
        for key, part in learned.items():
            part.load_state_dict(log.saved[key])
        torch.set_rng_state(log.saved["rng"])
        obs, mask = restore_envs(envs, log.saved["envs"])
        step, best, mean_reward, saved_size = log.saved["state"]
        size = saved_size.to(device)

    if not step:
        log.write(0, evaluate(averaged, log, 0))  # the start, measured

    batch_size = args.num_steps * n
    data = empty_rollout(agent, args.num_steps, n, agent.rows(obs).shape[1])
    # What ``paid_forward`` pays for queued requests is exact without a discount.
    untimely = (1 - args.gamma) * (env_kwargs["reward"] == "paid_forward")
    while step < args.total_timesteps:
        share_done = step / args.total_timesteps
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - share_done)
        obs, mask, episodic_qos = collect(agent, envs, obs, mask, data, untimely)

        # Advantages of the rewards relative to their running mean.
        if not step:
            mean_reward = float(data.reward.mean())
        decay = args.gamma, args.gae_lambda
        gain = advantages(data.reward - mean_reward, data.done, data.value, data.next, *decay)
        size_now = gain.square().mean(0).sqrt()
        size = size_now if size is None else torch.lerp(size, size_now, 0.1)
        mean_reward += 0.1 * (float(data.reward.mean()) - mean_reward)
        step += batch_size
        target = gain + data.value
        # By their size in each environment, or rates at which much can be lost have all the say.
        weighted = gain / (size + 1e-3)
        flat = [x.reshape(batch_size, *x.shape[2:]) for x in (*data[:5], weighted, target)]

        # Optimise policy and value.
        train_actor, spread = share_done >= CRITIC_WARMUP, float(target.var())
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size).chunk(NUM_MINIBATCHES):
                rows, legal, inputs, action, old, adv, value_target = (
                    f[index.to(f.device)] for f in flat
                )
                log_pi, value = agent(rows.to(device).float(), legal, inputs)
                log_ratio = log_pi.gather(1, action[:, None]).squeeze(1) - old
                ratio = log_ratio.exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP_COEF, 1 + CLIP_COEF)
                policy_loss = -torch.min(adv * ratio, adv * clipped).mean()
                value_loss = 0.5 * (value - value_target).square().mean() / spread
                loss = VF_COEF * value_loss + (policy_loss if train_actor else 0.0)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        polyak_update(averaged, agent, AVERAGE)

        # Log, evaluate and save.
        metrics = {
            "charts/SPS": log.advance(step),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": -(log_pi.exp() * log_pi).sum(-1).mean().item(),
            "losses/reward_mean": mean_reward,
            "losses/approx_kl": torch.expm1(log_ratio).sub(log_ratio).mean().item(),
            "losses/explained_variance": 1 - float(gain.var()) / spread,
        }
        shares = np.bincount(data.action.flatten().cpu().numpy(), minlength=actions) / batch_size
        metrics |= {f"charts/share_{k}": v for k, v in enumerate(shares)}
        if episodic_qos:
            metrics["charts/avg_qos"] = float(np.mean(episodic_qos))
        before, last = step - batch_size, step >= args.total_timesteps
        if interval_passed(args.eval_every, before, step) or last:
            result = evaluate(averaged, log, step)
            metrics |= result
            best = checkpoint.save_best_and_last(write, args, log.run, result["eval/avg_qos"], best)
        log.write(step, metrics)
        if interval_passed(args.checkpoint_every, before, step):
            log.save_snapshot(
                step,
                **{key: part.state_dict() for key, part in learned.items()},
                state=(step, best, mean_reward, size),
                rng=torch.get_rng_state(),
                envs=env_states(envs),
            )
    envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
