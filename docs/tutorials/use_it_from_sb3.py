"""Use it from Stable-Baselines3.

The Flat ids have one Box and plain discrete actions, so an off-the-shelf agent takes them as they
are. The masks of illegal actions come from `action_masks()`, which sb3-contrib's MaskablePPO finds
by itself. Training is cut short here. After `model.save("mine")` the file `mine.zip` is a policy:
`servegym evaluate servegym/LLMRouting-v1 --policy mine.zip --set num_experts=3`.
"""

import gymnasium
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.monitor import Monitor

import servegym

torch.set_num_threads(1)
assert "servegym/LLMRoutingFlat-v3" in servegym.ENV_IDS


def make(split: str) -> gymnasium.Env:
    """Training prompts to learn from, evaluation prompts to be judged on."""
    return gymnasium.make(
        "servegym/LLMRoutingFlat-v3",
        num_experts=3,
        rate=4.0,
        episode_requests=200,
        reward="paid_forward",
        split=split,
    )


model = MaskablePPO("MlpPolicy", Monitor(make("train")), n_steps=512, device="cpu", seed=0)
model.learn(2_048)

env = make("eval")
observation, info = env.reset(seed=1)
done = False
while not done:
    action, _ = model.predict(observation, action_masks=info["action_mask"], deterministic=True)
    observation, _, terminated, truncated, info = env.step(int(action))
    done = terminated or truncated
print(f"average QoS on evaluation prompts: {info['episode_kpis']['avg_qos']:.3f}")
