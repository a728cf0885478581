"""Add your own profile.

Time a machine's kernels, fit a latency law to them and let experts of that machine serve requests.
Here the machine is this computer's processor and the model a tiny one. The commands are

    servegym measure gpu --model llama-3.1-8b --out measured
    servegym calibrate measured -o mine.json

It prints the law's errors on held-out timings, the time of a decode step, and two rules on a fleet
with that machine (interquartile means, 95 % intervals; numbers go by the machine):

```text
cpu-x86-64-tiny fitted: 4.5 ms a token, 17.6 ms at 16 sequences
 policy                                       QoS   drop %   reject %   late %   ms/token    P99
 least_outstanding           0.698 [0.690, 0.710]      0.0        0.0      0.0        8.7   18.1
 expected_qos                0.722 [0.719, 0.737]      0.0        0.0      0.0        9.2   17.9
```

[A running server](../hardware.md#calibrate-to-your-own-machine) is measured from outside. To
compare a law with a run of your engine: `servegym fidelity --run FOLDER --profile mine.json`. There
a line of `requests.jsonl` has `input_toks`, `output_toks`, `arrival_time`, `queued_ts`,
`first_token_ts` and `last_token_ts` (tokens, seconds), and `meta.json` the engine's settings:
`{"engine_kwargs": {"max_num_seqs": 256, "max_num_batched_tokens": 8192}}`.
"""

import tempfile

from servegym.experiments.evaluation.evaluate import evaluate, print_summary
from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate import calibrate
from servegym.hardware_profiles.measure import command as measure

with tempfile.TemporaryDirectory() as folder:
    measured, file = f"{folder}/measured", f"{folder}/mine.json"
    measure.main(["gpu", "--device", "cpu", "--model", "tiny", "--out", measured])
    calibrate.main([measured, "-o", file])
    law = load(file)
    one, many = 1e3 * law.decode_s(1, 100), 1e3 * law.decode_s(16, 1600)
    print(f"{law.name} {law.kind}: {one:.1f} ms a token, {many:.1f} ms at 16 sequences")
    fleet = [file, file, "rtx4090-llama-3.1-8b"]  # files and names mix
    rows = evaluate(
        "servegym/LLMRouting-v1",
        ["least_outstanding", "expected_qos"],
        episodes=5,
        env_kwargs={"profiles": fleet, "rate": 4.0, "episode_requests": 200},
    )
print_summary(rows)
