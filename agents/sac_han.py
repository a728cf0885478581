"""Discrete soft actor-critic over a dense, masked heterogeneous graph attention network (HAN).

The router of the paper's section V: the state is a graph of the arrived request, the experts and
the requests they hold (Eq. 6-12); each graph is encoded by two layers of PyG's ``HANConv`` maths,
computed per graph and without padding; actor and twin critics read the embeddings.
``python agents/sac_han.py --help`` lists the options; ``--state expert --reward completed_qos`` is
the paper's Baseline RL, ``--state han --reward completed_qos`` its Baseline RL + DSA.
"""

from __future__ import annotations

import json
import os
import pickle
import time
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor, nn

import servegym  # noqa: F401  (registers the environments)

HEADS, WIDTH = 4, 64


@dataclass
class Args:
    """Command line of the agent."""

    seed: int = 1
    """seed of the networks, the exploration and the training episodes"""
    env_id: str = "servegym/LLMRouting-v0"
    """a routing environment with the Dict observation"""
    profiles: str = "edge-6-heterogeneous"
    """fleet of the experts"""
    latency_requirement_s: float = 0.030
    """latency requirement L, seconds per token"""
    rate_low: float = 6.0
    """lowest mean arrival rate, requests/s; each training episode draws its own"""
    rate_high: float = 11.0
    """highest mean arrival rate, requests/s"""
    reward: Literal["qos_aware", "completed_qos", "paid_forward"] = "paid_forward"
    """the environment's reward"""
    set: tuple[str, ...] = ()
    """further environment arguments, key=value with a JSON value, as in num_experts=3"""
    state: Literal["han", "expert"] = "han"
    """the whole graph, or the experts' rows of Eq. 7 alone (the paper's Baseline RL)"""
    head: Literal["expert", "arrived"] = "expert"
    """logits from every expert's embedding, or (literally) from the arrived request's alone"""
    law: bool = True
    """put each expert's profiled estimator (Eq. 13/14) on its node: tells idle experts apart"""
    total_timesteps: int = 150_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 32
    """parallel environments"""
    buffer_size: int = 200_000
    """transitions kept for replay"""
    learning_starts: int = 16_000
    """steps taken by the warm-up policy before the first update"""
    warmup_random: float = 0.2
    """share of uniform legal actions in the warm-up; the rest go to the least loaded expert"""
    updates_per_step: int = 4
    """gradient updates after each step of all environments"""
    batch_size: int = 128
    """transitions per update"""
    gamma: float = 0.99
    """discount per decision"""
    holding_cost: bool = True
    """paid_forward only: charge (1 - gamma) x predicted score in flight, see `held_score`"""
    n_step: int = 10
    """rewards summed before bootstrapping"""
    tau: float = 0.01
    """step of the target network towards the online one, per update"""
    lr: float = 5e-4
    """learning rate of the encoder, the critics and the actor"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to a tenth"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this norm"""
    autotune: bool = True
    """learn the temperature"""
    alpha: float = 0.02
    """the temperature, or its first value with autotune"""
    alpha_lr: float = 1e-3
    """learning rate of the temperature's logarithm"""
    target_entropy_scale: float = 0.25
    """entropy target of a state as a share of log(number of legal actions)"""
    average_q: bool = False
    """take the mean of the twin critics in place of their minimum"""
    entropy_in_target: bool = False
    """keep the entropy bonus in the critics' target"""
    center_reward: bool = True
    """subtract the running mean of the reward in the critics' target (the same for all actions)"""
    eval_every: int = 15_000
    """steps between evaluations on the validation split; the best policy is kept"""
    eval_episodes: int = 8
    """episodes per rate and evaluation"""
    eval_rates: tuple[float, ...] = (8.0, 10.0)
    """arrival rates of the evaluation"""
    eval_requests: int = 500
    """requests per evaluation episode"""
    torch_threads: int = 1
    """threads of torch"""
    cuda: bool = False
    """run the networks on a GPU"""
    track: bool = False
    """log to wandb as well"""
    wandb_project_name: str = "servegym"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team"""
    save_model: bool = True
    """write best.safetensors and last.safetensors"""
    checkpoint_every: int = 0
    """steps between snapshots to resume from (0: none); a snapshot holds the replay buffer"""
    resume: bool = False
    """continue from the snapshot in the run's folder; the log goes on as if uninterrupted"""
    out_dir: str = "runs"
    """folder of the runs"""
    run_name: str = ""
    """folder of this run (default: state_reward_head_seed)"""


