"""What the plug-ins share: each request has one end, failures are avoided, nothing is held."""

from __future__ import annotations

import functools
import importlib
import sys
import time
import tracemalloc
import types
from dataclasses import replace

import numpy as np
import pytest

from servegym.baselines.registry import from_callable
from servegym.experiments.live.fleet_file import ServerSpec
from servegym.experiments.live.gateway import GatewayRouter
from servegym.experiments.live.gateways import command
from servegym.experiments.live.gateways import gate as gate_module
from servegym.experiments.live.gateways.gate import (
    Answer,
    Gate,
    fleet_arguments,
    from_metadata,
    prompt_tokens,
)

TOKEN = b'{"choices": [{"delta": {"content": "w"}}]}'
CALL = {"type": "function", "function": {"name": "four", "arguments": "eight by"}}
CHAT = {"messages": [{"role": "user", "content": "twelve bytes"}]}


def first(observation, mask):
    """The first expert that is allowed."""
    return 1 + mask[:, 1:].argmax(axis=1)


def gate_with(act=first, now=None, **more):
    clock = time.monotonic if now is None else lambda: now[0]
    policy = act if isinstance(act, str) else from_callable(act, "mine")
    return Gate(GatewayRouter({}, policy, budget_s=None, clock=clock), **more)


def test_prompt_tokens_of_a_body():
    for body, tokens in (
        (CHAT, 3),
        ({"messages": [{"content": [{"type": "text", "text": "eight by"}]}]}, 2),
        ({"prompt": ["eight by", "four"]}, 3),
        ({"prompt": "ß" * 40}, 20),
        ({"input": [5, 6, 7]}, 3),
        ({"messages": [{"content": None, "tool_calls": [CALL]}]}, 3),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x" * 99}}]}]}, 1),
        ({"messages": [{"content": None}]}, 1),
        ({}, 1),
    ):
        assert prompt_tokens(body) == tokens


def test_tools_are_part_of_a_prompt():
    text = "river stone market winter " * 83
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    function = {"name": "f", "description": text, "parameters": schema}
    body = {**CHAT, "tools": [{"type": "function", "function": function}]}
    assert prompt_tokens(body) == pytest.approx(len(text) / 4, rel=0.2)
    assert prompt_tokens({**CHAT, "functions": [function]}) > len(text) / 4


def only(k):
    return [one == k for one in range(6)]


def end_all(gate, how, count, expert=None):
    """So many requests, one after the other, that end in this way or with this status."""
    for _ in range(count):
        ticket = gate.enter(CHAT, allowed=None if expert is None else only(expert))
        ticket.refused(how) if isinstance(how, int) else ticket.end(how)


def chosen(gate):
    """The expert of a request that is answered at once."""
    ticket = gate.enter(CHAT)
    ticket.end("finished")
    return ticket.expert


def test_an_expert_that_fails_is_left_alone_twice_as_long_each_time():
    now = [0.0]
    gate = gate_with(now=now)
    end_all(gate, "failed", 3)
    for waits in (1.0, 2.0, 4.0, 4.0, 4.0):
        probe = gate.enter(CHAT)
        assert probe.expert == 0
        assert waits == 1.0 or chosen(gate) == 1  # one at a time
        probe.end("failed")
        now[0] += waits - 0.1
        assert chosen(gate) == 1
        now[0] += 0.2
    gate.enter(CHAT).end("finished")
    assert gate.enter(CHAT).expert == 0
    now[0] += 10.1
    end_all(gate, "finished", 1)
    end_all(gate, "failed", 4)
    assert gate.enter(CHAT).expert == 1
    now[0] += 1.1
    assert gate.enter(CHAT).expert == 0
    assert gate.status()["experts"][0]["failed"] == 10


