import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from servegym.experiments.live import launcher
from servegym.experiments.live.fleet_file import ServerSpec
from servegym.experiments.live.models import FIRST_WORD
from servegym.hardware_profiles.measure.server import Endpoint, ask

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers end by Linux' means")

TINY = "random:1x64"


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_servers_answer_with_the_tokens_asked_for_and_end_with_the_block(tmp_path):
    specs = [ServerSpec(name, "llama.cpp", TINY, slots=2, context=64) for name in ("a", "b")]
    with launcher.running(specs, tmp_path) as urls:
        pids = [one.pid for one in multiprocessing.active_children()]
        assert len(pids) == 2
        words = [FIRST_WORD + i for i in range(20)]
        targets = [Endpoint(url, "ab"[k], output_tokens=12) for k, url in enumerate(urls)]
        came = []
        for target in targets:
            good = ask(target, words, on_token=lambda: came.append(time.perf_counter()))
            assert (good.prompt_tokens, good.output_tokens) == (20, 12)
            assert len(good.token_s) == 12 and list(good.token_s) == sorted(good.token_s)
            assert 0.0 < good.ttft_s <= good.e2e_s
        assert len(came) == 24
        long = ask(replace(targets[0], output_tokens=60), words)  # more than the slot's context
        assert long.output_tokens < 60
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while any(map(launcher.healthy, urls)):
            time.sleep(0.02)
        with pytest.raises(OSError):
            ask(targets[0], words)
    assert not any(map(alive, pids))


STARTER = f"""
import multiprocessing, signal, sys
from pathlib import Path
from servegym.experiments.live import launcher
from servegym.experiments.live.fleet_file import ServerSpec

if __name__ == "__main__":
    spec = ServerSpec("a", "llama.cpp", {TINY!r}, context=64)
    with launcher.running([spec], Path(sys.argv[1])):
        print(multiprocessing.active_children()[0].pid, flush=True)
        signal.pause()
"""


@pytest.mark.slow
def test_no_server_outlives_the_process_that_started_it(tmp_path):
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    words = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as starter:
        pid = int(starter.stdout.readline())
        assert alive(pid)
        starter.kill()
    stop = time.monotonic() + 10.0
    while alive(pid) and time.monotonic() < stop:
        time.sleep(0.02)
    assert not alive(pid)


def test_a_server_that_cannot_start_is_named(tmp_path, monkeypatch):
    def refused(what, **change):
        spec = ServerSpec(**{"name": "a", "engine": "llama.cpp", "model": TINY, **change})
        with pytest.raises(ValueError, match=what), launcher.running([spec], tmp_path):
            raise AssertionError

    refused("random:LAYERSxWIDTH", model="random:8")
    refused("no such file", model="/nowhere.gguf")
    refused("status", model=__file__)  # no GGUF
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused(f"port {taken.getsockname()[1]}", port=taken.getsockname()[1])
    monkeypatch.setattr(launcher, "healthy", lambda *_: False)
    monkeypatch.setattr(launcher, "START_S", 0.3)
    refused("not healthy after 0.3 s")
    assert not multiprocessing.active_children()
