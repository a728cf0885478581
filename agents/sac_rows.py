"""Discrete soft actor-critic (SAC) over rows, given an estimator: what is learned is a price.

The action impact estimator (Eq. 13-15 of arXiv:2508.00234) is in the inputs, in the potential that
shapes the reward and in the form of actor and critics, reward less a learned price times work.
Targets are lambda-returns over nearly on-policy data, and there is no target network.
``--shaping False`` leaves it out of the reward. The paper's Baseline RL has it nowhere; it sees
memory, running and waiting requests of an expert (Eq. 7)::

    python agents/sac_rows.py --rows experts --shaping False --set rate=8

The losses are those of CleanRL's ``sac_atari.py``: an actor, two critics of which the lesser
counts, entropy in the value, a learned temperature. Table ``sac_parts`` has what is lost without
each part that is beyond the textbook.

Neighbour: `sac_han`, the same learner with a graph network as its encoder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint, environments, run_log
from servegym.agents.lib.arguments import Positive, RunArgs, Share, Weight, run_agent
from servegym.agents.lib.evaluation import evaluate_router
from servegym.baselines.llm_routing import features
from servegym.baselines.llm_routing.latency import ExpectedQos
from servegym.baselines.llm_routing.system import RoutingSystem

ENV_ID = "servegym/LLMRouting-v1"
ARRIVED, EXPERT = features.ARRIVED, features.EXPERT
EXISTS, LOAD, STATE, WORK = features.EXISTS, features.LOAD, features.STATE, features.WORK

# Each episode draws its rate, requests/s, and is cut off before the drain, which nothing announces.
ENV = {"rate": (4.0, 11.0), "reward": "completed_qos"}
ENV |= {"episode_requests": 400, "max_episode_steps": 399}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

WIDTH = 32  # of the hidden layers
ROWS = {"features": (ARRIVED, EXPERT), "experts": (0, 3)}
"""State -> numbers of the arrived request and of an expert, from the first on, that are read."""
LENGTH = 32  # steps whose returns are computed at once, each over so many to twice as many steps
RECENT, LATEST = 0.25, 20_000  # batches are drawn from the latest quarter of the steps, or so many
AVERAGED = 10  # the evaluated weights are means over about the last tenth of the updates
LOG_EVERY = 4_000  # steps between rows of the log
EVAL_EPISODES, EVAL_REQUESTS = 16, 300  # of an evaluation: episodes per rate, requests per episode


@dataclass
class Args(RunArgs):
    """Command line of the agent."""

    rows: Literal["features", "experts"] = "features"
    """what is read of an expert: all but its queue, or the paper's Eq. 7 alone"""
    shaping: bool = True
    """add a potential's change to the reward (Ng et al., 1999): the held requests' expected QoS"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=8 num_experts=3"""
    total_timesteps: int = 600_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 256
    """parallel environments"""
    batch_size: int = 264
    """steps in a batch"""
    updates_per_step: int = 2
    """gradient updates after each step of all environments"""
    gamma: Share = 0.995
    """discount per decision"""
    lam: Share = 0.95
    """lambda of the returns"""
    lr: Share = 3e-3
    """learning rate of actor and critics at first; it falls linearly to a hundredth"""
    target_entropy: Weight = 0.3
    """nats at which the temperature, the weight of the policy's entropy, holds it"""
    eval_every: int = 25_000
    """steps between evaluations on the validation split; there is one before the first step"""
    eval_rates: tuple[Positive, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


class State(NamedTuple):
    """What actor and critics read of a batch of states."""

    hidden: Tensor  # (B, N, WIDTH): encoded experts
    context: Tensor  # (B, WIDTH): the request among them
    experts: Tensor  # (B, N, S): columns of `STATE` and of `LOAD`
    work: Tensor  # (B, N): requests' worth of an expert's time that this one takes; 1 if not read
    there: Tensor  # (B, N, 1): 1 for an expert that exists


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with rectifiers between them."""
    pairs = [(nn.Linear(i, o), nn.ReLU()) for i, o in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*sum(pairs, ())[:-1])


class Actor(nn.Module):
    """Reward of every action and its effect on what follows, (2, B, N+1); their sum are the logits.

    The effect is the expert's time at a price above zero, and without shaping the request's QoS.
    """

    def __init__(self, columns: int, shaping: bool) -> None:
        super().__init__()
        self.drop = mlp(WIDTH, WIDTH, 1)
        self.send = mlp(2 * WIDTH, WIDTH, 1)
        self.price = mlp(2 * columns, WIDTH, 1)
        self.paid_later = None if shaping else mlp(2 * WIDTH, WIDTH, 1)

    def forward(self, state: State) -> Tensor:
        """See the class."""
        context = state.context[:, None].expand_as(state.hidden)
        pair = torch.cat([state.hidden, context], -1)
        reward = torch.cat([self.drop(state.context), self.send(pair).squeeze(-1)], -1)
        fleet = features.mean_over(state.experts, state.there)[:, None].expand_as(state.experts)
        price = F.softplus(self.price(torch.cat([state.experts, fleet], -1)).squeeze(-1) - 1)
        later = 0.0 if self.paid_later is None else self.paid_later(pair).squeeze(-1)
        return torch.stack([reward, F.pad(later - price * state.work, (1, 0))])


class Critic(Actor):
    """Scores as an actor's and the state's value (2, B, N+1): Q in two parts."""

    def __init__(self, columns: int, shaping: bool) -> None:
        super().__init__(columns, shaping)
        self.expert_value = mlp(columns, WIDTH, WIDTH, 1)
        self.exogenous_value = mlp(features.EXOGENOUS, WIDTH, 1)

    def forward(self, state: State) -> Tensor:
        """See the class."""
        reward, effect = super().forward(state)
        value = (self.expert_value(state.experts) * state.there).sum(1)
        return torch.stack([reward, value + effect])


class Agent(nn.Module):
    """Encoder, critics, actor and temperature."""

    def __init__(self, rows: str, shaping: bool, system: RoutingSystem) -> None:
        super().__init__()
        self.experts, self.model = system.num_experts, ExpectedQos(system)
        self.read = ROWS[rows]
        self.fixed_experts = rows == "experts"  # then a number tells which expert a row is of
        self.who = torch.eye(self.experts)[:, : self.experts * self.fixed_experts]
        who = self.who.shape[1]
        sizes = len(STATE) + len(LOAD) + who, shaping
        self.encoder = mlp(ARRIVED + EXPERT + who, WIDTH, WIDTH)
        self.actor, self.qf1, self.qf2 = Actor(*sizes), Critic(*sizes), Critic(*sizes)
        self.log_alpha = nn.Parameter(torch.tensor(-3.5))  # of the temperature at first

    def rows(self, obs: Mapping[str, Any]) -> features.Rows:
        """Scaled features of a batch of observations, see `expert_rows`."""
        return features.expert_rows(features.Facts(obs, self.model))

    def encode(self, rows: Tensor) -> State:
        """What actor and critics read of a batch of `rows`; what is not read is 0."""
        batch, n = len(rows), self.experts
        arrived, x = features.split_rows(rows, n)[:2]
        there, parts = x[..., EXISTS:][..., :1], zip((arrived, x), self.read, strict=True)
        arrived, x = (part * (torch.arange(part.shape[-1]) < count) for part, count in parts)
        arrived = arrived[:, None].expand(-1, n, -1)
        who = self.who.expand(batch, -1, -1)
        hidden = self.encoder(torch.cat([arrived, x, who], -1)).relu()
        experts = torch.cat([x[..., STATE], arrived[..., LOAD], who], -1)
        work = x[..., WORK] if self.read[1] == EXPERT else torch.ones_like(x[..., WORK])
        return State(hidden, features.mean_over(hidden, there), experts, work, there)

    def log_policy(self, state: State, mask: Tensor, alpha: float) -> Tensor:
        """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
        logits = self.actor(state).sum(0) / alpha
        return logits.masked_fill(mask == 0, -1e8).log_softmax(-1)

    @torch.no_grad()
    def act(self, obs: Mapping[str, Any], mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        state = self.encode(torch.as_tensor(self.rows(obs).rows).float())
        return self.log_policy(state, torch.as_tensor(np.asarray(mask)), 1.0).argmax(-1).numpy()


class ReplayBuffer:
    """Time-major ring of steps of all environments; rows of scaled features in float16."""

    def __init__(self, length: int) -> None:
        self.length, self.count, self.targets = length, 0, 0  # steps: added, of them with targets
        self.data: dict[str, NDArray[Any]] = {}
        self.squares, self.products = np.eye(features.EXOGENOUS), np.zeros(features.EXOGENOUS)

    def add(self, **step: NDArray[Any]) -> None:
        """Append one step of all environments, whose targets are still to come."""
        step |= {"residual": np.zeros_like(step["value"]), "later": np.zeros_like(step["value"])}
        for key, value in step.items():
            if not self.count:
                self.data[key] = np.zeros((self.length, *value.shape), value.dtype)
            self.data[key][self.count % self.length] = value
        self.count += 1

    def add_targets(self, agent: Agent, gamma: float, lam: float) -> None:
        """Compute what LENGTH steps more are to predict: their rewards and Peng's lambda-returns.

        G_t = r_t + gamma ((1 - lam) V_t+1 + lam G_t+1), at an end V_t; r_t less a fit to exogenous.
        """
        at = (self.targets + np.arange(2 * LENGTH + 1)) % self.length
        reward, done, exogenous = (self.data[key][at] for key in ("reward", "done", "exogenous"))
        x, y = exogenous[:LENGTH][~done[:LENGTH]], reward[:LENGTH][~done[:LENGTH]]
        self.squares = 0.7 * self.squares + x.T @ x
        self.products = 0.7 * self.products + x.T @ y
        fit = np.linalg.lstsq(self.squares, self.products, 1e-8)[0]
        reward -= exogenous @ fit.astype(np.float32)

        with torch.no_grad():
            x = torch.as_tensor(exogenous)
            common = torch.minimum(agent.qf1.exogenous_value(x), agent.qf2.exogenous_value(x))
        value = self.data["value"][at] + common.squeeze(-1).numpy()
        total = value[-1]
        for t in reversed(range(2 * LENGTH)):
            later = gamma * ((1 - lam) * value[t + 1] + lam * total)
            total = np.where(done[t], value[t], reward[t] + later)
            if t < LENGTH:
                self.data["later"][at[t]] = later
        self.data["residual"][at[:LENGTH]] = reward[:LENGTH]
        self.targets += LENGTH

    def sample(self, size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """A batch of the latest steps that have targets."""
        envs = self.data["action"].shape[1]
        latest = int(max(RECENT * self.targets, LATEST // envs, LENGTH))
        first = max(self.targets - latest, self.count - self.length, 0)
        at = rng.integers(first, self.targets, size) % self.length
        env = rng.integers(0, envs, size)
        return {key: torch.as_tensor(values[at, env]) for key, values in self.data.items()}


def critic_loss(qf: Critic, parts: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Squared errors of both parts (2, B, N+1) of a critic at the actions taken."""
    reward, later = parts[:, torch.arange(len(batch["action"])), batch["action"]]
    later = later + qf.exogenous_value(batch["exogenous"]).squeeze(-1)
    error = (reward - batch["residual"]).square() + (later - batch["later"]).square()
    return (error * ~batch["done"]).mean()


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> Any:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = environments.routing_arguments(ENV, args.set)
    env_kwargs.pop("max_episode_steps", None)  # cuts off the training alone
    trained = RoutingSystem.from_kwargs(**env_kwargs)
    agent = Agent(args.rows, args.shaping, system or trained)
    if agent.fixed_experts and agent.experts != trained.num_experts:
        raise ValueError(f"made for {trained.num_experts} experts, got {agent.experts}")
    agent.load_state_dict(weights)
    name = {"experts": "baseline_rl"}.get(args.rows, "sac_rows")
    return checkpoint.CheckpointPolicy(name, "graph", args, agent, agent.act, env_kwargs)


@run_log.saves_when_interrupted
def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = environments.routing_arguments(ENV, args.set)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs, n = environments.make_envs(ENV_ID, args.num_envs, **env_kwargs), args.num_envs

    agent = Agent(args.rows, args.shaping, RoutingSystem.from_env(envs))
    averaged = deepcopy(agent).requires_grad_(False)
    critics = nn.ModuleList([agent.encoder, agent.qf1, agent.qf2])
    q_optimizer = torch.optim.Adam(critics.parameters(), fused=True)
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), fused=True)
    alpha_optimizer = torch.optim.Adam([agent.log_alpha], lr=1e-3)

    envs.reset(seed=environments.episode_seeds(args.seed, n))
    buffer = ReplayBuffer(max(int(RECENT * args.total_timesteps), LATEST) // n + 4 * LENGTH)
    log = run_log.RunLog(args, "sac_rows", ENV_ID, env_kwargs)
    meta = {"agent": "sac_rows", "args": json.dumps(asdict(args))}
    write = log.save = partial(checkpoint.write_checkpoint, averaged, meta)
    parts = {"agent": agent, "averaged": averaged, "buffer": buffer, "envs": envs, "rng": rng}
    parts |= {"q": q_optimizer, "actor": actor_optimizer, "alpha": alpha_optimizer}
    before, step, updates, cpu_s, best = log.restore(parts, (-1, 0, 0, 0.0, -np.inf))
    obs, mask = envs.unwrapped.observe()  # pyright: ignore
    rows, held, exogenous = agent.rows(obs)
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

        # Act: uniformly at first, then by the policy; the soft value of the state is kept.
        begin = time.process_time()
        alpha = float(agent.log_alpha.detach().exp())
        score, value = rng.gumbel(size=mask.shape), np.zeros(n, np.float32)
        if buffer.targets:
            with torch.no_grad():
                state = agent.encode(torch.as_tensor(rows).float())
                log_pi = agent.log_policy(state, torch.as_tensor(mask), alpha)
                min_q = torch.minimum(agent.qf1(state).sum(0), agent.qf2(state).sum(0))
                value = (log_pi.exp() * (min_q - alpha * log_pi)).sum(-1).numpy()
            score += log_pi.numpy()
        action = np.where(mask, score, -1e30).argmax(-1)
        inputs, before_held = {"rows": rows, "mask": mask, "exogenous": exogenous}, held
        obs, reward, terminated, truncated, info = envs.step(action)
        done, mask = terminated | truncated, info["action_mask"]
        rows, held, exogenous = agent.rows(obs)
        paid = reward + (args.gamma * held - before_held if args.shaping else 0)
        buffer.add(action=action, value=value, reward=paid.astype(np.float32), done=done, **inputs)
        before, step = step, step + n
        log.add_rewards(reward, done)

        # Learn.
        losses = {}
        if buffer.count > buffer.targets + 2 * LENGTH:
            buffer.add_targets(agent, args.gamma, args.lam)
        for optimizer in (q_optimizer, actor_optimizer):
            optimizer.param_groups[0]["lr"] = args.lr * (1 - 0.99 * step / args.total_timesteps)
        for _ in range(args.updates_per_step if buffer.targets else 0):
            batch = buffer.sample(args.batch_size, rng)
            state = agent.encode(batch["rows"].float())
            q1, q2 = agent.qf1(state), agent.qf2(state)
            qf1_loss = critic_loss(agent.qf1, q1, batch)
            qf2_loss = critic_loss(agent.qf2, q2, batch)
            q_optimizer.zero_grad()
            (qf1_loss + qf2_loss).backward()
            nn.utils.clip_grad_norm_(critics.parameters(), 10.0)
            q_optimizer.step()

            state = State(*(part.detach() for part in state))  # the critics alone train the encoder
            min_q = torch.minimum(q1.sum(0), q2.sum(0)).detach()
            log_pi = agent.log_policy(state, batch["mask"], alpha)
            actor_loss = (log_pi.exp() * (log_pi - min_q / alpha)).sum(-1).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            nn.utils.clip_grad_norm_(agent.actor.parameters(), 10.0)
            actor_optimizer.step()

            entropy = -(log_pi.exp() * log_pi).sum(-1).mean().detach()
            alpha_loss = agent.log_alpha.exp() * (entropy - args.target_entropy)
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()
            alpha = float(agent.log_alpha.detach().exp())

            updates += 1
            with torch.no_grad():
                for mean, now in zip(averaged.parameters(), agent.parameters(), strict=True):
                    mean.lerp_(now, AVERAGED / (AVERAGED + updates))
            losses = {"losses/qf1_loss": qf1_loss, "losses/qf2_loss": qf2_loss}
            losses |= {"losses/actor_loss": actor_loss, "losses/alpha_loss": alpha_loss}
            losses |= {"losses/entropy": entropy, "losses/alpha": agent.log_alpha.exp()}
        cpu_s += time.process_time() - begin

        if run_log.interval_passed(LOG_EVERY, before, step) or step >= args.total_timesteps:
            metrics = {"charts/SPS": log.advance(step), "charts/cpu_s": cpu_s}
            log.write(step, metrics | {key: float(x.detach()) for key, x in losses.items()})
    envs.close()
    return log.run


if __name__ == "__main__":
    run_agent(train, Args)