@pytest.mark.parametrize("how", [401, 429, "empty", "left", "broken", "token"])
def test_only_a_regular_answer_closes_a_breaker(how):
    now = [0.0]
    gate = gate_with(now=now)
    end_all(gate, "failed", 4)
    assert gate.breakers.opened[0]
    now[0] += 1.1
    probe = gate.enter(CHAT)
    assert probe.expert == 0
    if how == "token":
        probe.token()
    else:
        probe.refused(how) if isinstance(how, int) else probe.end(how)
    assert gate.breakers.opened[0] and gate.enter(CHAT).expert == 1
    now[0] += 2.1
    probe = gate.enter(CHAT)
    probe.token()
    probe.end("finished")
    assert not gate.breakers.opened[0] and gate.enter(CHAT).expert == 0


def test_a_server_may_be_slower_than_the_others_but_not_silent():
    """Others answer at once, this one after 5 s, and after a pause not at all."""
    now = [0.0]
    gate = gate_with(now=now)

    def others_answer(seconds):
        for _ in range(round(20 * seconds)):
            now[0] += 0.05
            end_all(gate, "finished", 1, 1)

    others_answer(1.0)
    for silent in (False, True):
        tickets = [gate.enter(CHAT, allowed=only(0)) for _ in range(9)]
        others_answer(4.0)
        assert gate.breakers.opened[0] != silent  # at first nobody knows that it is slow
        if silent:
            others_answer(6.5)
            assert gate.breakers.opened[0]
            break
        now[0] += 1.0
        for ticket in (*tickets, gate.enter(CHAT, allowed=only(0))):
            ticket.end("finished")
        assert not gate.breakers.opened[0]


def test_a_client_that_leaves_is_no_failure_and_the_last_expert_is_tried_though_it_failed():
    gate = gate_with()
    gate.enter(CHAT).end("left")
    assert gate.status()["left"] == 1 and gate.status()["server_failures"] == 0
    assert gate.enter(CHAT).expert == 0
    end_all(gate, "failed", 4)
    assert gate.enter(CHAT).expert == 1
    assert gate.enter(CHAT, allowed=only(0)).expert == 0
    assert gate.enter(CHAT, allowed=[False] * 6).expert == -1


def test_silent_requests_are_given_up_and_others_are_not(monkeypatch):
    monkeypatch.setattr(gate_module, "LEASE_S", 10.0)
    now = [0.0]
    gate = gate_with(now=now)
    tickets = [gate.enter(CHAT) for _ in range(20)]
    for _ in range(12):
        now[0] += 1.0
        tickets[7].token()
        gate.enter(CHAT).end("finished")
    for _ in range(20):
        gate.enter(CHAT).end("finished")
    assert gate.status()["given_up"] == 19
    assert gate.router.load().sum() == 1
    tickets[7].end("finished")
    assert gate.status()["in_flight"] == 0


def test_predictions_are_used_and_bad_ones_counted():
    seen = []

    def note(observation, mask):
        seen.append(observation["request"][0].copy())
        return first(observation, mask)

    given = {"prompt_tokens": 30, "scores": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}
    gate = gate_with(note, predict=from_metadata)
    gate.enter({**CHAT, "max_tokens": 7, "metadata": {"servegym": given}})
    assert seen[-1][:, 0].tolist() == [30] * 6
    np.testing.assert_allclose(seen[-1][:, 1], given["scores"])
    assert seen[-1][:, 2].tolist() == [7] * 6
    for wrong in ({"scores": [0.5]}, {"scores": "high"}, {"prompt_tokens": float("nan")}):
        assert gate.enter({**CHAT, "metadata": {"servegym": wrong}}).expert == 0
    gate.enter({**CHAT, "metadata": {"servegym": [1]}})
    gate.enter({**CHAT, "metadata": "text"})
    assert gate.status()["prediction_errors"] == 3
    assert "prediction" in gate.status()["last_error"]


def test_no_error_of_a_prediction_ends_the_gateway(caplog):
    def fails(body):
        raise SystemExit("why")

    gate = gate_with(predict=fails)
    assert gate.enter(CHAT).expert == 0
    assert gate.status()["prediction_errors"] == 1
    assert gate.status()["last_error"] == "prediction: SystemExit: why"
    assert caplog.text.count("SystemExit: why") == 1