def env_kwargs(args: Args) -> dict[str, Any]:
    """Keyword arguments of the training environments."""
    extra = {}
    for item in args.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"set: {item!r} is not of the form key=value")
        try:
            extra[key] = json.loads(value)
        except json.JSONDecodeError:
            extra[key] = value
    return {
        "profiles": args.profiles,
        "latency_requirement_s": args.latency_requirement_s,
        "rate": (args.rate_low, args.rate_high),
        "reward": args.reward,
        **extra,
    }


def scale_laws(estimator: NDArray[np.float64]) -> NDArray[np.float32]:
    """Scaled estimators (N, 4) from base_s, k1, k2 and seconds per sequence (Eq. 13/14)."""
    return (estimator / (0.02, 1e-4, 5e-6, 1e-3)).astype(np.float32)


@dataclass(frozen=True)
class Layout:
    """Where the scaled node features lie in a flat row; N experts, R running and W waiting slots."""

    experts: int
    running: int
    waiting: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of arrived, expert, running, waiting, running mask, waiting mask."""
        n, r, w = self.experts, self.running, self.waiting
        return (2, 6 * n, 6 * n * r, 6 * n * w, n * r, n * w)

    def rows(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float16]:
        """Scale a batch of observations into float16 (B, sum(sizes)); log for p and l_t/L."""
        limit = obs["latency_requirement"]  # (B, 1)
        batch = len(limit)

        def requests(x: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
            p, s, d, e, t, late = np.moveaxis(x, -1, 0)
            ratio = np.log1p(late / limit[:, :, None]) / 2
            x = np.stack([np.log1p(p) / 6, 4 * s - 2, d / 150, 8 * e, t / 150, ratio], -1)
            return (x * mask[..., None]).reshape(batch, -1)

        req, exp = obs["request"], obs["experts"]
        p = np.log1p(req[..., :1]) / 6
        arrived = np.concatenate([p[:, 0], limit / 0.03], -1)
        expert = np.concatenate(
            [2 * exp[..., :1], exp[..., 1:] / 3, p, 4 * req[..., 1:2] - 2, req[..., 2:] / 150], -1
        )
        parts = [arrived, expert.reshape(batch, -1)]
        masks = [obs["running_mask"], obs["waiting_mask"]]
        parts += [requests(obs["running"], masks[0]), requests(obs["waiting"], masks[1])]
        parts += [m.reshape(batch, -1) for m in masks]
        return np.concatenate(parts, -1, dtype=np.float16, casting="unsafe")


def held_score(obs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Predicted score of all queued requests, (B,): the potential behind paid_forward.

    The environment pays completed + P(s') - P(s), an exact shaping of the undiscounted return. With
    gamma < 1 it needs gamma P(s'), or a bill that comes late is worth more than one that comes at
    once and a full queue looks good; the agent takes (1 - gamma) P(s') off the reward.
    """
    return sum((obs[k][..., 1] * obs[f"{k}_mask"]).sum((1, 2)) for k in ("running", "waiting"))


