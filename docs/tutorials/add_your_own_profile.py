"""Add your own profile.

Time a machine's kernels, fit a latency law to them and let experts of that machine serve requests.
Here the machine is this computer's processor and the model a tiny one. The commands are

    servegym measure gpu --model llama-3.1-8b --out measured
    servegym calibrate measured -o mine.json

It prints the law's errors on timings that were held out, the time of a decode step, and the outcome
of an episode. They differ from machine to machine:

```text
cpu-x86-64-tiny fitted: 4.5 ms a token, 17.5 ms at 16 sequences
avg_qos: 0.6870
mean_latency_s_per_token: 0.0066
reject_rate: 0.0000
```

[A running server](../hardware.md#calibrate-to-your-own-machine) is measured from outside. To
compare a law with a run of your engine: `servegym fidelity --run FOLDER --profile mine.json`. In
the folder, each line of `requests.jsonl` has `input_toks`, `output_toks`, `arrival_time`, `queued_ts`,
`first_token_ts` and `last_token_ts` (tokens, seconds). `meta.json` has the engine's settings:
`{"engine_kwargs": {"max_num_seqs": 256, "max_num_batched_tokens": 8192}}`.
"""

import tempfile

import gymnasium

import servegym
from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate import calibrate
from servegym.hardware_profiles.measure import command as measure

assert "servegym/LLMRouting-v1" in servegym.ENV_IDS  # importing servegym registers the ids

with tempfile.TemporaryDirectory() as folder:
    measured, file = f"{folder}/measured", f"{folder}/mine.json"
    measure.main(["gpu", "--device", "cpu", "--model", "tiny", "--out", measured])
    calibrate.main([measured, "-o", file])
    law = load(file)
    one, many = 1e3 * law.decode_s(1, 100), 1e3 * law.decode_s(16, 1600)
    print(f"{law.name} {law.kind}: {one:.1f} ms a token, {many:.1f} ms at 16 sequences")

    env = gymnasium.make(
        "servegym/LLMRouting-v1",
        profiles=[file, file, "rtx4090-llama-3.1-8b"],  # names and files mix
        rate=2.0,
        episode_requests=50,
    )
observation, info = env.reset(seed=0)
done = False
while not done:
    load_of_each = observation["experts"][:, 1:].sum(axis=1)
    observation, _, terminated, truncated, info = env.step(1 + int(load_of_each.argmin()))
    done = terminated or truncated
for key in ("avg_qos", "mean_latency_s_per_token", "reject_rate"):
    print(f"{key}: {info['episode_kpis'][key]:.4f}")
