"""Runs one rival simulator on lists of requests, under the rival's own Python.

    PYTHON rival.py NAME JOBS.json OUT.json

The script needs the standard library, numpy and the rival alone, never this package. A job holds
``requests`` (``arrival_s``, ``prompt_tokens``, ``output_tokens``), ``engine`` (``max_num_seqs``,
``max_num_batched_tokens``, ``kv_tokens``, ``block_size``, ``prefix_caching``), ``law`` (``kind``
``"constant"`` with ``step_s``, or ``"tables"`` with ``prefill_tokens``, ``prefill_s``,
``decode_kv_tokens``, ``decode_context_tokens``, ``decode_s``) and ``repeats``. OUT gets of each job
``version``, ``seconds`` (of one core, the fastest repeat), and ``first_token_s`` and
``finish_s`` of every request, null where it was not served.
"""

import json
import math
import os
import sys
import tempfile
import time
from importlib.metadata import version


def _rank(job, timing):
    """The engine of a job in the words that ai-dynamo and aisimulate share."""
    engine = job["engine"]
    return {
        "backend": "vllm",
        "worker_type": "aggregated",
        "num_gpu_blocks": engine["kv_tokens"] // engine["block_size"],
        "block_size": engine["block_size"],
        "max_num_seqs": engine["max_num_seqs"],
        "max_num_batched_tokens": engine["max_num_batched_tokens"],
        "enable_prefix_caching": engine["prefix_caching"],
        "enable_chunked_prefill": True,
        "timing_model": timing,
    }


def _fixed(job):
    step_ms = 1e3 * job["law"]["step_s"]
    return {"type": "fixed", "prefill_ms": step_ms, "decode_ms": step_ms}


def _columns(requests):
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    return list(zip(*(requests[name] for name in names), strict=True))


def ai_dynamo(job, folder):
    """Offline replay of ai-dynamo from a trace file; its tables come from an NPZ file."""
    from dynamo.replay import run_trace_replay  # type: ignore[import-not-found]

    law = job["law"]
    if law["kind"] == "constant":
        timing = _fixed(job)
    else:
        import numpy as np

        path = os.path.join(folder, "law.npz")
        np.savez(
            path,
            prefill_isl=np.array(law["prefill_tokens"], float),
            prefill_ttft_ms=1e3 * np.array(law["prefill_s"]),
            decode_active_kv_tokens=np.array(law["decode_kv_tokens"], float),
            decode_context_length=np.array(law["decode_context_tokens"], float),
            decode_itl=1e3 * np.array(law["decode_s"]),
        )
        timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": path}}
    trace, block = os.path.join(folder, "trace.jsonl"), 0
    size = job["engine"]["block_size"]
    rows = _columns(job["requests"])
    order = sorted(range(len(rows)), key=rows.__getitem__)
    with open(trace, "w", encoding="utf-8") as stream:
        for arrival, prompt, output in rows:
            count = math.ceil(prompt / size)
            line = {
                "timestamp": 1e3 * arrival,
                "input_length": prompt,
                "output_length": output,
                # No two prompts share a block.
                "hash_ids": list(range(block, block + count)),
            }
            stream.write(json.dumps(line) + "\n")
            block += count

    def run(records):
        report = run_trace_replay(
            [trace],
            extra_engine_args={"engine": _rank(job, timing)},
            trace_block_size=size,
            capture_per_request=records,
        )
        # A record does not tell its line of the trace: both are in order of arrival.
        ordered = sorted(
            report.per_request or (),
            key=lambda one: (one["arrival_time_ms"], one["input_length"], one["output_length"]),
        )
        times = []
        for row, one in zip(order, ordered, strict=False):
            # The trace's clock begins at its first request.
            shift = 1e3 * rows[row][0] - one["arrival_time_ms"]
            times.append((row, shift + one["first_token_ms"], shift + one["last_token_ms"]))
        return times, 1e-3 * report.summary["wall_time_ms"]

    return run, version("ai-dynamo")


def aisimulate(job, folder):
    """The engine replay of aisimulate, through its compiled runtime."""
    from aisimulate import _runtime  # type: ignore[import-not-found]

    if job["law"]["kind"] != "constant":
        raise SystemExit("aisimulate takes a constant law only")
    spec = {
        "version": 1,
        "topology": {
            "kind": "aggregated",
            "workers": {"initial_workers": 1, "startup_delay_ms": 0.0},
        },
        "engine": {"rank": _rank(job, _fixed(job))},
        "adapters": {
            "placement": {"provider": "round_robin", "config": None},
            "scaling": {"provider": "none", "config": None},
        },
        "max_sim_time_ms": None,
        "max_in_flight": None,
        "record_per_request": True,
        "sla": {},
        "requests": [
            {
                "id": str(row),
                "arrival_time_ms": 1e3 * arrival,
                "input_tokens": prompt,
                "output_tokens": output,
            }
            for row, (arrival, prompt, output) in enumerate(_columns(job["requests"]))
        ],
    }

    def run(records):
        text = json.dumps({**spec, "record_per_request": records})
        report = json.loads(_runtime.run_replay_json(text))
        times = [
            (int(one["request_id"]), one["first_token_ms"], one["last_token_ms"])
            for one in report.get("per_request") or ()
        ]
        return times, 1e-3 * report["wall_time_ms"]

    return run, version("aisimulate")


RIVALS = {"ai-dynamo": ai_dynamo, "aisimulate": aisimulate}


def serve(name, job):
    """One job: once for the requests' times, then ``repeats`` times for the speed."""
    count = len(job["requests"]["arrival_s"])
    with tempfile.TemporaryDirectory() as folder:
        run, release = RIVALS[name](job, folder)
        records, _ = run(True)
        # Its own clock leaves out the reading of its trace; the share of a core that the whole
        # call had makes core-seconds of it.
        seconds = []
        for _ in range(job["repeats"]):
            wall, core = time.perf_counter(), time.process_time()
            _, wall_s = run(False)
            core = time.process_time() - core
            seconds.append(wall_s * core / (time.perf_counter() - wall))
    first, finish = [None] * count, [None] * count
    for row, first_ms, last_ms in records:
        first[row], finish[row] = 1e-3 * first_ms, 1e-3 * last_ms
    return {
        "version": release,
        "seconds": min(seconds),
        "first_token_s": first,
        "finish_s": finish,
    }


def main(name, jobs_path, out_path):
    """Read the jobs, run them one after another, write what came of each."""
    with open(jobs_path, encoding="utf-8") as stream:
        jobs = json.load(stream)
    results = [serve(name, job) for job in jobs]
    with open(out_path, "w", encoding="utf-8") as stream:
        json.dump(results, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
