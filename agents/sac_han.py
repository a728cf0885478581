"""Discrete soft actor-critic over a heterogeneous graph attention network (HAN).

The router of the QoS-aware routing paper (arXiv:2508.00234, section V). The state is a graph of the
arrived request, the experts and the requests they hold (Eq. 6-12), with what the action impact
estimator predicts (Eq. 13-15); two layers of PyG's ``HANConv`` embed each graph on its own. The
reward is Eq. 16, its QoS credited to a request's own decision once it ends.

Unlike CleanRL's ``sac_atari.py``, no network stands for the policy: it is softmax(Q / alpha), where
the actor's loss is least. Q is the action's reward, by the HAN, plus the value of the state after
it (afterstates, Sutton & Barto, 6.8). Targets are lambda-returns over stored pieces of steps. What
no action changes is regressed out, by the arrivals seen later in the buffer (Dietterich et al.,
2018): full experts also tell of a rate that nobody sees, for which a value would blame a request.
Neighbour: `baseline_rl`, the same learner on the experts' rows alone.
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
from servegym.baselines.llm_routing.features import ARRIVED, EXPERT, REQUEST, exogenous, node_rows
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs.llm_routing.outcomes import OutcomeReader

ENV_ID = "servegym/LLMRouting-v1"

# Each episode draws its rate, requests/s, and is cut off before the drain, which nothing announces.
ENV = {"rate": (4.0, 11.0), "reward": "qos_aware"}
ENV |= {"episode_requests": 400, "max_episode_steps": 399}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

HEADS, WIDTH = 4, 32  # of the HAN; WIDTH also of the other hidden layers
SPREAD = torch.eye(HEADS).repeat_interleave(WIDTH // HEADS, 1)  # (4, 32): a head's columns
AFTER = [0, 1, 2, *range(10, EXPERT)]  # features of an expert by which a state is valued
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
    total_timesteps: int = 800_000
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


class HANLayer(nn.Module):
    """One ``HANConv`` on every graph of a batch, over the nodes that exist.

    Edge types: expert -> arrived, arrived/running/waiting -> expert, expert -> running/waiting, and
    self-loops. A node's only neighbour of a type is the message. PyG averages over the batch.
    """

    def __init__(self, in_dims: Mapping[str, int], last: bool) -> None:
        super().__init__()
        self.last = last  # nothing reads the queued requests' outputs of the last layer
        self.proj: Any = nn.ModuleDict({k: nn.Linear(d, WIDTH) for k, d in in_dims.items()})
        shape, names = (HEADS, WIDTH // HEADS), ("arrived", "running", "waiting")
        drawn = [{k: torch.rand(shape) - 0.5 for k in names} for _ in range(2)]
        self.src, self.dst = (nn.ParameterDict(each) for each in drawn)
        self.k_lin = nn.Linear(WIDTH, WIDTH)
        self.q = nn.Parameter(torch.empty(WIDTH).uniform_(-0.3, 0.3))

    def project(self, kind: str, x: Tensor, *attention: Tensor) -> tuple[Tensor, ...]:
        """Projected nodes (M, 32), then their products with attention vectors, (M, 4) each."""
        h = self.proj[kind](x)
        by_head = h.view(-1, HEADS, WIDTH // HEADS)
        return h, *((by_head * a).sum(-1) for a in attention)

    def forward(
        self, arrived: Tensor, expert: Tensor, queued: dict[str, Tensor], index: Tensor
    ) -> tuple[Tensor, ...]:
        """Embed arrived (B, d), experts (B N, d), running and waiting requests (M, d) each.

        ``index`` is the expert of a running request and B N plus that of a waiting one.
        """
        batch, nodes = len(arrived), len(expert)
        n, s, d = nodes // batch, self.src, self.dst
        h_a, at_a = self.project("arrived", arrived, d["arrived"])
        h_e, out_e, *in_e = self.project("expert", expert, s["arrived"], d["running"], d["waiting"])
        parts = (self.project(k, queued[k], s[k]) for k in ("running", "waiting"))
        h_q, from_q = (torch.cat(each) for each in zip(*parts, strict=True))

        # Attention over the neighbours of an edge type, by head. Weights stay below exp(30).
        score = F.leaky_relu(out_e.view(batch, n, HEADS) + at_a[:, None], 0.2)
        to_a = (h_e.view(batch, n, WIDTH) * (score.softmax(1) @ SPREAD)).sum(1)
        score = F.leaky_relu(from_q + torch.cat(in_e).index_select(0, index), 0.2)
        weight = score.clamp(max=30.0).exp()
        total = weight.new_zeros(2 * nodes, HEADS).index_add(0, index, weight) + 1e-16
        to_e = h_q.new_zeros(2 * nodes, WIDTH).index_add(0, index, h_q * (weight @ SPREAD))
        to_e = to_e * (total.reciprocal() @ SPREAD)

        # Semantic attention over the edge types of a node type, averaged over its nodes in a graph.
        own = [h_a, to_a, h_e, to_e] + [h_q] * (not self.last)
        out = torch.cat(own).relu_()
        own_a, to_a, own_e, to_e, *own_q = out.split(sizes := [len(x) for x in own])
        # q . tanh(W x + b) by the sigmoid, which costs a quarter of it.
        y = F.linear(out, 2 * self.k_lin.weight, 2 * self.k_lin.bias).sigmoid_()
        score = 2 * (y @ self.q) - self.q.sum()
        of_own_a, of_to_a, of_own_e, of_to_e, *of_own_q = score.split(sizes)
        new_a = torch.lerp(own_a, to_a, torch.sigmoid(of_to_a - of_own_a)[:, None])
        means = [of_own_e.view(batch, n).mean(1), *of_to_e.view(2, batch, n).mean(2)]
        w = torch.stack([of_own_a, *means], -1).softmax(-1)[:, None]  # (B, 1, 4)
        all_e = torch.stack([own_a.repeat_interleave(n, 0), own_e, *to_e.chunk(2)])
        new_e = torch.bmm(w, all_e.view(4, batch, -1).transpose(0, 1)).view(nodes, WIDTH)
        if self.last:
            return new_a, new_e
        which, where = index % nodes, index // n  # running and waiting are types of their own
        gap = of_own_e.index_select(0, which) - of_own_q[0]
        ones = torch.stack([gap, torch.ones_like(gap)], -1)
        gap, count = ones.new_zeros(2 * batch, 2).index_add(0, where, ones).unbind(-1)
        w = torch.sigmoid(gap / count.clamp(min=1)).index_select(0, where)
        new_q = torch.lerp(own_q[0], own_e.index_select(0, which), w[:, None])
        return new_a, new_e, *new_q.split([len(x) for x in queued.values()])


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with rectifiers between them."""
    layers = [[nn.ReLU(), nn.Linear(i, o)] for i, o in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*sum(layers, [])[1:])


