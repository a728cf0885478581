"""PPO in the manner of CleanRL: one file, gymnasium and torch, any discrete id by ``--env-id``.

The environment is made by its id with default arguments; the file knows nothing of it. It serves
the interoperability tests and is no agent of this package.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Categorical


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=50_000)
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=2)
    parser.add_argument("--clip-coef", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    return parser.parse_args()


def make_env(env_id):
    def thunk():
        env = gym.wrappers.FlattenObservation(gym.make(env_id))
        env = gym.wrappers.NormalizeObservation(gym.wrappers.RecordEpisodeStatistics(env))
        return gym.wrappers.TransformObservation(env, lambda x: np.clip(x, -10, 10), None)

    return thunk


def layer_init(layer, std=2**0.5, bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    """Actor and critic; a `MultiDiscrete` action is one categorical a part."""

    def __init__(self, envs):
        super().__init__()
        space = envs.single_action_space
        self.nvec = space.nvec.tolist() if hasattr(space, "nvec") else [int(space.n)]
        size = int(np.prod(envs.single_observation_space.shape))

        def net(outputs, std):
            return nn.Sequential(
                layer_init(nn.Linear(size, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, outputs), std),
            )

        self.critic, self.actor = net(1, 1.0), net(sum(self.nvec), 0.01)

    def get_value(self, x):
        return self.critic(x).flatten()

    def get_action_and_value(self, x, action=None):
        parts = [Categorical(logits=part) for part in self.actor(x).split(self.nvec, dim=1)]
        if action is None:
            action = torch.stack([part.sample() for part in parts], dim=1)
        logprob = sum(part.log_prob(column) for part, column in zip(parts, action.T, strict=True))
        entropy = sum(part.entropy() for part in parts)
        return action, logprob, entropy, self.get_value(x)


def main():
    args = parse_args()
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    envs = gym.vector.SyncVectorEnv(
        [make_env(args.env_id) for _ in range(args.num_envs)],
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    single = not hasattr(envs.single_action_space, "nvec")
    agent = Agent(envs)
    start = nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions = torch.zeros((*shape, len(agent.nvec)), dtype=torch.long)
    logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))

    global_step, returns_seen = 0, []
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs, next_done = torch.as_tensor(next_obs, dtype=torch.float32), torch.zeros(args.num_envs)
    for _ in range(args.total_timesteps // batch_size):
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)
            actions[step] = action
            sent = action[:, 0].numpy() if single else action.numpy()
            seen, reward, terminations, truncations, infos = envs.step(sent)
            rewards[step] = torch.as_tensor(reward, dtype=torch.float32)
            next_obs = torch.as_tensor(seen, dtype=torch.float32)
            next_done = torch.as_tensor(terminations | truncations, dtype=torch.float32)
            if "final_info" in infos and "episode" in infos["final_info"]:
                episode = infos["final_info"]["episode"]
                returns_seen += episode["r"][infos["final_info"]["_episode"]].tolist()

        with torch.no_grad():
            advantages = torch.zeros_like(rewards)
            last, next_value = 0.0, agent.get_value(next_obs)
            for t in reversed(range(args.num_steps)):
                live = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                after = next_value if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * after * live - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * live * last
            returns = advantages + values

        b_obs, b_actions = obs.flatten(0, 1), actions.flatten(0, 1)
        b_logprobs, b_advantages, b_returns = (
            part.flatten() for part in (logprobs, advantages, returns)
        )
        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size).split(minibatch_size):
                _, logprob, entropy, value = agent.get_action_and_value(
                    b_obs[rows], b_actions[rows]
                )
                ratio = (logprob - b_logprobs[rows]).exp()
                gain = b_advantages[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(-gain * ratio, -gain * clipped).mean()
                v_loss = 0.5 * ((value - b_returns[rows]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

    moved = nn.utils.parameters_to_vector(agent.parameters()).detach() - start
    print(f"global_step={global_step}")
    print(f"episodes={len(returns_seen)}")
    print(f"mean_return={np.mean(returns_seen) if returns_seen else float('nan')}")
    print(f"weights_moved={moved.abs().max().item()}")


if __name__ == "__main__":
    main()
