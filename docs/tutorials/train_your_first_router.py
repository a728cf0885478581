"""Train your first router.

PPO learns from random weights to route requests to six models, in about 20 s of a core. The trained
policy then plays 20 evaluation episodes, and two rules play the same ones.

It prints the validation score during the training, then this table and what its columns mean
(interquartile means over episodes, 95 % intervals).

```text
 policy                                       QoS   drop %   reject %   late %   ms/token     P99
 ppo                         0.645 [0.640, 0.650]      1.4        0.0      3.1       20.6    39.5
 least_outstanding           0.579 [0.559, 0.594]      0.1        0.0     15.8       25.2   100.2
 random                      0.405 [0.395, 0.412]      0.3        0.0     40.3       40.3   262.5
```

`python agents/ppo.py --set rate=8` is the same training. It keeps its folder, `runs/ppo_1`, whose
curve `servegym plot runs/ppo_1` draws.
"""

import tempfile

from servegym.agents.ppo import Args, train
from servegym.experiments.evaluation.evaluate import evaluate, print_summary

with tempfile.TemporaryDirectory() as folder:
    run = train(Args(set=("rate=8",), out_dir=folder))  # 8 requests/s; 250,000 decisions
    rows = evaluate(
        "servegym/LLMRoutingSummary-v3",
        [run / "best.safetensors", "least_outstanding", "random"],
        episodes=20,
        env_kwargs={"rate": 8.0},
    )
print_summary(rows)