class Agent(nn.Module):
    """The critic, whose softmax is the policy."""

    def __init__(self, system: RoutingSystem) -> None:
        super().__init__()
        self.experts, self.model = system.num_experts, LatencyModel(system)
        self.slots = system.running_capacity, system.waiting_capacity
        dims = {"arrived": ARRIVED, "expert": EXPERT, "running": REQUEST, "waiting": REQUEST}
        self.first = HANLayer(dims, last=False)
        self.second = HANLayer(dict.fromkeys(dims, WIDTH), last=True)
        self.skip = mlp(ARRIVED + EXPERT, WIDTH, WIDTH)
        self.drop, self.send = mlp(2 * WIDTH, WIDTH, 1), mlp(2 * WIDTH, WIDTH, 1)
        self.linear = nn.Parameter(torch.zeros(EXPERT, 1))
        self.expert_value = mlp(len(AFTER) + 4, WIDTH, WIDTH, 1)
        self.load_value = mlp(LOAD, WIDTH, WIDTH, 1)

    def rows(self, obs: Mapping[str, Any]) -> NDArray[np.float16]:
        """Flat rows of a batch of observations, see `node_rows`."""
        self.slots = obs["running"].shape[2], obs["waiting"].shape[2]
        return node_rows(obs, self.model)

    def nodes(self, rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
        """The nodes that exist in a batch of flat rows, as `HANLayer` takes them."""
        nodes, slots = len(rows) * self.experts, self.experts * sum(self.slots)
        sizes = (ARRIVED, EXPERT * self.experts, REQUEST * slots, slots)
        arrived, expert, held, mask = rows.split(sizes, 1)
        masks = mask.reshape(nodes, -1).split(self.slots, 1)
        parts = held.reshape(nodes, -1, REQUEST).split(self.slots, 1)
        places = [there.nonzero(as_tuple=True) for there in masks]
        kinds = zip(("running", "waiting"), parts, places, strict=True)
        index = torch.cat([places[0][0], places[1][0] + nodes])
        return arrived, expert.reshape(nodes, -1), {k: x[at] for k, x, at in kinds}, index

    def parts(self, rows: Tensor) -> Tensor:
        """Reward and value of the state after each action (2, B, N+1); Q is their sum.

        The reward is MLP[h_r | mean h] of a drop, MLP[h_r | h_n] + linear of an expert; the value a
        sum over the experts, the chosen one with a request more. `load_value` is not in it.
        """
        arrived, expert, queued, index = self.nodes(rows)
        h_a, h_e, *h_q = self.first(arrived, expert, queued, index)
        h_a, h_e = self.second(h_a, h_e, dict(zip(queued, h_q, strict=True)), index)
        h_e = h_e + self.skip(torch.cat([arrived.repeat_interleave(self.experts, 0), expert], -1))
        h_e, x = (each.view(len(rows), self.experts, -1) for each in (h_e, expert))
        drop = self.drop(torch.cat([h_a, h_e.mean(1)], -1))
        each = self.send(torch.cat([h_a[:, None].expand_as(h_e), h_e], -1))
        each = each + 3 * (x - x.mean(1, keepdim=True)) @ self.linear
        runs, after = (3 * x[..., 1] < self.slots[0] - 0.5).float(), x.clone()
        for share, count, tokens in ((runs, 1, 15), (1 - runs, 2, 16)):
            after[..., count] += share / 3
            after[..., tokens] += share * x[..., 5]
        load = arrived[:, None, 1:5].expand(2, -1, self.experts, -1)
        inputs = torch.cat([torch.stack([x, after])[..., AFTER], load], -1)
        before, after = self.expert_value(inputs).squeeze(-1)
        value = before.sum(-1, keepdim=True) + F.pad(after - before, (1, 0))
        return torch.stack([torch.cat([drop, each.squeeze(-1)], -1), value])

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
    agent = Agent(system or RoutingSystem.from_kwargs(**env_kwargs))
    checkpoint.load_weights(agent, weights)
    name = {"completed_qos": "baseline_rl_dsa"}.get(env_kwargs["reward"], "sac_han")
    return checkpoint.CheckpointPolicy(name, "graph", args, agent, agent.act, env_kwargs)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    at_least("buffer_size", args.buffer_size, (LENGTH + ENDS_WITHIN + 2) * args.num_envs)
    at_least("episode_requests", env_kwargs["episode_requests"], LENGTH + ENDS_WITHIN)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs, n = environments.make_envs(ENV_ID, args.num_envs, **env_kwargs), args.num_envs
    run = Path(args.out_dir) / (args.run_name or f"sac_han_{args.seed}")

    agent = Agent(RoutingSystem.from_env(envs))
    target = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    mask, rows = info["action_mask"], agent.rows(obs)
    buffer, outcomes = ReplayBuffer(args.buffer_size // n), OutcomeReader(envs)
    begun = np.zeros(n, np.int64)  # step of the buffer at which an environment's episode began
    every = args.eval_every or args.total_timesteps
    squares, products = np.eye(LOAD), np.zeros(LOAD)  # of the fit of the rewards to the load
    step, cpu_s, evaluated, losses = 0, 0.0, -1, {}
    log = RunLog(run, args, "sac_han")
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
            metrics |= {k: float(v) for k, v in losses.items()}
            log.write(step, metrics)
    if args.save_model:
        meta = {"agent": "sac_han", "args": json.dumps(asdict(args))}
        checkpoint.write_checkpoint(target, meta, run / "last.safetensors")
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    run_agent(train, Args)
