"""Add your own profile.

Time the kernels of a machine, fit a latency law to them, and let experts of that machine serve
requests. Here the machine is this computer's processor and the model a tiny one, so that it takes
seconds; on a GPU leave out `--device cpu` and name the model that you serve.
"""

import tempfile
from pathlib import Path

import gymnasium

import servegym
from servegym.hardware_profiles import load
from servegym.hardware_profiles.build import calibrate
from servegym.hardware_profiles.measure import command as measure

assert "servegym/LLMRouting-v0" in servegym.ENV_IDS  # importing servegym registers the ids

with tempfile.TemporaryDirectory() as folder:
    measured, file = f"{folder}/measured", f"{folder}/mine.json"
    measure.main(["gpu", "--device", "cpu", "--model", "tiny", "--out", measured])
    calibrate.main([measured, "-o", file])  # as `servegym calibrate` does; prints held-out errors
    profile = load(file)
    print(profile.name, profile.kind, f"{Path(file).stat().st_size} bytes")
    env = gymnasium.make(
        "servegym/LLMRouting-v0",
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
