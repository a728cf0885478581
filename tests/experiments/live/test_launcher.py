import os
import signal
import socket
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
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are watched on Linux")

TINY = "random:1x64"


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _below(pid):
    """A process and all below it."""
    try:
        listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [pid, *(p for child in listing.split() for p in _below(int(child)))]


def _gone(pids):
    stop = time.monotonic() + 60.0
    while any(map(_alive, pids)) and time.monotonic() < stop:
        time.sleep(0.02)
    return not any(map(_alive, pids))


def test_servers_answer_with_the_tokens_asked_for_and_end_with_the_block(tmp_path):
    specs = [ServerSpec(name, "llama.cpp", TINY, slots=2, context=64) for name in ("a", "b")]
    with launcher.Fleet(specs, tmp_path) as fleet:
        pids = [pid for one in fleet.endpoints for pid in _below(one.pid)]
        assert len(pids) == 4  # a watchdog and a server each
        words = [FIRST_WORD + i for i in range(20)]
        targets = [Endpoint(one.url, one.name, output_tokens=12) for one in fleet.endpoints]
        came = []
        for target in targets:
            good = ask(target, words, on_token=lambda: came.append(time.perf_counter()))
            assert (good.prompt_tokens, good.output_tokens) == (20, 12)
            assert len(good.token_s) == 12 and list(good.token_s) == sorted(good.token_s)
            assert 0.0 < good.ttft_s <= good.e2e_s
        assert len(came) == 24
        long = ask(replace(targets[0], output_tokens=60), words)  # more than the slot's context
        assert long.output_tokens < 60
        # A server that dies mid-way is a counted failure of the request and seen by its owner.
        os.kill(pids[1], signal.SIGKILL)
        assert _gone(pids[:2])
        assert fleet.dead() == ["a"]
        with pytest.raises(OSError):
            ask(targets[0], words)
    assert _gone(pids)


@pytest.mark.parametrize("watched", [True, False])
def test_what_a_server_has_started_ends_with_it(tmp_path, monkeypatch, watched):
    """Its watchdog ends all, in whichever group; where that was killed, the group is ended."""
    leaves = "setsid " * watched
    words = ["sh", "-c", f"{leaves}sleep 1000 & sleep 1000 & wait"]
    monkeypatch.setattr(launcher, "command", lambda *_: (words, dict(os.environ)))
    monkeypatch.setattr(launcher, "healthy", lambda *_: True)
    fleet = launcher.Fleet([ServerSpec("a", "simulated", profile="any")], tmp_path)
    keeper = fleet.endpoints[0].pid
    while len(pids := _below(keeper)) < 4:  # watchdog, shell and two sleepers
        time.sleep(0.02)
    if not watched:
        os.kill(keeper, signal.SIGKILL)
        assert _gone(pids[:2]) and all(map(_alive, pids[2:]))
    try:
        fleet.stop()
        assert _gone(pids)
    finally:
        for pid in filter(_alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_no_process_outlives_the_one_that_started_it(tmp_path):
    """Also when that one is killed, or a watchdog."""
    (tmp_path / "fleet.toml").write_text(
        f'[[server]]\nname = "a"\nengine = "llama.cpp"\nmodel = "{TINY}"\ncontext = 64\n'
    )
    folder = tmp_path / "run"
    for victim in ("supervisor", "watchdog", "none"):
        (endpoint,) = launcher.up(tmp_path / "fleet.toml", folder)
        supervisor = launcher._supervisor(folder)
        pids = _below(supervisor)
        assert len(pids) == 3
        assert launcher.status(folder) == [(endpoint, "healthy")]
        for start in (launcher.up, lambda _, folder: launcher.Fleet([], folder)):
            with pytest.raises(ValueError, match="run there"):
                start(tmp_path / "fleet.toml", folder)
        if victim == "supervisor":
            os.kill(supervisor, signal.SIGKILL)
            assert _gone(pids)
            with pytest.raises(ValueError, match="no servers"):
                launcher.status(folder)
        elif victim == "watchdog":
            os.kill(endpoint.pid, signal.SIGKILL)
            assert _gone(pids[1:])
            assert launcher.status(folder) == [(endpoint, "ended")]
        assert launcher.down(folder) == (victim != "supervisor")
        assert _gone(pids)


def test_a_server_that_cannot_start_is_named(tmp_path):
    for change, what in (
        ({"model": "random:8"}, "random:LAYERSxWIDTH"),
        ({"model": "/nowhere.gguf"}, "no such file"),
        ({"model": __file__}, "status"),  # no GGUF
        ({"python": "/nowhere/python"}, "no program"),
        ({"engine": "simulated", "profile": "x"}, "profile: got 'x'"),
    ):
        spec = ServerSpec(**{"name": "a", "engine": "llama.cpp", "model": TINY, **change})
        with pytest.raises(ValueError, match=what):
            launcher.Fleet([spec], tmp_path)


def test_a_port_in_use_is_refused_and_a_silent_server_given_up(tmp_path, monkeypatch):
    monkeypatch.setitem(launcher.START_S, "llama.cpp", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}"):
            launcher.Fleet([ServerSpec("a", "llama.cpp", TINY, port=port)], tmp_path)
    script = tmp_path / "sleeper"
    script.write_text("#!/bin/sh\nexec sleep 100\n")
    script.chmod(0o755)
    spec = ServerSpec("a", "llama.cpp", TINY, python=str(script))
    with pytest.raises(ValueError, match="not healthy after 0.3 s"):
        launcher.Fleet([spec], tmp_path)
