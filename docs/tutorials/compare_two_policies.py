"""Compare two policies properly.

Both policies meet the same episodes, so the difference is taken episode by episode and its interval
is far narrower than those of the two means. Prompts never trained on, enough episodes, an interval
beside every number, drops and rejections beside every latency.
"""

from servegym.experiments.evaluation.evaluate import evaluate, print_summary
from servegym.experiments.evaluation.stats import iqm, paired_difference, stratified_bootstrap

rows = evaluate(
    "servegym/LLMRouting-v1",
    ["priced_greedy", "greedy_qos"],
    episodes=10,
    env_kwargs={"rate": 8.0, "episode_requests": 300},
)
print_summary(rows)

scores = {
    name: [row["avg_qos"] for row in rows if row["policy"] == name]
    for name in ("priced_greedy", "greedy_qos")
}
for name, values in scores.items():
    print(name, stratified_bootstrap(values, iqm))
difference = paired_difference(scores["priced_greedy"], scores["greedy_qos"], iqm)
print("difference", difference)
assert difference.low > 0, "the interval of the paired difference lies above zero"