class HANLayer(nn.Module):
    """One ``HANConv`` on every graph of a batch, over the nodes that exist.

    Edge types: expert -> arrived, arrived/running/waiting -> expert, expert -> running/waiting and
    a self-loop at every node. Only the first, third and fourth have more than one neighbour; on the
    others node attention is 1 whatever its weights, and the message is the neighbour itself.
    """

    def __init__(self, in_dims: Mapping[str, int], last: bool) -> None:
        super().__init__()
        self.last = last  # nobody reads the queued requests' outputs of the last layer
        self.proj = nn.ModuleDict({k: nn.Linear(d, WIDTH) for k, d in in_dims.items()})
        names = ("expert__arrived", "running__expert", "waiting__expert")
        self.src, self.dst = (
            nn.ParameterDict({k: nn.Parameter(torch.empty(WIDTH, 1).uniform_(-0.5, 0.5))
                              for k in names}) for _ in range(2)
        )  # fmt: skip
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
        """q . tanh(W x + b) of every node; (M, 64) -> (M,)."""
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
    """Two layers, four heads, 64 wide: rows (B, columns) -> request (B, 64), experts (B, N, 64)."""

    def __init__(self, layout: Layout, law: int) -> None:
        super().__init__()
        self.layout = layout
        dims = {"arrived": 2, "expert": 6 + law, "running": 6, "waiting": 6}
        self.first = HANLayer(dims, last=False)
        self.second = HANLayer(dict.fromkeys(dims, WIDTH), last=True)

    def nodes(self, rows: Tensor, law: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Features of the nodes that exist, and the flat expert index of the queued requests."""
        parts = dict(zip(("arrived", "expert", "running", "waiting", "mr", "mw"),
                         rows.split(self.layout.sizes, -1), strict=True))  # fmt: skip
        expert = parts["expert"].reshape(-1, 6)
        if law is not None:
            expert = torch.cat([expert, law.repeat(len(rows), 1)], -1)
        x, index = {"arrived": parts["arrived"], "expert": expert}, {}
        slots = {"running": self.layout.running, "waiting": self.layout.waiting}
        for k, mask in (("running", "mr"), ("waiting", "mw")):
            held = parts[mask].reshape(-1).nonzero().squeeze(-1)
            x[k], index[k] = parts[k].reshape(-1, 6).index_select(0, held), held // slots[k]
        return x, index

    def forward(self, rows: Tensor, law: Tensor | None) -> tuple[Tensor, Tensor]:
        """Embed a batch of flat rows."""
        x, index = self.nodes(rows, law)
        x = self.second(self.first(x, index), index)
        return x["arrived"], x["expert"].view(len(rows), -1, WIDTH)


class Head(nn.Module):
    """One value per action (B, N+1): drop from MLP[h_r | mean h], expert n from MLP[h_r | h_n]."""

    def __init__(self, actions: int, per_expert: bool) -> None:
        super().__init__()
        self.per_expert = per_expert
        outputs = 2 if per_expert else actions
        self.request = nn.Sequential(
            nn.Linear(WIDTH * (1 + per_expert), WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)
        )
        if per_expert:
            self.by_request, self.by_expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, 1)

    def forward(self, request: Tensor, experts: Tensor) -> Tensor:
        """Embeddings -> (B, N+1); a value common to all actions is added (dueling)."""
        if not self.per_expert:
            return self.request(request)
        drop, common = self.request(torch.cat([request, experts.mean(1)], -1)).split(1, -1)
        hidden = (self.by_request(request)[:, None] + self.by_expert(experts)).relu()
        return torch.cat([drop, self.out(hidden).squeeze(-1)], -1) + common


class Agent(nn.Module):
    """Encoder shared by actor and twin critics; the critics' loss alone trains the encoder."""

    def __init__(self, layout: Layout, args: Args, laws: NDArray[np.float32] | None) -> None:
        super().__init__()
        self.layout, self.graph = layout, args.state == "han"
        self.register_buffer("law", None if laws is None else torch.as_tensor(laws))
        self.encoder: nn.Module = (
            HAN(layout, 0 if laws is None else laws.shape[1])
            if self.graph
            else nn.Sequential(nn.Linear(3 * layout.experts, WIDTH), nn.ReLU(),
                               nn.Linear(WIDTH, WIDTH), nn.ReLU())
        )  # fmt: skip
        heads = [Head(layout.experts + 1, self.graph and args.head == "expert") for _ in range(3)]
        self.actor, self.q1, self.q2 = heads

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the arrived request (B, 64) and of the experts (B, N, 64)."""
        if self.graph:
            return self.encoder(rows, self.law)
        experts = rows[:, 2 : 2 + 6 * self.layout.experts].reshape(len(rows), -1, 6)[..., :3]
        h = self.encoder(experts.flatten(1))
        return h, h[:, None]

    def log_policy(self, h: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
        return self.actor(*h).masked_fill(mask == 0, -1e8).log_softmax(-1)


class ReplayBuffer:
    """Time-major ring of transitions; rows of scaled features in float16, both action masks."""

    def __init__(self, size: int, num_envs: int, columns: int, actions: int) -> None:
        self.length, self.envs, self.count = max(size // num_envs, 2), num_envs, 0
        shape = (self.length, num_envs)
        self.data = {
            "obs": np.zeros((*shape, columns), np.float16),
            "next_obs": np.zeros((*shape, columns), np.float16),
            "mask": np.zeros((*shape, actions), np.int8),
            "next_mask": np.zeros((*shape, actions), np.int8),
            "action": np.zeros(shape, np.int64),
            "reward": np.zeros(shape, np.float32),
            "terminated": np.zeros(shape, bool),
            "done": np.zeros(shape, bool),  # terminated or truncated: the n-step sum ends here
        }

    def add(self, **step: NDArray[Any]) -> None:
        """Append one step of all environments."""
        for key, value in step.items():
            self.data[key][self.count % self.length] = value
        self.count += 1

    def sample(
        self, size: int, n_step: int, gamma: float, center: float, rng: np.random.Generator
    ) -> dict[str, NDArray[Any]]:
        """Uniform batch; `return` is the n-step sum of (reward - center), `discount` what follows.

        A sum that meets the end of an episode stops there; next_obs, next_mask and terminated are
        those of its last step, so a truncated one bootstraps and a terminated one does not.
        """
        d, held = self.data, min(self.count, self.length)
        start = self.count - held + rng.integers(0, held - n_step + 1, size)
        env = rng.integers(0, self.envs, size)
        total, discount = np.zeros(size, np.float32), np.ones(size, np.float32)
        last, alive = start, np.ones(size, bool)
        for k in range(n_step):
            at = (start + k) % self.length
            last = np.where(alive, start + k, last)
            total += alive * discount * (d["reward"][at, env] - center)
            discount = np.where(alive, discount * gamma, discount).astype(np.float32)
            alive = alive & ~d["done"][at, env]
        first, last = start % self.length, last % self.length
        batch = {k: d[k][first, env] for k in ("obs", "mask", "action")}
        batch |= {k: d[k][last, env] for k in ("next_obs", "next_mask", "terminated")}
        return batch | {"return": total, "discount": discount}


def critic_target(
    batch: Mapping[str, Tensor], log_pi: Tensor, q1: Tensor, q2: Tensor, alpha: float, args: Args
) -> Tensor:
    """Return + discount * sum_a pi(a|s') (Q(s', a) - alpha log pi(a|s')), zero once terminated."""
    q = (q1 + q2) / 2 if args.average_q else torch.minimum(q1, q2)
    if args.entropy_in_target:
        q = q - alpha * log_pi
    value = (log_pi.exp() * q).sum(-1)
    return batch["return"] + batch["discount"] * (1 - batch["terminated"].float()) * value


def update(
    agent: Agent,
    target: Agent,
    log_alpha: Tensor,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    args: Args,
) -> dict[str, Tensor]:
    """One gradient step on critics, encoder, actor and temperature; the target follows by tau."""
    alpha = log_alpha.exp().item()
    with torch.no_grad():
        h = target.encode(batch["next_obs"])
        log_pi = target.log_policy(h, batch["next_mask"])
        goal = critic_target(batch, log_pi, target.q1(*h), target.q2(*h), alpha, args)
    h = agent.encode(batch["obs"])
    q1, q2 = agent.q1(*h), agent.q2(*h)
    chosen = batch["action"][:, None]
    q1_loss = F.mse_loss(q1.gather(1, chosen).squeeze(1), goal)
    q2_loss = F.mse_loss(q2.gather(1, chosen).squeeze(1), goal)

    log_pi = agent.log_policy((h[0].detach(), h[1].detach()), batch["mask"])
    q = ((q1 + q2) / 2 if args.average_q else torch.minimum(q1, q2)).detach()
    actor_loss = (log_pi.exp() * (alpha * log_pi - q)).sum(-1).mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).detach()
    wanted = args.target_entropy_scale * batch["mask"].sum(-1).float().log()
    alpha_loss = (log_alpha.exp() * (entropy - wanted)).mean() if args.autotune else 0.0

    optimizer.zero_grad()
    (q1_loss + q2_loss + actor_loss + alpha_loss).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(agent.parameters()), args.tau)
    return {
        "losses/qf1_loss": q1_loss, "losses/qf2_loss": q2_loss, "losses/actor_loss": actor_loss,
        "losses/qf1_values": q1.gather(1, chosen).mean(), "losses/alpha": log_alpha.exp(),
        "charts/policy_entropy": entropy.mean(),
    }  # fmt: skip


