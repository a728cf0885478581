"""TD(lambda) over afterstates, an expert at a time; requests' own outcomes tell who will be late.

A decision for expert n changes what n holds and nothing else. One network values the queue of any
expert, with the arrived request and without it: sending it there is worth the difference, a drop
is worth 0. The value of a queue is that of

- the requests held: the predicted score of each times its probability to be in time, which is
  learnt from what became of it, as a router is told when the answer ends;
- later requests, by TD(lambda): what each that is sent there is expected to earn, less a rent, what
  the policy would make of it without this expert, since that is no merit of the queue.

The policy is a softmax over these differences; the greedy one is evaluated. Training is on-policy,
and an average of the weights acts and makes the targets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from servegym.agents.lib import checkpoint, environments, run_log
from servegym.agents.lib.arguments import Positive, RunArgs, Share, run_agent
from servegym.agents.lib.evaluation import evaluate_router
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs._outcomes import OutcomeReader

ENV_ID, NAME = "servegym/LLMRouting-v1", "td_afterstates"
ENV = {"rate": (4.0, 11.0), "reward": "completed_qos", "episode_requests": 400}
"""Arguments of the training environment; ``--set`` changes them and adds others."""
WIDTH = 32  # of the hidden layers
REQUEST, EXPERT = 9, 16  # numbers of a request and of an expert
TRANSIT = 16  # more requests than are ever on their way to an expert
LAST = 40  # decisions at an episode's end that are not learnt from: few requests come after them
AVERAGED = 200  # the acting weights are means over about so many updates, fewer at first
EVAL_EPISODES, EVAL_REQUESTS = 16, 300  # of an evaluation: episodes per rate, requests per episode

Floats = NDArray[np.float32]


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=8 num_experts=3"""
    total_timesteps: int = 600_000
    """environment steps (decisions) over all environments; whole episodes are played"""
    num_envs: int = 64
    """parallel environments"""
    updates: int = 150
    """gradient updates after each episode of all environments"""
    batch_size: int = 1024
    """queues in a batch"""
    gamma: Share = 0.99
    """discount per decision of what later requests earn"""
    lam: Share = 0.9
    """lambda of the returns"""
    rent: Share = 1.0
    """share of the rent that is charged; it rises from zero in the first ``rent_rises``"""
    rent_rises: Share = 0.2
    """share of the training in which it does"""
    temperature: Positive = 0.025
    """of the policy, in scores"""
    explore: Share = 0.01
    """share of random legal actions"""
    lr: Share = 3e-3
    """learning rate at first; it falls linearly to a fiftieth"""
    eval_every: int = 100_000
    """steps between evaluations on the validation split; there is one before the first step"""
    eval_rates: tuple[Positive, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


class Queues(NamedTuple):
    """What is read of the queues of experts; the arrived request is in the last slot of each.

    Of a request: prompt tokens, predicted score and length, memory, tokens so far, latency so far a
    token and in all, whether it waits, whether it has just arrived. Of an expert: memory, running,
    waiting, the same of the others; L; the load's mean gaps; latency law; mean score and length.
    """

    requests: Floats  # (B, N, S + 1, REQUEST)
    there: NDArray[np.int8]  # (B, N, S + 1)
    experts: Floats  # (B, N, EXPERT)


def read_queues(obs: Mapping[str, Any], system: RoutingSystem) -> Queues:
    """Scale a batch of observations."""
    running, limit = obs["running"].shape[2], obs["latency_requirement"][:, None]
    held = np.concatenate([obs["running"], obs["waiting"]], 2)
    there = np.concatenate([obs["running_mask"], obs["waiting_mask"]], 2)
    there = np.pad(there, ((0, 0), (0, 0), (0, 1)))
    requests = np.zeros((*there.shape, REQUEST), np.float32)
    requests[:, :, :-1, :6], requests[:, :, -1, :3] = held, obs["request"]
    tokens, latency = requests[..., 4], requests[..., 5]
    requests[..., 6] = latency * np.maximum(tokens, 1) / 4
    requests[..., 5] = np.log1p(latency / limit) / 2
    requests[..., 0] = np.log1p(requests[..., 0]) / 6
    requests[..., 2:5] *= np.array([1 / 150, 8, 1 / 150], np.float32)
    requests[:, :, running:-1, 7] = there[:, :, running:-1]
    requests[:, :, -1, 8] = 1

    placed, library = system.placed(obs), system.library
    exists = (placed.card >= 0)[..., None]
    slots = placed.running_capacity[:, None, None]
    experts = obs["experts"] * np.array([2, 5 / 3, 5 / 3], np.float32)
    experts = np.concatenate([experts[..., :1], experts[..., 1:] / slots], -1)
    others = (experts.sum(1, keepdims=True) - experts) / (exists.sum(1, keepdims=True) - 1).clip(1)
    gaps = np.where(obs["load"][..., 0] > 0, obs["load"][..., 0], 0.125).clip(0.001)
    gaps = np.broadcast_to(np.log(gaps / 0.125)[:, None], (*exists.shape[:2], 3))
    law = library.estimator[placed.card] / (0.02, 1e-4, 2e-7, 1e-4)
    score = 10 * library.mean_score[placed.model] - 6
    length = library.mean_output_tokens[placed.model] / 150
    known = [np.broadcast_to(limit / 0.03, exists.shape), gaps, law, score[..., None]]
    parts = [experts, others, *known, length[..., None]]
    return Queues(requests, there, (np.concatenate(parts, -1) * exists).astype(np.float32))


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with rectifiers between them."""
    pairs = [(nn.Linear(i, o), nn.ReLU()) for i, o in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*sum(pairs, ())[:-1])


class SetEncoder(nn.Module):
    """Hidden layers of the requests that are there (..., S, W), and of the queue (..., W)."""

    def __init__(self) -> None:
        super().__init__()
        self.request = mlp(REQUEST, WIDTH, WIDTH)
        self.queue = mlp(WIDTH + EXPERT, WIDTH, WIDTH)

    def forward(self, requests: Tensor, there: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        held = self.request(requests).relu() * there[..., None]
        return held, self.queue(torch.cat([held.sum(-2), experts.expand(*held.shape[:-2], -1)], -1))


class Agent(nn.Module):
    """Two encoders: for the requests held, and for the value of later ones."""

    def __init__(self, system: RoutingSystem) -> None:
        super().__init__()
        self.system = system
        self.held, self.future = (SetEncoder() for _ in range(2))
        self.own, self.ahead = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.in_time, self.later = mlp(WIDTH, WIDTH, 1), mlp(WIDTH, 1)

    def forward(self, requests: Tensor, there: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Log-odds (..., S) that requests are in time, and the value (...) of later ones."""
        held, queue = self.held(requests, there, experts)
        hidden = self.own(held) + self.ahead(held.cumsum(-2)) + queue[..., None, :]
        _, future = self.future(requests, there, experts)
        return self.in_time(hidden.relu()).squeeze(-1), self.later(future.relu()).squeeze(-1)

    @torch.no_grad()
    def judge(self, queues: Queues) -> tuple[Floats, Floats, Floats]:
        """Values of sending it, its own QoS (B, N), later ones without it and with it (2, B, N)."""
        requests, there, experts = (torch.as_tensor(part) for part in queues)
        there = torch.stack([there, there]).float()
        there[1, ..., -1] = 1
        log_odds, later = self(requests, there, experts)
        qos = log_odds.sigmoid() * requests[..., 1] * there
        send = (qos.sum(-1) + later).diff(dim=0)[0]
        return send.numpy(), qos[1, ..., -1].numpy(), later.numpy()

    def act(self, obs: Mapping[str, Any], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The best legal action of every observation."""
        send, _, _ = self.judge(read_queues(obs, self.system))
        return np.where(np.asarray(mask) > 0, np.pad(send, ((0, 0), (1, 0))), -np.inf).argmax(-1)


def probabilities(values: Floats, mask: NDArray[Any], args: Args) -> Floats:
    """The policy (B, N + 1): a softmax over values, with some random actions."""
    logits = np.where(mask > 0, values / args.temperature, -np.inf)
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    legal = (mask > 0) / (mask > 0).sum(-1, keepdims=True)
    return (1 - args.explore) * likely / likely.sum(-1, keepdims=True) + args.explore * legal


def lambda_returns(expected: Floats, value: Floats, gamma: float, lam: float) -> Floats:
    """G_t = gamma (E_t+1 + lambda (G_t+1 - V_t+1)) of arrays (T, ...); the last G is the last V."""
    returns = value.copy()
    for t in reversed(range(len(value) - 1)):
        returns[t] = gamma * (expected[t + 1] + lam * (returns[t + 1] - value[t + 1]))
    return returns


def play(
    agent: Agent, envs: Any, args: Args, rent: float, rng: np.random.Generator
) -> tuple[dict[str, Tensor], Floats]:
    """An episode of every environment: queues with what they are to predict, and the QoS (B, T).

    Queues are those after a decision. ``in_time`` is 1 or 0 of each request and -1 where there is
    none, ``later`` is the return of later ones, see `lambda_returns`, in which ``expected`` is
    pi (own QoS - rent + V(with it)) + (1 - pi) V(without) of the next request.
    """
    obs, info = envs.reset()
    reader, mask = OutcomeReader(envs), info["action_mask"]
    batch, steps = envs.num_envs, envs.unwrapped.problem.arguments.episode_requests
    row = np.arange(batch)[:, None, None]
    prompts, qos, ended = (np.zeros((batch, steps + 1), kind) for kind in ("f4", "f4", "?"))
    places = obs["running"].shape[2] + obs["waiting"].shape[2] + TRANSIT
    held = np.full((batch, mask.shape[1] - 1, places), steps)  # decisions, the first come first
    data: dict[str, Any] = {"requests": [], "there": [], "experts": [], "ids": []}
    expected, value = [], []
    for t in range(steps):
        queues = read_queues(obs, agent.system)
        send, own, (without, with_it) = agent.judge(queues)
        values = np.pad(send, ((0, 0), (1, 0)))
        pi = probabilities(values, mask, args)
        action = (np.log(np.maximum(pi, 1e-30)) + rng.gumbel(size=pi.shape)).argmax(-1)
        sent = action[:, None] == np.arange(1, pi.shape[1])

        # The rent is what the policy would make of the request without the expert.
        paid, share = pi * values, pi[:, 1:]
        others = (paid.sum(-1, keepdims=True) - paid[:, 1:]) / np.maximum(1 - share, 1e-6)
        expected.append(share * (own - rent * others + with_it) + (1 - share) * without)
        value.append(np.where(sent, with_it, without))

        # Queues are in order of arrival, but for a few requests that overtake others in transit.
        prompts[:, t] = queues.requests[:, 0, -1, 0]
        there = queues.there[..., :-1] > 0
        ids = np.take_along_axis(held, np.maximum(there.cumsum(-1) - 1, 0), -1)
        same = there & (prompts[row, ids] == queues.requests[..., :-1, 0])
        ids = np.append(np.where(same, ids, steps), np.where(sent, t, steps)[..., None], -1)
        queues.there[..., -1] = sent
        step = (queues.requests.astype(np.float16), queues.there, queues.experts, ids)
        for stored, part in zip(data.values(), step, strict=True):
            stored.append(part)

        held[..., -1] = np.where(sent, t, steps)
        obs, _, _, _, info = envs.step(action)
        mask, outcomes = info["action_mask"], reader.read()
        qos[outcomes["row"], outcomes["decision"]] = outcomes["qos"]
        ended[outcomes["row"], outcomes["decision"]] = True
        held[ended[row, held]] = steps
        held.sort(-1)

    data["later"] = lambda_returns(np.array(expected), np.array(value), args.gamma, args.lam)
    ids = np.array(data.pop("ids"))
    data["in_time"] = np.where(ids < steps, (qos > 0)[row, ids], -1).astype(np.int8)
    learnt = {name: np.array(part[:-LAST]) for name, part in data.items()}
    return {k: torch.as_tensor(part).flatten(0, 2) for k, part in learnt.items()}, qos[:, :-1]


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> Any:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = environments.routing_arguments(ENV, args.set)
    agent = Agent(system or RoutingSystem.from_kwargs(**env_kwargs))
    agent.load_state_dict(weights)
    return checkpoint.CheckpointPolicy(NAME, "graph", args, agent, agent.act, env_kwargs)


@run_log.saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = environments.routing_arguments(ENV, args.set)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs = environments.make_envs(ENV_ID, args.num_envs, autoreset_mode="Disabled", **env_kwargs)
    envs.reset(seed=environments.episode_seeds(args.seed, args.num_envs))

    agent = Agent(RoutingSystem.from_env(envs))
    averaged = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, fused=True)
    log = run_log.RunLog(args, NAME, ENV_ID, env_kwargs)
    meta = {"agent": NAME, "args": json.dumps(asdict(args))}
    write = log.save = partial(checkpoint.write_checkpoint, averaged, meta)
    parts = {"agent": agent, "averaged": averaged, "optimizer": optimizer, "envs": envs, "rng": rng}
    before, step, updates, cpu_s, best = log.restore(parts, (-1, 0, 0, 0.0, -np.inf))
    while True:
        log.snapshot(step, parts, (before, step, updates, cpu_s, best))
        # Evaluate the averaged policy, at first that of random weights.
        ended = step >= args.total_timesteps
        if ended or run_log.evaluation_due(args.eval_every, before, step):
            size = args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            result = evaluate_router(averaged.act, ENV_ID, env_kwargs, *size)
            log.say_qos(step, result)
            log.write(step, result | {"charts/cpu_s": cpu_s})
            best = checkpoint.save_best_and_last(write, args, log.run, result["eval/avg_qos"], best)
        if ended:
            break

        # Play an episode of every environment.
        begin, done, losses = time.process_time(), step / args.total_timesteps, {}
        rent = args.rent * min(1.0, done / (args.rent_rises or 1e-9))
        data, qos = play(averaged, envs, args, rent, rng)
        before, step = step, step + qos.size
        log.add_rewards(qos.sum(-1), np.ones(len(qos), bool))

        # Learn.
        optimizer.param_groups[0]["lr"] = args.lr * (1 - 0.98 * done)
        for _ in range(args.updates):
            index = torch.as_tensor(rng.integers(0, len(data["later"]), args.batch_size))
            batch = {name: part[index].float() for name, part in data.items()}
            log_odds, later = agent(batch["requests"], batch["there"], batch["experts"])
            known = batch["in_time"] >= 0
            held_loss = bce(log_odds[known], batch["in_time"][known])
            later_loss = (later - batch["later"]).square().mean()
            optimizer.zero_grad()
            (held_loss + later_loss).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 5.0)
            optimizer.step()
            updates += 1
            losses = {"losses/held_loss": held_loss.item(), "losses/later_loss": later_loss.item()}
            with torch.no_grad():
                for mean, now in zip(averaged.parameters(), agent.parameters(), strict=True):
                    mean.lerp_(now, max(1 / AVERAGED, 10 / (10 + updates)))
        cpu_s += time.process_time() - begin

        metrics = {"charts/SPS": log.advance(step), "charts/cpu_s": cpu_s}
        log.write(step, metrics | losses | {"losses/rent": rent})
    envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
