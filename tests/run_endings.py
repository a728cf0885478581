"""Many short trainings under load, each of which must end with status 0.

``python tests/run_endings.py`` starts 200 runs of 3,000 decisions, as many at a time as keep every
core three times busy, with their output in files. What ends a process when the interpreter does,
such as a thread that outlives its work, shows in one run of many.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AGENTS = {
    "sac_rows": ("--eval_every", "3000"),
    "ppo": ("--eval_every", "3000"),
    "cem": ("--population", "10", "--set", "num_experts=3", "episode_requests=30"),
}


def train(number, folder, steps):
    """The status of a training, and the end of its output where that is not 0."""
    name, flags = list(AGENTS.items())[number % len(AGENTS)]
    words = [sys.executable, "-m", f"servegym.agents.{name}", "--total_timesteps", str(steps)]
    words += ["--out_dir", str(folder), "--run_name", f"{name}_{number}", *flags]
    log = Path(folder, f"{name}_{number}.log")
    with log.open("wb") as output:
        status = subprocess.call(words, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    return name, status, log.read_text("utf-8", "replace")[-500:] if status else ""


def main():
    """Print the statuses by agent; status 1 unless all are 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--at-a-time", type=int, default=3 * (os.cpu_count() or 1))
    args = parser.parse_args()
    ended = Counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_a_time) as pool:
        done = pool.map(lambda k: train(k, folder, args.steps), range(args.runs))
        for number, (name, status, tail) in enumerate(done, 1):
            ended[name, status] += 1
            told = ", ".join(f"{n} {s}: {count}" for (n, s), count in sorted(ended.items()))
            print(f"{number} of {args.runs} runs; agent, status: number: {told}", flush=True)
            if tail:
                print(tail, flush=True)
    return int(any(status for _, status in ended))


if __name__ == "__main__":
    sys.exit(main())