@pytest.mark.parametrize(
    "more",
    [
        *({"max_tokens": most, "ignore_eos": True} for most in (10**401, 1e400, "9", -1, [])),
        {"metadata": {"servegym": {"prompt_tokens": 10**401}}},
        {"metadata": {"servegym": {"scores": [1e400] * 6}}},
        {"messages": functools.reduce(lambda inner, _: [inner], range(100_000), [])},
        {"messages": functools.reduce(lambda inner, _: {"content": inner}, range(500), "x")},
        {"prompt": 7, "messages": None},
    ],
)
def test_numbers_and_nesting_of_a_body_are_bounded(more):
    gate = gate_with(predict=from_metadata)
    assert gate.enter({**CHAT, **more}).expert == 0
    ticket = gate.enter(CHAT)
    ticket.token(10**401)
    assert gate.enter(CHAT).expert == 0
    assert gate.router.counters.fallbacks == 0


def answered(data, **more):
    """What becomes of 24 requests that get this stream, one after the other."""
    gate = gate_with(**more)
    for _ in range(24):
        answer = Answer(gate.enter(CHAT, allowed=only(0)), "text/event-stream")
        answer.feed(data)
        answer.end()
    return gate


EVENT = 'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    ("event", "client"),
    [
        ('{"error": {"message": "long", "type": "BadRequestError", "code": 400}}', True),
        ('{"object": "error", "message": "long", "code": 404}', True),
        ('{"error": {"message": "long", "code": "context_length_exceeded"}}', True),
        ('{"error": {"type": "invalid_request_error", "code": null}}', True),
        ('{"detail": "Not authenticated", "status": 401}', True),
        ('{"error": "{\\"type\\": \\"invalid_request_error\\"}"}', True),
        ('{"error": {"message": "no", "code": 503}}', False),
        ('{"message": "Internal Server Error"}', False),
        ('{"choices": [{"delta": {}, "finish_reason": "error"}]}', False),
    ],
)
@pytest.mark.parametrize("begun", ["", 3 * EVENT])
def test_an_error_in_an_answer_is_whose_its_code_says(event, client, begun):
    gate = answered(f"{begun}data: {event}\n\ndata: [DONE]\n\n".encode())
    status = gate.status()
    assert status["server_failures"] == (0 if client else 24)
    assert status["left"] == (24 if client else 0)
    assert gate.router.counters.failed == 24
    assert gate.breakers.answering(gate.router.clock()) and gate.breakers.opened[0] != client


def test_a_count_of_tokens_below_what_was_seen_lowers_nothing():
    usage = ', "usage": {"completion_tokens": %d}}\n\n'
    gate, seen = gate_with(), []
    ticket = gate.enter(CHAT)
    answer = Answer(ticket, "text/event-stream")
    for count in (0, 0, 0, 7, 0):
        answer.feed((EVENT.rstrip()[:-1] + usage % count).encode())
        seen.append(ticket.tokens)
    answer.feed(b'data: {"choices": []' + (usage % 3).encode())
    assert seen == [1, 2, 3, 7, 8] and ticket.tokens == 8


@pytest.mark.filterwarnings("ignore:profile")
def test_a_server_may_run_many_requests_at_a_time():
    one = ServerSpec("a", "vllm", slots=100, profile="h100-llama-3.1-8b")
    made = fleet_arguments([one, replace(one, slots=8)])
    gate = Gate(GatewayRouter(made, "least_outstanding", budget_s=None))
    assert all(gate.enter(CHAT).expert >= 0 for _ in range(200))
    most = fleet_arguments([replace(one, slots=1024)])
    assert most["running_capacity"] == 1024
    with pytest.raises(ValueError, match="'a' has slots=4096; allowed: 1024"):
        fleet_arguments([replace(one, slots=4096)])


def test_a_litellm_of_another_form_is_refused_by_its_version(monkeypatch):
    module = "servegym.experiments.live.gateways.litellm_strategy"
    names = ("litellm", "litellm.integrations", "litellm.integrations.custom_logger")
    for name in (*names, "litellm.types", "litellm.types.router"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[names[0]], "Router", object, raising=False)
    monkeypatch.setattr(sys.modules[names[2]], "CustomLogger", object, raising=False)
    router = sys.modules["litellm.types.router"]
    monkeypatch.setattr(router, "CustomRoutingStrategyBase", object, raising=False)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"no Router._acompletion; .*litellm\[proxy\]<1.110"):
        importlib.import_module(module)


