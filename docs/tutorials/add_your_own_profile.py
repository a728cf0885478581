"""Your own card or server in ten minutes.

Time the kernels of a machine, fit a latency law to them, time a server that runs there, compare the
law with a run of it, and let experts of that machine serve requests. Here the machine is this
computer's processor, the model a tiny one and the server a stand-in, so that it takes seconds. On a
GPU leave out `--device cpu` and name the model that you serve; the commands are also
`servegym measure gpu`, `servegym calibrate`, `servegym measure server` and `servegym fidelity`.
"""

import json
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gymnasium
import numpy as np

import servegym
from servegym.envs.llm_routing import replay
from servegym.experiments.fidelity import report as fidelity
from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate import calibrate
from servegym.hardware_profiles.measure import command as measure

assert "servegym/LLMRouting-v1" in servegym.ENV_IDS  # importing servegym registers the ids


class StandIn(BaseHTTPRequestHandler):
    """Streams an answer as servers of OpenAI's protocol do, a token every 2 ms."""

    def do_POST(self):
        """Answer one request."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for _ in range(request["max_tokens"]):
            time.sleep(0.002)
            self.wfile.write(b'data: {"choices": [{"text": "word "}]}\n\n')
        usage = {"prompt_tokens": 8, "completion_tokens": request["max_tokens"]}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        """Keep quiet."""


with tempfile.TemporaryDirectory() as folder:
    # The kernels, and the law that is fitted to two thirds of them; it prints the others' errors.
    measured, file = f"{folder}/measured", f"{folder}/mine.json"
    measure.main(["gpu", "--device", "cpu", "--model", "tiny", "--out", measured])
    calibrate.main([measured, "-o", file])
    profile = load(file)
    print(profile.name, profile.kind, f"{Path(file).stat().st_size} bytes")

    # A server from outside: TTFT and TPOT at one and at two requests in flight.
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/v1"
    words = ["--url", address, "--model", "stand-in", "--out", f"{folder}/server.csv"]
    words += ["--loads", "1,2", "--prompt-words", "8", "--output-tokens", "8", "--requests", "4"]
    measure.main(["server", *words])
    server.shutdown()
    server.server_close()

    # A run of the engine, as its log has it: when requests came, and their first and last token.
    # The stand-in is the law with a share of the host in every iteration, a fifth of a decode,
    # that the law does not know.
    rng, decode_s = np.random.default_rng(0), profile.decode_s(4, 400)
    arrival = np.cumsum(rng.exponential(10 * decode_s, 80))
    prompt, output = rng.integers(10, 200, 80), rng.integers(10, 60, 80)
    host = {"step_s": 0.2 * decode_s, "sequence_s": 0.0, "token_s": 0.0}
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    replayed = replay(arrival, prompt, output, profile=profile.with_host(host), **settings)
    run = Path(folder, "run")
    run.mkdir()
    with (run / "requests.jsonl").open("w") as stream:
        for i, came in enumerate(arrival.tolist()):
            first = came + float(replayed["ttft_s"][i])
            times = {"arrival_time": came, "queued_ts": came, "first_token_ts": first}
            times["last_token_ts"] = came + float(replayed["e2e_s"][i])
            lengths = {"input_toks": int(prompt[i]), "output_toks": int(output[i])}
            stream.write(json.dumps({**lengths, **times}) + "\n")
    meta = {"engine_kwargs": settings, "kv_cache": {"enable_prefix_caching": False}}
    (run / "meta.json").write_text(json.dumps(meta))
    words = ["--run", str(run), "--no-plot"]
    fidelity.main([*words, "--profile", file, "--out", f"{folder}/kernels"])

    # With the host's share in the profile the errors are gone.
    profile.with_host(host).save(file)
    fidelity.main([*words, "--profile", file, "--out", f"{folder}/whole"])
    for name in ("kernels", "whole"):
        lines = Path(folder, name, "errors.csv").read_text().splitlines()
        rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:4]]
        print(name, {row["metric"]: f"{100 * float(row['error_of_mean']):+.2f} %" for row in rows})

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
