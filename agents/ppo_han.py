"""Proximal policy optimisation over the graph of the QoS-aware routing paper.

On-policy, and so without replay buffer or target networks. By default the actor starts at
`priced_greedy`: its logits are that heuristic's value of every action over a temperature, plus what
the network adds, nearly zero at first (residual policy learning, Silver et al. 2018); ``--prior 0``
starts from nothing. ``--encoder sets`` replaces the HAN by one small network over every expert and
the sum of its queue, ten times as fast; ``--encoder expert`` reads the experts' rows alone, as the
paper's Baseline RL does (``--prior 0``).

Neighbours: `sac_han` has the same features and HAN with soft actor-critic; `ppo` is for flat
observations. ``python agents/ppo_han.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import ResumableRunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.graph_rows import Layout
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.single_decision import SingleDecision
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.baselines.llm_routing.features import privileged_inputs
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs._command_line import parse_settings

Observation = Mapping[str, NDArray[Any]]

ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "paid_forward",
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

HEADS, WIDTH, ROWS_WIDTH = 4, 64, 32  # HAN; HAN and sets; over the three numbers of a row
NUM_MINIBATCHES = {"han": 4, "sets": 4, "expert": 16}  # per epoch, by encoder
CLIP_COEF = 0.2  # clipping of the probability ratio
VF_COEF = 0.5  # weight of the value loss
CRITIC_WARMUP = 0.03  # share of the training in which the critic alone learns
AVERAGE = 0.05  # polyak step of the averaged network, which is evaluated and saved, per round
EVAL_EPISODES, EVAL_REQUESTS = 8, 500  # of an evaluation: episodes per rate, requests per episode
HORIZONS = (2, 8, 24, 72)  # numbers of coming requests that the privileged critic reads ...
INPUTS = 4 * len(HORIZONS)  # ... four numbers of each


@dataclass
class Args(ResumableRunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/LLMRouting-v0"
    """a routing environment with the Dict observation"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    encoder: Literal["han", "sets", "expert"] = "han"
    """the graph attention network, a small network over every expert and its queue's sums, or one
    over the experts' rows of Eq. 7 alone"""
    prior: float = 0.02
    """temperature, in scores, of the heuristic that the actor corrects; 0: start from nothing"""
    privileged_critic: bool = True
    """let the critic, in training, read the coming arrivals: see `privileged_inputs`"""
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
    impact: bool = True
    """read the action impact estimator (Eq. 13-15) as well: what it predicts of every action, and
    its latency laws; without, the paper's own state and no prior"""
    update_epochs: int = 4
    """passes over the collected steps"""
    eval_every: int = 100_000
    """steps between evaluations on the validation split; the best policy is saved"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


def heuristic_values(expert: Any, running_slots: int) -> Any:
    """Value (B, N), in scores, that `PricedGreedy` gives to each expert with features (B, N, 10).

    The new request's score if it is answered within L, less the scores it pushes over L and the
    price of the expert's time, which rises with the fourth power of the load; a drop is worth 0.
    """
    load = 3 * (expert[..., 1] + expert[..., 2]) / running_slots
    load = (load + load.mean(-1)[..., None]) / 2
    score, lost, work = expert[..., 7], expert[..., 8], expert[..., 9]
    return score - lost - load**4 * work


def queued_score(obs: Observation) -> NDArray[np.float32]:
    """Predicted score of all queued requests, (B,): the potential P behind ``paid_forward``.

    The environment pays completed + P(s') - P(s). Shaping is exact for a discounted return with
    gamma P(s') (Ng et al. 1999), so the agent takes (1 - gamma) P(s') off the reward.
    """
    run, wait = ((obs[k][..., 1] * obs[f"{k}_mask"]).sum((1, 2)) for k in ("running", "waiting"))
    return run + wait


class HANLayer(nn.Module):
    """One ``HANConv`` on every graph of a batch, over the nodes that exist.

    Edge types: expert -> arrived, arrived/running/waiting -> expert, expert -> running/waiting and
    a self-loop at every node. Only the first, third and fourth have more than one neighbour; on the
    others the message is the neighbour itself. PyG averages semantic attention over the batch.
    """

    blocks: Tensor

    def __init__(self, in_dims: Mapping[str, int], last: bool) -> None:
        super().__init__()
        self.last = last  # nothing reads the queued requests' outputs of the last layer
        self.proj = nn.ModuleDict({k: nn.Linear(d, WIDTH) for k, d in in_dims.items()})
        names = ("expert__arrived", "running__expert", "waiting__expert")
        self.src, self.dst = (
            nn.ParameterDict(
                {k: nn.Parameter(torch.empty(WIDTH, 1).uniform_(-0.5, 0.5)) for k in names}
            )
            for _ in range(2)
        )
        self.register_buffer("blocks", torch.eye(HEADS).repeat_interleave(WIDTH // HEADS, 0), False)
        self.k_lin = nn.Linear(WIDTH, WIDTH)
        self.q = nn.Parameter(torch.empty(WIDTH).uniform_(-0.3, 0.3))

    def attend(self, name: str, src: Tensor, dst: Tensor, index: Tensor) -> Tensor:
        """Softmax attention of every node of dst (M, 64) over its src (K, 64); index (K,)."""
        blocks = self.blocks  # (64, 4): which head a column belongs to
        score = src @ (blocks * self.src[name])
        score = F.leaky_relu(score + (dst @ (blocks * self.dst[name])).index_select(0, index), 0.2)
        top = score.new_full((len(dst), HEADS), -1e9)
        top.scatter_reduce_(0, index[:, None].expand(-1, HEADS), score.detach(), "amax")
        weight = (score - top.index_select(0, index)).exp()
        total = weight.new_zeros(len(dst), HEADS).index_add(0, index, weight)
        message = src * (weight @ blocks.T)
        message = dst.new_zeros(len(dst), WIDTH).index_add(0, index, message)
        return (message * ((total + 1e-16).reciprocal() @ blocks.T)).relu()

    def semantic(self, x: Tensor) -> Tensor:
        """Q . tanh(W x + b) of every node; (M, 64) -> (M,)."""
        return torch.tanh(self.k_lin(x)) @ self.q

    def forward(self, x: dict[str, Tensor], index: dict[str, Tensor]) -> dict[str, Tensor]:
        """Node features {type: (nodes, d)} -> {type: (nodes, 64)}; index: expert of a request."""
        h = {k: self.proj[k](v) for k, v in x.items()}
        own = {k: v.relu() for k, v in h.items() if k in ("arrived", "expert") or not self.last}
        score = {k: self.semantic(v) for k, v in own.items()}
        batch, n = len(h["arrived"]), len(h["expert"]) // len(h["arrived"])
        graph = torch.arange(batch, device=h["expert"].device).repeat_interleave(n)
        from_experts = self.attend("expert__arrived", h["expert"], h["arrived"], graph)
        queues = [
            self.attend(f"{k}__expert", h[k], h["expert"], index[k]) for k in ("running", "waiting")
        ]
        w = torch.sigmoid(self.semantic(from_experts) - score["arrived"])  # softmax of two
        out = {"arrived": torch.lerp(own["arrived"], from_experts, w[:, None])}
        scores = [score["expert"], *(self.semantic(m) for m in queues)]
        w = torch.stack([score["arrived"], *(x.view(batch, n).mean(1) for x in scores)], -1)
        w = w.softmax(-1)  # (B, 4)
        values = torch.stack([own["expert"], *queues]).view(3, batch, n, WIDTH)
        mix = torch.einsum("bk,kbnd->bnd", w[:, 1:], values)
        out["expert"] = (mix + (w[:, :1] * own["arrived"])[:, None]).view(-1, WIDTH)
        if not self.last:
            for k in ("running", "waiting"):
                where = index[k] // n
                gap = score["expert"].index_select(0, index[k]) - score[k]
                count = torch.bincount(where, minlength=batch).clamp(min=1)
                gap = gap.new_zeros(batch).index_add(0, where, gap) / count
                w = torch.sigmoid(gap).index_select(0, where)[:, None]
                out[k] = torch.lerp(own[k], own["expert"].index_select(0, index[k]), w)
        return out


class HAN(nn.Module):
    """Two layers, four heads, 64 wide: rows (B, columns) -> request (B, 64), experts (B, N, 64).

    An expert's node also has its latency law (Eq. 13/14), which tells idle experts apart.
    """

    def __init__(self) -> None:
        super().__init__()
        dims = {"arrived": 2, "expert": Layout.EXPERT + 4}
        dims |= {"running": Layout.REQUEST, "waiting": Layout.REQUEST}
        self.first = HANLayer(dims, last=False)
        self.second = HANLayer(dict.fromkeys(dims, WIDTH), last=True)

    def forward(self, rows: Tensor, layout: Layout, law: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the nodes that exist in a batch of flat rows; law (N, 4)."""
        arrived, expert, *queues = rows.split(layout.sizes, -1)
        laws = law.repeat(len(rows), 1)
        x = {"arrived": arrived, "expert": torch.cat([expert.reshape(len(laws), -1), laws], -1)}
        index, slots = {}, {"running": layout.running, "waiting": layout.waiting}
        for k, features, mask in zip(slots, queues[:2], queues[2:], strict=True):
            held = mask.reshape(-1).nonzero().squeeze(-1)
            x[k] = features.reshape(-1, Layout.REQUEST).index_select(0, held)
            index[k] = held // slots[k]  # the request's expert
        x = self.second(self.first(x, index), index)
        return x["arrived"], x["expert"].view(len(rows), -1, WIDTH)


class Sets(nn.Module):
    """In the HAN's place: one small network over every expert and the sums of its queue.

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


class ExpertRows(nn.Module):
    """The experts' rows of Eq. 7 alone: memory, running and waiting requests, for a fixed N.

    One network over every expert, told apart by a vector that is learned, and the mean row.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.who = nn.Parameter(torch.randn(experts, 8))
        self.each = nn.Sequential(
            nn.Linear(14, ROWS_WIDTH), nn.ReLU(), nn.Linear(ROWS_WIDTH, ROWS_WIDTH), nn.ReLU()
        )
        self.all = nn.Sequential(nn.Linear(ROWS_WIDTH, ROWS_WIDTH), nn.ReLU())

    def forward(self, rows: Tensor, layout: Layout, law: Tensor) -> tuple[Tensor, Tensor]:
        """Embed a batch of rows (B, 3 N)."""
        own = rows.view(len(rows), -1, 3)
        mean, who = own.mean(1, keepdim=True).expand_as(own), self.who.expand(len(own), -1, -1)
        experts = self.each(torch.cat([own, mean, who], -1))
        return self.all(experts.mean(1)), experts


class Head(nn.Module):
    """One logit per action (B, N+1): drop from MLP[h_r | mean h], expert n from MLP[h_r | h_n]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.request = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 2))
        self.by_request, self.by_expert = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
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

    def __init__(self, args: Args, system: RoutingSystem) -> None:
        super().__init__()
        capacities = (system.running_capacity, system.waiting_capacity)
        self.layout = Layout(system.num_experts, *capacities)
        self.model = LatencyModel(system) if args.impact and args.encoder != "expert" else None
        self.temperature, self.privileged = args.prior, args.privileged_critic
        self.fixed_experts = args.encoder == "expert"
        # base_s, k1, k2 and seconds per sequence of Eq. 13/14, (N, 4)
        law = (args.impact * system.estimator / (0.02, 1e-4, 5e-6, 1e-3)).astype(np.float32)
        self.register_buffer("law", torch.as_tensor(law))
        if args.encoder == "expert":
            self.encoder: nn.Module = ExpertRows(system.num_experts)
        else:
            self.encoder = HAN() if args.encoder == "han" else Sets()
        width = ROWS_WIDTH if self.fixed_experts else WIDTH
        self.actor = Head(width)
        self.critic = nn.Sequential(
            nn.Linear(2 * width + args.privileged_critic * INPUTS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
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
        if self.fixed_experts:
            return (obs["experts"] * (2, 1 / 3, 1 / 3)).reshape(-1, 3 * experts).astype(np.float16)
        self.layout = Layout(experts, running, obs["waiting"].shape[2])
        return self.layout.rows(obs, self.model)

    def forward(
        self, rows: Tensor, mask: Tensor, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, N+1), illegal actions at a large negative, and values (B,).

        A privileged critic needs its ``inputs``, see `privileged_inputs`; without them its values
        are 0.
        """
        request, experts = self.encoder(rows, self.layout, self.law)
        logits = self.actor(request, experts)
        if self.temperature:
            start = heuristic_values(self.layout.expert(rows), self.layout.running)
            logits = logits + F.pad(start, (1, 0)) / self.temperature  # a drop is worth 0
        log_pi = logits.masked_fill(mask == 0, -1e8).log_softmax(-1)
        known = [request, experts.mean(1)]
        if self.privileged:
            if inputs is None:
                return log_pi, logits.new_zeros(len(rows))
            known.append(inputs)
        return log_pi, self.critic(torch.cat(known, -1)).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        rows = torch.as_tensor(self.rows(obs), device=self.law.device).float()
        legal = torch.as_tensor(np.asarray(mask), device=self.law.device)
        return self(rows, legal)[0].argmax(-1).cpu().numpy()


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


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "ppo_han", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = ENV | parse_settings(args.set)
    env_kwargs.pop("max_episode_steps", None)  # truncates the training alone
    agent = Agent(args, system or RoutingSystem.from_kwargs(**env_kwargs))
    checkpoint.load_weights(agent, weights, recomputed=("law",))
    # In numpy where one request is to be routed.
    act = SingleDecision(agent, heuristic_values).act if args.encoder == "han" else agent.act
    return CheckpointPolicy(f"ppo_{args.encoder}", "graph", args, agent, act, env_kwargs)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    if args.prior < 0 or (args.prior and (args.encoder == "expert" or not args.impact)):
        allowed = "0 or a temperature, and 0 with --encoder expert or --impact False"
        raise ValueError(f"prior: must be {allowed}; got {args.prior}")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = environments.make_envs(args.env_id, args.num_envs, **env_kwargs), args.num_envs
    if not isinstance(envs.single_observation_space, gym.spaces.Dict):
        raise ValueError(f"env_id: {args.env_id!r} has no Dict observation")
    run = Path(args.out_dir) / (args.run_name or f"ppo_{args.encoder}_{args.seed}")

    agent = Agent(args, RoutingSystem.from_env(envs)).to(device)
    actions = agent.layout.experts + 1
    averaged = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, fused=agent.fixed_experts)

    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    mask, step, best, mean_reward, log_size = info["action_mask"], 0, -np.inf, 0.0, 0
    size: Tensor | None = None  # of the advantages, by environment
    learned = {"agent": agent, "averaged": averaged, "optimizer": optimizer}
    saved = load_snapshot(args.resume, run / "snapshot.pt")
    if saved is not None:
        for key, part in learned.items():
            part.load_state_dict(saved[key])
        torch.set_rng_state(saved["rng"])
        envs = pickle.loads(saved["envs"])
        step, best, mean_reward, log_size, obs, mask, size = saved["state"]
    if args.privileged_critic:
        privileged_inputs(envs, HORIZONS)  # refused with max_episode_steps
    log = RunLog(run, args, "ppo_han", step, log_size)

    shape, batch_size = (args.num_steps, n), args.num_steps * n
    b_rows = torch.zeros((*shape, agent.rows(obs).shape[1]), dtype=torch.float16)
    b_inputs = torch.zeros((*shape, INPUTS * args.privileged_critic), device=device)
    b_mask = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    b_action = torch.zeros(shape, dtype=torch.long, device=device)
    b_logp, b_reward, b_value, b_next, b_done = torch.zeros((5, *shape), device=device)

    while step < args.total_timesteps:
        share_done, shares, episodic_qos = step / args.total_timesteps, np.zeros(actions), []
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - share_done)

        # Collect num_steps of every environment.
        with torch.no_grad():
            for t in range(args.num_steps + 1):
                rows = torch.as_tensor(agent.rows(obs))
                legal = torch.as_tensor(mask, device=device)
                inputs = b_inputs[0, :, :0]
                if args.privileged_critic:
                    inputs = torch.as_tensor(privileged_inputs(envs, HORIZONS), device=device)
                log_pi, value = agent(rows.to(device).float(), legal, inputs)
                if t:
                    b_next[t - 1] += (1 - b_done[t - 1]) * value
                if t == args.num_steps:
                    break
                b_rows[t], b_mask[t], b_value[t], b_inputs[t] = rows, legal, value, inputs
                b_action[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                b_logp[t] = log_pi.gather(1, b_action[t][:, None]).squeeze(1)
                action = b_action[t].cpu().numpy()
                shares += np.bincount(action, minlength=actions)
                obs, reward, terminated, truncated, info = envs.step(action)
                mask, done = info["action_mask"], terminated | truncated
                b_next[t] = 0.0  # the value after the step; 0 after a termination
                if env_kwargs["reward"] == "paid_forward":
                    reward = reward - np.where(done, 0, (1 - args.gamma) * queued_score(obs))
                for i in np.flatnonzero(truncated & ~terminated):
                    final = {k: v[None] for k, v in info["final_obs"][i].items()}
                    x = torch.as_tensor(agent.rows(final), device=device).float()
                    ones = torch.ones((1, actions), device=device)
                    b_next[t, i] = agent(x, ones, inputs[:1])[1][0]
                b_reward[t], b_done[t] = torch.as_tensor(reward), torch.as_tensor(done)
                if terminated.any():
                    kpis = info["final_info"]["episode_kpis"]
                    episodic_qos += kpis["avg_qos"][terminated].tolist()

        # Advantages of the rewards relative to their running mean.
        if not step:
            mean_reward = float(b_reward.mean())
        gain = advantages(
            b_reward - mean_reward, b_done, b_value, b_next, args.gamma, args.gae_lambda
        )
        size_now = gain.square().mean(0).sqrt()
        size = size_now if size is None else torch.lerp(size, size_now, 0.1)
        mean_reward += 0.1 * (float(b_reward.mean()) - mean_reward)
        step += batch_size
        target = gain + b_value
        # By their size in each environment, or rates at which much can be lost have all the say.
        weighted = gain / (size + 1e-3)
        flat = [
            x.reshape(batch_size, *x.shape[2:])
            for x in (b_rows, b_mask, b_inputs, b_action, b_logp, weighted, target)
        ]

        # Optimise policy and value.
        train_actor, spread = share_done >= CRITIC_WARMUP, float(target.var())
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size).chunk(NUM_MINIBATCHES[args.encoder]):
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
        metrics |= {f"charts/share_{k}": v for k, v in enumerate(shares / shares.sum())}
        if episodic_qos:
            metrics["charts/avg_qos"] = float(np.mean(episodic_qos))
        before, last = step - batch_size, step >= args.total_timesteps
        if interval_passed(args.eval_every, before, step) or last:
            result = evaluate_router(
                averaged.act, args.env_id, env_kwargs, args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            )
            metrics |= result
            log.print_qos(step, result)
            write = partial(save_policy, averaged, args)
            best = checkpoint.save_best_and_last(write, args, run, result["eval/avg_qos"], best)
        log.write(step, metrics)
        if interval_passed(args.checkpoint_every, before, step):
            save_snapshot(
                run / "snapshot.pt",
                **{key: part.state_dict() for key, part in learned.items()},
                state=(step, best, mean_reward, log.size, obs, mask, size),
                rng=torch.get_rng_state(),
                envs=pickle.dumps(envs),
            )
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