def fleet(tmp_path, profile="paper-linear-01", port=9000):
    text = '[[server]]\nname = "e{}"\nengine = "vllm"\nprofile = "{}"\nport = {}\n'
    path = tmp_path / "fleet.toml"
    path.write_text("".join(text.format(k, profile, port and port + k) for k in range(2)))
    return str(path)


def test_the_files_of_a_litellm_proxy(tmp_path, capsys):
    pytest.importorskip("yaml")
    import yaml

    folder = tmp_path / "proxy"
    words = ["litellm", fleet(tmp_path), "--policy", "priced_greedy"]
    assert command.main([*words, "--folder", str(folder), "--set", "waiting_capacity=16"]) == 0
    assert "--host 127.0.0.1" in capsys.readouterr().out
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert [one["model_info"]["id"] for one in config["model_list"]] == ["e0", "e1"]
    assert config["model_list"][1]["litellm_params"]["api_base"] == "http://127.0.0.1:9001/v1"
    assert config["litellm_settings"]["callbacks"] == "servegym_router.strategy"
    code = (folder / "servegym_router.py").read_text()
    compile(code, "servegym_router.py", "exec")
    assert "'waiting_capacity': 16" in code and "predict=None" in code


def test_what_no_gateway_can_serve_is_refused_before_files_are_written(tmp_path):
    folder = tmp_path / "proxy"
    words = ["litellm", fleet(tmp_path), "--folder", str(folder)]
    for more, message in ((["--policy", "nothing"], "nothing"), (["--set", "rates=3"], "rates")):
        with pytest.raises(ValueError, match=message):
            command.main([*words, *more])
    assert not folder.exists()
    with pytest.raises(ValueError, match="6 experts"):
        gate_with(names=["a"])
    with pytest.raises(ValueError, match="'e0' has no profile"):
        command.main(["litellm", fleet(tmp_path, profile="")])
    with pytest.raises(ValueError, match="'e0' has no port"):
        command.main(["litellm", fleet(tmp_path, port=0)])


def test_an_answer_of_one_long_line_is_read_once_and_not_kept():
    gate = gate_with()
    ticket = gate.enter(CHAT)
    answer = Answer(ticket, "text/event-stream")
    tracemalloc.start()
    for _ in range(900):
        answer.feed(b"x" * 10_000)
    assert tracemalloc.get_traced_memory()[1] < 4 * gate_module.MAX_ANSWER_BYTES
    tracemalloc.stop()
    answer.feed(b"\ndata: " + TOKEN[:9])
    answer.feed(TOKEN[9:] + b"\r\n\r\ndata: [DONE]\r\n\r\n")
    assert (ticket.tokens, answer.done) == (1, True)
    answer.end()
    assert gate.router.counters.finished == 1


@pytest.mark.parametrize(
    ("event", "client"),
    [
        ('event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"}}', False),
        ('event: error\ndata: {"error": {"type": "invalid_request_error"}}', True),
        ('data: {"type": "error", "error": {"type": "api_error"}}', False),
        ('data: {"type": "error", "code": "rate_limit_exceeded", "message": "later"}', True),
        ('data: {"type": "response.failed", "response": {"error": {"code": "x"}}}', False),
        ('data: {"type": "message_start", "message": {"usage": {"output_tokens": 0}}}', None),
        ('data: {"type": "response.created", "response": {"error": null}}', None),
    ],
)
def test_errors_in_streams_of_other_protocols(event, client):
    gate = gate_with()
    for _ in range(24):
        ticket = gate.enter(CHAT, completion=False)
        answer = Answer(ticket, "text/event-stream")
        answer.feed(event.encode() + b"\n\n")
        assert answer.done == (client is not None)
        answer.end()
    assert gate.status()["server_failures"] == (24 if client is False else 0)
    assert gate.router.counters.failed == (0 if client is None else 24)
