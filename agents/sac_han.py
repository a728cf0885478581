"""Discrete soft actor-critic over a heterogeneous graph attention network (HAN).

The router of the QoS-aware routing paper (arXiv:2508.00234, section V). The state is a graph of the
arrived request, the experts and the requests they hold (Eq. 6-12), with what the action impact
estimator predicts (Eq. 13-15); two layers of PyG's ``HANConv`` embed each graph on its own. The
reward is Eq. 16. Actor and twin critics begin with random weights.

Unlike CleanRL's ``sac_atari.py``, targets are lambda-returns over stored pieces of steps, without
entropy or importance weights (Peng's Q(lambda)), from the mean of the critics, not their minimum;
the temperature is fixed; the learning rate falls; rewards are taken less their mean under the load,
which no action changes (Dietterich et al., 2018); an average of the weights is evaluated and saved.

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
from servegym.baselines.llm_routing.features import ARRIVED, EXPERT, REQUEST, load_inputs, node_rows
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem

ENV_ID = "servegym/LLMRouting-v1"

# Each episode draws its rate, requests/s, and is cut off before the drain, which nothing announces.
ENV = {"rate": (4.0, 11.0), "reward": "qos_aware"}
ENV |= {"episode_requests": 400, "max_episode_steps": 399}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

HEADS, WIDTH = 4, 32  # of the HAN; WIDTH also of the actor and the critics
SPREAD = torch.eye(HEADS).repeat_interleave(WIDTH // HEADS, 1)  # (4, 32): a head's columns
LENGTH = 16  # steps of a stored piece, over which the returns run
AVERAGE = 0.01  # polyak step of the averaged network, per update
LOG_EVERY = 4_000  # steps between rows of the log
EVAL_EPISODES, EVAL_REQUESTS = 16, 300  # of an evaluation: episodes per rate, requests per episode


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=8 num_experts=3"""
    total_timesteps: int = 150_000
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
    gamma: float = 0.99
    """discount per decision"""
    lam: float = 0.9
    """lambda of the returns"""
    lr: float = 3e-3
    """learning rate at first; it falls linearly to a twentieth"""
    alpha: float = 0.03
    """temperature: weight of the policy's entropy in the actor's loss"""
    tau: float = 0.05
    """polyak step of the target network, per update"""
    eval_every: int = 15_000
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
        weight, bias = self.proj[kind].weight, self.proj[kind].bias
        by_head = torch.cat([weight, bias[:, None]], 1).view(HEADS, WIDTH // HEADS, -1)
        more = (torch.stack(attention, 1) @ by_head).transpose(0, 1).flatten(0, 1)
        h = F.linear(x, torch.cat([weight, more[:, :-1]]), torch.cat([bias, more[:, -1]]))
        return h.split((WIDTH, *[HEADS] * len(attention)), 1)

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
        sizes = [len(x) for x in own]
        own_a, to_a, own_e, to_e, *own_q = out.split(sizes)
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


class Head(nn.Module):
    """Values of the actions by ``copies`` networks: MLP[h_r | mean h] (drop), MLP[h_r | h_n]."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies
        self.request = nn.Linear(2 * WIDTH, copies * WIDTH)
        self.by_request = nn.Linear(WIDTH, copies * WIDTH)
        self.by_expert = nn.Linear(WIDTH, copies * WIDTH)
        self.out = nn.Parameter(torch.empty(copies, WIDTH, 3).uniform_(-0.18, 0.18))
        self.bias = nn.Parameter(torch.zeros(copies, 2))

    def forward(self, request: Tensor, experts: Tensor) -> Tensor:
        """Embeddings -> (copies, B, N+1); a value common to all actions is added (dueling)."""
        batch, n, _ = experts.shape
        hidden = self.request(torch.cat([request, experts.mean(1)], -1)).relu()
        hidden = hidden.view(batch, self.copies, WIDTH).transpose(0, 1)
        drop, common = (hidden @ self.out[..., :2] + self.bias[:, None]).split(1, -1)
        hidden = (self.by_request(request)[:, None] + self.by_expert(experts)).relu()
        hidden = hidden.view(batch * n, self.copies, WIDTH).transpose(0, 1)
        each = (hidden @ self.out[..., 2:]).view(self.copies, batch, n)
        return torch.cat([drop, each], -1) + common


class Agent(nn.Module):
    """Encoder shared by actor and twin critics; the critics' loss alone trains the encoder."""

    def __init__(self, system: RoutingSystem) -> None:
        super().__init__()
        self.experts, self.model = system.num_experts, LatencyModel(system)
        self.slots = (system.running_capacity, system.waiting_capacity)
        dims = {"arrived": ARRIVED, "expert": EXPERT, "running": REQUEST, "waiting": REQUEST}
        self.first = HANLayer(dims, last=False)
        self.second = HANLayer(dict.fromkeys(dims, WIDTH), last=True)
        wide = nn.Linear(ARRIVED + EXPERT, WIDTH)
        self.skip = nn.Sequential(wide, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.actor, self.critics = Head(1), Head(2)

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

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the request (B, 32) and of the experts (B, N, 32)."""
        arrived, expert, queued, index = self.nodes(rows)
        h_a, h_e, *h_q = self.first(arrived, expert, queued, index)
        h_a, h_e = self.second(h_a, h_e, dict(zip(queued, h_q, strict=True)), index)
        h_e = h_e + self.skip(torch.cat([arrived.repeat_interleave(self.experts, 0), expert], -1))
        return h_a, h_e.view(len(rows), self.experts, WIDTH)

    def log_policy(self, h: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
        return self.actor(*h)[0].masked_fill(mask == 0, -1e8).log_softmax(-1)

    @torch.no_grad()
    def act(self, obs: Mapping[str, Any], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        h = self.encode(torch.as_tensor(self.rows(obs)).float())
        return self.log_policy(h, torch.as_tensor(np.asarray(mask))).argmax(-1).numpy()


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
        value = (target.log_policy(h, mask).exp() * target.critics(*h).mean(0)).sum(-1)
        returns = lambda_returns(batch, value.view(LENGTH + 1, -1), args.gamma, args.lam).flatten()
    h = agent.encode(rows)
    q = agent.critics(*h)
    taken = q.gather(2, batch["action"].view(1, -1, 1).expand(2, -1, 1))[:, : len(returns), 0]
    error = (taken - returns).square() * (1 - batch["truncated"][:-1].flatten())
    q1_loss, q2_loss = error.mean(1)
    log_pi = agent.log_policy((h[0].detach(), h[1].detach()), mask)
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
    agent = Agent(system or RoutingSystem.from_kwargs(**env_kwargs))
    checkpoint.load_weights(agent, weights)
    name = {"completed_qos": "baseline_rl_dsa"}.get(env_kwargs["reward"], "sac_han")
    return checkpoint.CheckpointPolicy(name, "graph", args, agent, agent.act, env_kwargs)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    at_least("buffer_size", args.buffer_size, (LENGTH + 2) * args.num_envs)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs, n = environments.make_envs(ENV_ID, args.num_envs, **env_kwargs), args.num_envs
    run = Path(args.out_dir) / (args.run_name or f"sac_han_{args.seed}")

    agent = Agent(RoutingSystem.from_env(envs))
    target, averaged = (deepcopy(agent).requires_grad_(False) for _ in range(2))
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    mask, rows = info["action_mask"], agent.rows(obs)
    buffer = ReplayBuffer(args.buffer_size // n)
    learning_starts = min(args.learning_starts, args.total_timesteps // 4)
    every = args.eval_every or args.total_timesteps
    squares, products = np.eye(5), np.zeros(5)  # of the fit of the rewards to the load
    step, cpu_s, evaluated, returns, episodic_returns = 0, 0.0, -1, np.zeros(n), []
    log = RunLog(run, args, "sac_han")
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
        x = load_inputs(rows)
        squares, products = 0.998 * squares + x.T @ x, 0.998 * products + x.T @ reward
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
                sample["reward"] -= load_inputs(sample["rows"]) @ np.linalg.solve(squares, products)
                batch = {k: torch.as_tensor(v) for k, v in sample.items()}
                batch["rows"] = batch["rows"].float()
                losses = update(agent, target, optimizer, batch, args)
                polyak_update(averaged, agent, AVERAGE)
        cpu_s += time.process_time() - begin

        if interval_passed(LOG_EVERY, before, step) or step >= args.total_timesteps:
            metrics = {"charts/SPS": log.advance(step), "charts/cpu_s": cpu_s}
            metrics |= {k: float(v) for k, v in losses.items()}
            if episodic_returns:
                metrics["charts/episodic_return"] = float(np.mean(episodic_returns))
            log.write(step, metrics)
            episodic_returns = []
    if args.save_model:
        meta = {"agent": "sac_han", "args": json.dumps(asdict(args))}
        checkpoint.write_checkpoint(averaged, meta, run / "last.safetensors")
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    run_agent(train, Args)
