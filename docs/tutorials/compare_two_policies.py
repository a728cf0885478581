"""Compare two policies properly.

Both policies play the same evaluation episodes, whose prompts no training has seen. So the
difference is taken episode by episode, and its interval is narrower than those of the two scores.

It prints interquartile means with 95 % intervals: a table of both, then the difference.

```text
 policy                                       QoS   drop %   reject %   late %   ms/token    P99
 priced_greedy               0.662 [0.652, 0.678]      2.3        0.0      3.1       20.6   41.1
 greedy_qos                  0.594 [0.578, 0.627]      5.8        0.0      8.7       25.7   66.6
difference: 0.065 [0.050, 0.073]
```
"""

from servegym.experiments.evaluation.evaluate import evaluate, print_summary
from servegym.experiments.evaluation.stats import iqm, paired_difference

names = ("priced_greedy", "greedy_qos")
rows = evaluate(
    "servegym/LLMRouting-v1",
    names,
    episodes=10,
    env_kwargs={"rate": 8.0, "episode_requests": 300},
)
print_summary(rows)

first, second = ([row["avg_qos"] for row in rows if row["policy"] == name] for name in names)
value, low, high = paired_difference(first, second, iqm)
print(f"difference: {value:.3f} [{low:.3f}, {high:.3f}]")
assert low > 0, "priced_greedy is better: the whole interval is above zero"
