"""Use it from Stable-Baselines3.

Stable-Baselines3's PPO takes the id as it is. With 32 environments and three settings it learns
faster than with its defaults: about 25 s of a core. The model, an object with `predict`, then plays
the same evaluation episodes as two rules, at the id's 5 requests/s.

It prints (interquartile means over episodes, 95 % intervals):

```text
 policy                                       QoS   drop %   reject %   late %   ms/token     P99
 PPO (guest)                 0.711 [0.709, 0.712]      0.0        0.0      0.8       18.7    30.0
 least_outstanding           0.668 [0.666, 0.670]      0.0        0.0      1.3       20.3    30.1
 random                      0.518 [0.507, 0.527]      0.0        0.0     24.0       28.7   162.0
```

[Other libraries](../interop.md#stable-baselines3) has masks of illegal actions and saved models.
"""

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from servegym.experiments.evaluation.evaluate import evaluate, print_summary

torch.set_num_threads(1)
env_id = "servegym/LLMRoutingSummary-v3"
envs = make_vec_env(env_id, 32, seed=0)
model = PPO(
    "MlpPolicy", envs, n_steps=128, batch_size=1024, learning_rate=1e-3, seed=0, device="cpu"
)
model.learn(200_000)

rows = evaluate(
    env_id,
    [model, "least_outstanding", "random"],
    episodes=20,
    seed=1,
    num_envs=20,  # the model plays all in one process, which loads PyTorch once
)
print_summary(rows)