def make_envs(args: Args, num_envs: int, **overrides: Any) -> gym.vector.VectorEnv:
    """The native vector environment, resetting within the step that ends an episode."""
    return gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        **(env_kwargs(args) | overrides),
    )


def evaluate(agent: Agent, args: Args) -> dict[str, float]:
    """Greedy policy on the same validation episodes each time; average QoS and expert shares."""
    device, n = next(agent.parameters()).device, args.eval_episodes
    envs = [
        make_envs(args, n, rate=rate, split="val", reward="completed_qos",
                  episode_requests=args.eval_requests) for rate in args.eval_rates
    ]  # fmt: skip
    outs = [env.reset(seed=10_000 + i) for i, env in enumerate(envs)]
    shares, qos = np.zeros(agent.layout.experts + 1), np.zeros(len(envs))
    for _ in range(args.eval_requests):
        rows = np.concatenate([agent.layout.rows(out[0]) for out in outs])
        mask = np.concatenate([out[-1]["action_mask"] for out in outs])
        with torch.no_grad():
            h = agent.encode(torch.as_tensor(rows, device=device).float())
            log_pi = agent.log_policy(h, torch.as_tensor(mask, device=device))
        action = log_pi.argmax(-1).cpu().numpy()
        shares += np.bincount(action, minlength=len(shares))
        outs = [env.step(a) for env, a in zip(envs, action.reshape(len(envs), n), strict=True)]
        qos += [out[1].sum() for out in outs]
    for env in envs:
        env.close()
    shares, qos = shares / shares.sum(), qos / (n * args.eval_requests)
    if shares.max() > 0.9:
        warnings.warn(f"policy collapse: action {shares.argmax()} takes {shares.max():.0%}", stacklevel=2)
    result = {f"eval/avg_qos_rate_{r:g}": float(q) for r, q in zip(args.eval_rates, qos, strict=True)}
    result |= {f"eval/share_{k}": float(s) for k, s in enumerate(shares)}
    return result | {"eval/avg_qos": float(qos.mean())}


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights, arguments and layout in one safetensors file, written atomically."""
    meta = {"agent": "sac_han", "args": json.dumps(asdict(args)), "layout": json.dumps(vars(agent.layout))}
    temporary = path.with_suffix(".tmp")
    save_file({k: v.contiguous().cpu() for k, v in agent.state_dict().items()}, temporary, meta)
    os.replace(temporary, path)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run = Path(args.out_dir) / (args.run_name or f"{args.state}_{args.reward}_{args.head}_{args.seed}")
    run.mkdir(parents=True, exist_ok=True)

    envs = make_envs(args, args.num_envs)
    space = envs.single_observation_space
    if not isinstance(space, gym.spaces.Dict):
        raise ValueError(f"env_id: {args.env_id!r} has no Dict observation; servegym/LLMRouting-v0 has")
    layout = Layout(*space["running"].shape[:2], space["waiting"].shape[1])
    laws = None
    if args.law and args.state == "han":
        known = [p.estimator for p in envs.problem.profiles]
        laws = scale_laws(np.array([
            (e.base_s, e.prefill_s_per_token, e.decode_s_per_context_token, e.decode_s_per_sequence)
            for e in known
        ]))  # fmt: skip
    agent = Agent(layout, args, laws).to(device)
    target = deepcopy(agent).requires_grad_(False)
    log_alpha = torch.tensor(float(np.log(args.alpha)), device=device, requires_grad=True)
    groups = [{"params": list(agent.parameters()), "lr": args.lr},
              {"params": [log_alpha], "lr": args.alpha_lr}]  # fmt: skip
    optimizer = torch.optim.Adam(groups, fused=True)
    buffer = ReplayBuffer(args.buffer_size, args.num_envs, sum(layout.sizes), layout.experts + 1)

    obs, info = envs.reset(seed=args.seed)
    s: dict[str, Any] = {  # everything else that a resumed run needs
        "step": 0, "best": -np.inf, "center": 0.0, "log_size": 0, "mask": info["action_mask"],
        "rows": layout.rows(obs), "return": np.zeros(args.num_envs), "finished": [],
        "shares": np.zeros(layout.experts + 1),
    }  # fmt: skip
    if args.resume and (run / "snapshot.pt").exists():
        saved = torch.load(run / "snapshot.pt", weights_only=False)
        agent.load_state_dict(saved["agent"])
        target.load_state_dict(saved["target"])
        optimizer.load_state_dict(saved["optimizer"])
        log_alpha.data = saved["log_alpha"].to(device)
        buffer.count, s, envs = saved["count"], saved["state"], pickle.loads(saved["envs"])
        for key, value in saved["buffer"].items():
            buffer.data[key][: len(value)] = value
        rng.bit_generator.state = saved["rng"]
    log = open(run / "metrics.jsonl", "ab" if s["step"] else "wb")  # noqa: SIM115
    log.truncate(s["log_size"])
    if args.track:
        import wandb

        wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, config=asdict(args),
                   name=run.name, dir=str(run), resume="allow" if args.resume else None)  # fmt: skip

    def write(metrics: dict[str, float]) -> None:
        log.write((json.dumps({"global_step": s["step"]} | metrics) + "\n").encode())
        log.flush()
        if args.track:
            wandb.log(metrics, step=s["step"])

    begin, first = time.perf_counter(), s["step"]
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    task = bar.add_task("sac_han", total=args.total_timesteps, completed=first)
    bar.start()
    losses: dict[str, Tensor] = {}
    while s["step"] < args.total_timesteps:
        rows, mask = s["rows"], s["mask"]
        if s["step"] < args.learning_starts:
            # Least loaded expert while it holds fewer than a cap that differs between environments,
            # else drop; a share of uniform legal actions. So every load level has been seen.
            held = rows[:, 2 : 2 + 6 * layout.experts].reshape(args.num_envs, -1, 6)[..., 1:3].sum(-1)
            cap = 1 + np.arange(args.num_envs)[:, None] % (layout.running + layout.waiting)
            score = rng.random(mask.shape)
            calm = rng.random((args.num_envs, 1)) >= args.warmup_random
            score[:, 1:] -= calm * 3 * held
            score[:, :1] -= calm * (cap - 0.5)
        else:
            with torch.no_grad():
                h = agent.encode(torch.as_tensor(rows, device=device).float())
                score = agent.log_policy(h, torch.as_tensor(mask, device=device)).cpu().numpy()
            score = score + rng.gumbel(size=score.shape)
        action = np.where(mask, score, -1e30).argmax(-1)
        obs, reward, terminated, truncated, info = envs.step(action)
        new_rows, new_mask, done = layout.rows(obs), info["action_mask"], terminated | truncated
        earned = reward
        if args.reward == "paid_forward" and args.holding_cost:
            earned = reward - (1 - args.gamma) * held_score(obs) * ~terminated
        next_rows, next_mask = new_rows, new_mask
        if done.any():
            next_rows, next_mask = new_rows.copy(), new_mask.copy()
            for i in np.flatnonzero(done):
                final = info["final_obs"][i]
                next_rows[i] = layout.rows({k: v[None] for k, v in final.items()})[0]
                next_mask[i] = info["final_info"]["action_mask"][i]
        buffer.add(obs=rows, mask=mask, action=action, reward=earned, terminated=terminated, done=done,
                   next_obs=next_rows, next_mask=next_mask)  # fmt: skip
        s["rows"], s["mask"], s["step"] = new_rows, new_mask, s["step"] + args.num_envs
        s["center"] += (earned.mean() - s["center"]) * max(0.002, 1 / buffer.count)
        s["shares"] += np.bincount(action, minlength=layout.experts + 1)
        s["return"] += reward
        s["finished"] += s["return"][done].tolist()
        s["return"][done] = 0

        if s["step"] >= args.learning_starts:
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.lr * (1 - 0.9 * s["step"] / args.total_timesteps)
            center = s["center"] if args.center_reward else 0.0
            for _ in range(args.updates_per_step):
                sample = buffer.sample(args.batch_size, args.n_step, args.gamma, center, rng)
                batch = {k: torch.as_tensor(v, device=device) for k, v in sample.items()}
                batch["obs"], batch["next_obs"] = batch["obs"].float(), batch["next_obs"].float()
                losses = update(agent, target, log_alpha, optimizer, batch, args)

        def crossed(every: int) -> bool:
            return every > 0 and s["step"] // every > (s["step"] - args.num_envs) // every

        last = s["step"] >= args.total_timesteps
        if crossed(2_000) or last:
            sps = (s["step"] - first) / (time.perf_counter() - begin)
            metrics = {k: float(v) for k, v in losses.items()} | {"charts/SPS": sps}
            metrics |= {f"charts/share_{k}": v for k, v in enumerate(s["shares"] / s["shares"].sum())}
            if s["finished"]:
                metrics["charts/episodic_return"] = float(np.mean(s["finished"]))
            s["finished"], s["shares"] = [], np.zeros(layout.experts + 1)
            write(metrics)
            bar.update(task, completed=s["step"], description=f"sac_han {sps:.0f} SPS")
        if losses and (crossed(args.eval_every) or last):
            result = evaluate(target, args)
            write(result)
            bar.console.print(f"step {s['step']}: " + ", ".join(
                f"{k[5:]} {v:.4f}" for k, v in result.items() if "qos" in k))  # fmt: skip
            if args.save_model:
                save_policy(target, args, run / "last.safetensors")
                if result["eval/avg_qos"] > s["best"]:
                    save_policy(target, args, run / "best.safetensors")
            s["best"] = max(s["best"], result["eval/avg_qos"])
        if crossed(args.checkpoint_every):
            s["log_size"] = log.tell()
            snapshot(run / "snapshot.pt", agent=agent.state_dict(), target=target.state_dict(),
                     optimizer=optimizer.state_dict(), log_alpha=log_alpha.data, state=s,
                     count=buffer.count, rng=rng.bit_generator.state, envs=pickle.dumps(envs),
                     buffer={k: v[: buffer.count] for k, v in buffer.data.items()})  # fmt: skip
    bar.stop()
    log.close()
    envs.close()
    if args.track:
        wandb.finish()
    return run


def snapshot(path: Path, **content: Any) -> None:
    """Write what a run needs to go on exactly; atomically."""
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
