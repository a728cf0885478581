"""Simulated servers: protocol, times, hits, failures, and clients that hang up."""

import asyncio
import gzip
import json
import re
import signal
import tracemalloc
import zlib

import numpy as np
import pytest

from servegym.envs.prefix_routing.live import LiveEngine
from servegym.experiments.live import launcher
from servegym.experiments.live.fleet_file import ServerSpec
from servegym.experiments.live.serve import command
from servegym.experiments.live.serve import server as server_module
from servegym.experiments.live.serve.faults import Fault, parse_fault
from servegym.experiments.live.serve.protocol import (
    BadRequest,
    answer,
    inflate,
    read_request,
    tokens_of,
)
from servegym.experiments.live.serve.server import SimulatedFleet, new_loop
from servegym.hardware_profiles import load
from servegym.hardware_profiles.host import engine_host

from .streaming import completion_body, new_session, stream

PROFILE = "h100-llama-3.1-8b"
STORY = "The river runs past the mill, and 1,024 people live there. " * 12


def spec(name="a", **more):
    given = {"model": "llama", "slots": 64, "context": 4096, "profile": PROFILE, **more}
    return ServerSpec(name, "simulated", **given)


def served(scenario, *specs, faults=(), speed=20.0, **more):
    """What ``scenario(session, *servers)`` gives, before servers on the loop of the command."""

    async def run():
        fleet = SimulatedFleet(specs or [spec()], faults, speed=speed, **more)
        async with fleet, new_session() as session:
            return await scenario(session, *fleet.servers)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(run())


def completions(server):
    return f"{server.url}/completions"


async def metrics_of(session, server):
    """Samples of ``/metrics`` by name, the label of the reason included."""
    url = server.url.removesuffix("/v1") + "/metrics"
    async with session.get(url) as response:
        text = await response.text()
    found = {}
    for row in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", row)
        assert match is not None or row.startswith(("# HELP ", "# TYPE ")), row
        if match is not None:
            reason = re.search(r'finished_reason="(\w+)"', match[2] or "")
            found[match[1] + (f":{reason[1]}" if reason else "")] = float(match[3])
    return found


async def post(session, url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(url, data=data) as response:
        return response.status, await response.json()


def test_the_openai_package_speaks_with_it():
    openai = pytest.importorskip("openai")

    async def scenario(_, server):
        async with openai.AsyncOpenAI(base_url=server.url, api_key="secret") as client:
            assert [model.id for model in (await client.models.list()).data] == ["llama"]
            ask = {"model": "llama", "max_tokens": 12, "extra_body": {"ignore_eos": True}}
            plain = await client.completions.create(prompt="Once", **ask)
            usage = {"include_usage": True}
            stream = await client.completions.create(
                prompt="Once", stream=True, stream_options=usage, **ask
            )
            chunks = [chunk async for chunk in stream]
            talk = [{"role": "user", "content": STORY}]
            chat = await client.chat.completions.create(messages=talk, **ask)
            talk += [{"role": "assistant", "content": chat.choices[0].message.content}]
            talk += [{"role": "user", "content": [{"type": "text", "text": "And then?"}]}]
            stream = await client.chat.completions.create(messages=talk, stream=True, **ask)
            deltas = [chunk async for chunk in stream]
            with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
                await client.completions.create(model="llama", prompt=STORY * 30)
            with pytest.raises(openai.NotFoundError, match="`gpt` does not exist"):
                await client.completions.create(model="gpt", prompt="Once")
            again = await client.chat.completions.create(messages=talk, **ask)
        return plain, chunks, chat, deltas, again

    plain, chunks, chat, deltas, again = served(scenario)
    assert plain.object == "text_completion" and plain.choices[0].finish_reason == "length"
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (1, 12)
    # The same prompt has the same answer, a token an event, and the usage comes last.
    assert "".join(c.choices[0].text for c in chunks[:-1]) == plain.choices[0].text
    assert len(chunks) == 13 and chunks[-1].usage == plain.usage and not chunks[-1].choices
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 11 + ["length"]
    assert chat.usage.prompt_tokens_details.cached_tokens == 0
    assert deltas[0].choices[0].delta.role == "assistant"
    assert len(deltas) == 13 and deltas[0].object == "chat.completion.chunk"
    # The second turn repeats prompt and answer of the first: all full blocks before its question.
    first = chat.usage.prompt_tokens + 12 - 1
    assert again.usage.prompt_tokens_details.cached_tokens >= first // 16 * 16
    assert again.choices[0].message.content == "".join(c.choices[0].delta.content for c in deltas)


def test_a_bad_request_is_refused_in_openais_form():
    async def scenario(session, server):
        found = []
        for body, *_ in REFUSED:
            chat = isinstance(body, dict) and "messages" in body
            page = "/chat/completions" if chat else "/completions"
            found.append(await post(session, server.url + page, body))
        return found

    answers = served(scenario, spec(context=100), body_bytes=110_000)
    for (_, status, word), (found, body) in zip(REFUSED, answers, strict=True):
        error = body["error"]
        assert found == status and error["code"] == status and word in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


REFUSED = [
    (b"{", 400, "JSON"),
    (b"[" * 50_000, 400, "nested"),
    ([], 400, "object"),
    ({}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [1, -1]}, 400, "prompt"),
    ({"prompt": ["a", "b"]}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": int("9" * 401)}, 400, "maximum context length"),
    ({"prompt": "a", "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (b'{"prompt": "a", "max_tokens": 1e400}', 400, "max_tokens"),
    (b'{"a": [' + b"," * 80_000 + b"]}", 400, "maximum context length"),
    ({"prompt": "a", "min_tokens": 99}, 400, "min_tokens"),
    ({"prompt": "a", "n": 2}, 400, "n must be 1"),
    ({"prompt": "a", "stream": "yes"}, 400, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    *(
        ({"prompt": "a", name: value}, 400, f"{name} must be")
        for name, values in {
            **dict.fromkeys(("temperature", "top_p", "min_p"), ("x", -1, 3, True, [], 10**401)),
            "priority": (1, "x"),
            **dict.fromkeys(("presence_penalty", "frequency_penalty"), ("x", -2.5, float("nan"))),
            "repetition_penalty": ("x", 0, float("inf")),
            "top_p": (0,),
            "top_k": ("5", -2, 1.5),
            "logprobs": ("x", 0.5),
            "top_logprobs": ("x",),
            "stop": (5, True, {}, ["a", 5], "", ["a", ""], ["a"] * 65),
            "stop_token_ids": (5, "a", ["a"], [True]),
            "cache_salt": (5, ""),
            "user": (5,),
            "logit_bias": (5, "x", []),
            "response_format": (5, "x", [], {}, {"type": "xml"}, {"type": []}),
            "tools": ({}, "x"),
            "tool_choice": (5, []),
            "n": ("1", True, 1.5),
        }.items()
        for value in values
    ),
    ({"prompt": "a", "model": "b"}, 404, "does not exist"),
    ({"prompt": "a" * 115_000}, 413, "larger"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "parts of text"),
    ({"messages": ["hi"]}, 400, "role"),
    ({"messages": [{"role": "boss", "content": "hi"}]}, 400, "role"),
    *(
        ({"messages": [{"role": "user", "content": content}]}, 400, "content")
        for content in (None, 0, False, {}, [], [5], [{"type": [], "text": "a"}])
    ),
    ({"messages": [{"role": "assistant", "content": 0}]}, 400, "content"),
]


def tool(name, *words):
    return {"type": "function", "function": {"name": name, "description": " ".join(words)}}


TALK = [{"role": "user", "content": STORY}]


NAMED_F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("param", "more"),
    [
        *(
            (name, {name: value})
            for name, value in {
                "truncate_prompt_tokens": 16,
                "logprobs": True,
                "prompt_logprobs": 0,
                "echo": True,
                "documents": [{"text": "a"}],
                "functions": [{"name": "f"}],
                "function_call": "auto",
                "chat_template": "{{ messages }}",
                "continue_final_message": True,
                "return_token_ids": True,
                "include_stop_str_in_output": True,
                "use_beam_search": True,
                "best_of": 2,
            }.items()
        ),
        ("logprobs", {"logprobs": 0}),
        *(("tool_choice", {"tool_choice": choice}) for choice in ("required", "auto", NAMED_F)),
        ("tool_choice", {"tool_choice": "some", "tools": [tool("f")]}),
        ("tool_choice", {"tool_choice": NAMED_F, "tools": [tool("g")]}),
        *(("tools", {"tools": [one]}) for one in (5, {}, {"function": {}}, {"function": "f"})),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_its_field(param, more):
    with pytest.raises(BadRequest) as caught:
        read_request({"messages": TALK, **more}, True, ["m"], 4096)
    assert caught.value.param == param and caught.value.status == 400


def test_a_history_with_any_answer_is_taken():
    def tokens(**answer):
        talk = [*TALK, {"role": "assistant", **answer}, {"role": "user", "content": "b"}]
        return len(read_request({"messages": talk}, True, ["m"], 4096).prompt)

    assert tokens() == tokens(content=None) == tokens(content="")
    assert tokens(content=[{"type": "refusal", "refusal": "no"}]) > tokens()
    assert tokens(content=None, tool_calls=[{"id": "a", "function": {"name": "f"}}]) > tokens()


def test_tools_stand_in_the_prompt_before_the_talk():
    a, b = tool("f", *["alpha"] * 100), tool("f", *["alpha"] * 50, *["beta"] * 50)

    async def scenario(session, server):
        found = []
        for tools in (None, [a], [a], [b]):
            body = {"messages": TALK, "max_tokens": 2, "tools": tools}
            _, told = await post(session, f"{server.url}/chat/completions", body)
            usage = told["usage"]
            found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        return found

    (plain, none), (long, first), (again, second), (other, shared) = served(scenario)
    assert long == again > plain + 100 and other > plain + 100
    assert none == first == 0 and second == (long - 1) // 16 * 16
    assert 32 <= shared <= 80  # up to the block before the tools differ
    system = [{"role": "system", "content": "Be brief."}]
    body = {"messages": system + TALK, "tools": [a]}
    start = tokens_of("Be brief.")
    assert list(read_request(body, True, ["m"], 4096).prompt[1 : 1 + len(start)]) == start


def test_a_text_that_stops_an_answer_cuts_it():
    def asked(**more):
        body = {"prompt": STORY, "max_tokens": 40, "ignore_eos": True, **more}
        return answer(read_request(body, False, ["m"], 4096))

    text, ids, _ = asked()
    whole = "".join(text)
    stop = text[7] + text[8][:2]  # in two tokens
    cut, cut_ids, reason = asked(stop=["not there", stop])
    assert "".join(cut) == whole[: whole.index(stop)] and reason == "stop"
    assert len(cut) == len(cut_ids) == 9 and cut_ids == ids[:9]
    assert asked(stop=text[7][:2], min_tokens=8)[0][:8] == text[:8]  # too early, it stops nothing
    assert asked(stop="not there") == (text, ids, "length")
    later, _, _ = asked(stop=" ", min_tokens=20)
    assert "".join(later) == "".join(text[:20]) and len(later) == 21


def test_a_stream_counts_its_tokens_where_that_is_asked_for():
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": TALK, "max_tokens": 5, "ignore_eos": True, "stream": True}

    async def scenario(session, server):
        url = f"{server.url}/chat/completions"
        async with session.post(url, json={**body, "stream_options": options}) as response:
            return (await response.text()).split("\n\n")

    events = [json.loads(line[6:]) for line in served(scenario)[:-2]]
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 4, 5, 5]
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


def test_requests_of_another_salt_share_no_block():
    async def scenario(session, server):
        found = []
        for salt in (None, "a", "a", "b", None, "a"):
            body = {"prompt": [*range(1000, 1160)], "max_tokens": 4, "cache_salt": salt}
            _, told = await post(session, completions(server), body)
            found.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    assert served(scenario) == [0, 0, 144, 0, 144, 144]


def test_tokens_survive_the_way_to_the_client_and_back():
    ask = read_request({"messages": [{"role": "user", "content": STORY}]}, True, ["m"], 4096)
    text, ids, _ = answer(ask)
    assert tokens_of("".join(text)) == ids
    prompt = "It was 1999; naïve Größe, 東京!\n\n\tend  of"
    plain = read_request(
        {"prompt": prompt, "max_tokens": 50, "ignore_eos": True}, False, ["m"], 999
    )
    text, ids, reason = answer(plain)
    assert tokens_of(prompt + "".join(text)) == [*plain.prompt, *ids]
    assert (len(text), reason) == (50, "length")


def test_requests_take_the_times_of_the_engine():
    """What a server does with requests is what the engine does with the same arrivals."""

    async def scenario(session, server):
        rng, taken, ended, asks = np.random.default_rng(1), [], [], []
        submit, end = server.engine.submit, server._end

        def spy(now, prompt, output, salt):
            taken.append((now, prompt, output))
            return submit(now, prompt, output, salt)

        def spy_end(one, reason):
            end(one, reason)
            ended.append(one)

        server.engine.submit, server._end = spy, spy_end
        for _ in range(40):
            words = STORY[: int(rng.integers(20, 600))]
            body = completion_body("llama", words, int(rng.integers(2, 40)))
            asks.append(asyncio.create_task(stream(session, completions(server), body)))
            await asyncio.sleep(float(rng.exponential(0.004)))
        replies = await asyncio.gather(*asks)
        return replies, taken, ended, await metrics_of(session, server)

    replies, taken, kept, counted = served(scenario, spec(slots=8), speed=10.0)
    assert not [reply.error for reply in replies if reply.error]
    engine = LiveEngine(load(PROFILE), max_num_seqs=8, max_num_batched_tokens=2048)
    times, slots, admitted = {}, {}, {}

    def work(until):
        for time_s, slot, last in engine.work(until):
            times.setdefault(slots[slot], []).append(time_s)
            if last:
                admitted[slots[slot]] = float(engine.request(slot)["admitted"])
                engine.release(slot)

    for now, prompt, output in taken:
        work(now)
        slots[engine.submit(now, prompt, output)] = now
    work(1e9)
    for one in kept:
        assert len(times[one.arrived_s]) == one.count == one.output
        assert times[one.arrived_s][0] == one.first_s
        assert times[one.arrived_s][-1] == one.last_s
    assert sum(one.hit for one in kept) > 1000
    assert max(reply.tokens for reply in replies) == max(one.count for one in kept)
    assert counted["vllm:generation_tokens_total"] == sum(one.count for one in kept)
    assert counted["vllm:prompt_tokens_total"] == sum(one.prompt for one in kept)
    assert counted["vllm:prefix_cache_hits_total"] == sum(one.hit for one in kept)
    assert counted["vllm:request_success_total:length"] == 40
    assert counted["vllm:time_to_first_token_seconds_count"] == 40
    # In seconds of the wall, of which there are a tenth.
    sums = dict.fromkeys(
        ("e2e_request_latency", "time_to_first_token", "request_queue_time", "inter_token_latency"),
        0.0,
    )
    for one in kept:
        sums["e2e_request_latency"] += one.last_s - one.arrived_s
        sums["time_to_first_token"] += one.first_s - one.arrived_s
        sums["request_queue_time"] += admitted[one.arrived_s] - one.arrived_s
        sums["inter_token_latency"] += one.last_s - one.first_s
    for name, total in sums.items():
        assert counted[f"vllm:{name}_seconds_sum"] == pytest.approx(total / 10.0), name
    assert sums["request_queue_time"] > 0.0  # some have waited
    assert counted["vllm:num_requests_running"] == counted["vllm:kv_cache_usage_perc"] == 0.0


def test_a_client_that_hangs_up_frees_its_place():
    async def scenario(session, server):
        url = completions(server)
        endless = {"prompt": STORY, "max_tokens": 3000, "ignore_eos": True}
        asks = [
            asyncio.create_task(post(session, url, endless)),
            asyncio.create_task(stream(session, url, {**endless, "stream": True})),
        ]
        while server.engine.running + server.engine.waiting < 2:
            await asyncio.sleep(0.01)
        for ask in asks:
            ask.cancel()
        while server.engine.running + server.engine.waiting:
            await asyncio.sleep(0.01)
        after = await stream(session, url, completion_body("llama", STORY, 3))
        return after, await metrics_of(session, server), server.engine.kv_usage

    after, counted, usage = served(scenario, spec(slots=1), speed=1.0)
    assert after.error == "" and after.tokens == 3
    assert counted["vllm:request_success_total:abort"] == 2
    assert counted["vllm:request_success_total:length"] == 1 and usage == 0.0


@pytest.mark.parametrize(("kind", "status"), [("error", 503), ("cut", 200)])
def test_errors_and_cuts_have_their_rates(kind, status):
    fault = Fault(kind, rate=0.5, status=503)

    async def scenario(session, server):
        body = completion_body("llama", "Once", 20)
        return [await stream(session, completions(server), body) for _ in range(30)]

    failed = [reply for reply in served(scenario, faults=[fault]) if reply.error]
    assert 5 < len(failed) < 25 and {reply.status for reply in failed} == {status}
    assert any(0 < reply.tokens < 20 for reply in failed) == (kind == "cut")


def test_a_frozen_server_goes_on_where_it_stood():
    async def scenario(session, server):
        body = completion_body("llama", "Once", 5)
        return await stream(session, completions(server), body), server.now

    reply, now = served(scenario, faults=[Fault("freeze", start_s=0.0, end_s=6.0)])
    assert reply.error == "" and reply.tokens == 5 and now > 6.0


async def begun(session, server, tokens):
    """A stream of which some tokens have come."""
    some, body = asyncio.Event(), completion_body("llama", STORY, tokens)
    task = asyncio.create_task(stream(session, completions(server), body, on_token=some.set))
    await some.wait()
    return task


def test_a_crash_breaks_connections_and_loses_the_cache():
    async def scenario(session, server):
        task = await begun(session, server, 3900)
        await server.fail(Fault("crash", start_s=server.now))
        reply = await task
        refused = not await asyncio.to_thread(launcher.healthy, server.url)
        await server.fail(Fault("refuse", start_s=0.0, end_s=server.now + 0.01))  # then it listens
        again = await stream(session, completions(server), completion_body("llama", STORY, 2))
        return reply, refused, again, await metrics_of(session, server)

    reply, refused, again, counted = served(scenario, speed=1.0)
    assert reply.error and 0 < reply.tokens < 3900 and refused
    assert again.error == "" and again.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert counted["vllm:request_success_total:error"] == 1


def test_a_flood_is_refused_and_not_queued_without_end():
    async def scenario(session, server):
        server.engine = LiveEngine(load(PROFILE), max_num_seqs=2, max_requests=3)
        body = {"prompt": STORY, "max_tokens": 30, "ignore_eos": True}
        return await asyncio.gather(*(post(session, completions(server), body) for _ in range(9)))

    statuses = sorted(status for status, _ in served(scenario, spec(slots=2), speed=1.0))
    assert statuses[:3] == [200] * 3 and statuses[-1] == 503


def test_a_failure_is_read_or_refused():
    for text, word in (
        ("explode", "explode"),
        ("error,rate=2", "rate"),
        ("error,rte=.1", "rte"),
        ("error,status=200", "status"),
        ("crash,rate=.5", "rate"),
        ("crash,from=9,to=3", "from"),
        ("crash,server=z", "'z'"),
    ):
        with pytest.raises(ValueError, match=word):
            parse_fault(text, ["a", "b"])
    assert parse_fault("error,server=b,from=1,to=2,rate=.5,status=429", ["a", "b"]) == Fault(
        "error", "b", 1.0, 2.0, 0.5, 429
    )


def test_a_bad_command_is_refused_before_anything_listens(monkeypatch):
    model = ["--card", "h100", "--model", "llama-3.1-8b"]
    for words, word in (
        ([], "FLEET.toml"),
        (["--card", "h1000", "--model", "llama-3.1-8b"], "h1000"),
        ([*model, "--replicas", "0"], "replicas"),
        ([*model, "--context", "9999999"], "context"),
        ([*model, "--batched-tokens", "9"], "batched_tokens"),
    ):
        monkeypatch.setattr(SimulatedFleet, "__aenter__", None)  # nothing is started
        with pytest.raises(ValueError, match=word):
            command.main(words)


def test_the_command_serves_until_a_signal(tmp_path, capsys):
    words = ["--profile", PROFILE, "--model", "llama"]
    options = command._parser().parse_args(words)

    async def run():
        task = asyncio.create_task(command._serve(options, command._specs(options, tmp_path)))
        shown = ""
        while not shown:
            await asyncio.sleep(0.01)
            shown = capsys.readouterr().out
        name, model, url = shown.split()
        assert (name, model) == ("server-0", "llama")
        assert await asyncio.to_thread(launcher.healthy, url)
        signal.raise_signal(signal.SIGTERM)
        await task

    asyncio.run(run())


def test_a_bad_fleet_is_refused_by_server_and_field(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text('[[server]]\nname = "a"\nengine = "llama.cpp"\nmodel = "random:1x64"\n')
    with pytest.raises(ValueError, match="server 'a': profile is missing"):
        command.main([str(path)])
    simulated = f'[[server]]\nname = "a"\nengine = "simulated"\nprofile = "{PROFILE}"\n'
    path.write_text(simulated + "options = {kv_token = 4}\n")
    with pytest.raises(ValueError, match="server 'a': .*'kv_token'.*'kv_tokens'"):
        command.main([str(path)])
    path.write_text(simulated + "options = {async_scheduling = 1}\n")
    with pytest.raises(ValueError, match="server 'a': async_scheduling=1"):
        command.main([str(path)])


def test_a_server_has_the_cache_and_the_names_of_its_description():
    shared = {"options": {"kv_tokens": 8192, "block_size": 32}, "context": 4096}

    async def scenario(session, server):
        # By the server's name, as routers of a fleet ask; its model's works as well.
        body = completion_body(server.spec.name, STORY, 3)
        reply = await stream(session, completions(server), body)
        async with session.get(server.url.removesuffix("v1") + "metrics") as response:
            return reply, await response.text()

    reply, metrics = served(scenario, spec("a", **shared))
    assert reply.error == "" and reply.tokens == 3
    assert 'block_size="32",num_gpu_blocks="256"' in metrics
    assert 'model_name="llama"' in metrics


def deflate(data, bits):
    stream = zlib.compressobj(wbits=bits)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(("encoding", "bits"), [("gzip", 31), ("deflate", 15), ("deflate", -15)])
def test_no_more_of_a_body_is_inflated_than_it_may_have(encoding, bits):
    good, bomb = deflate(b"a" * 1000, bits), deflate(bytes(64 << 20), bits)
    assert inflate(good, encoding, 1000) == b"a" * 1000
    cases = (good, 999, 413), (bomb, 1000, 413), (good[:-1], 1000, 400), (b"", 1000, 400)
    for data, most, status in (*cases, (good + good, 1000, 400), (b"\x08" + good, 1000, 400)):
        tracemalloc.start()
        with pytest.raises(BadRequest) as caught:
            inflate(data, encoding, most)
        assert caught.value.status == status
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


SECRET = b"SECRET"
GZIP = gzip.compress(b'{"prompt": "a", "max_tokens": 2}')


def request(body, *headers, line=b"POST /v1/completions"):
    lines = [line + b" HTTP/1.1", b"Host: x", b"Authorization: Bearer SECRET", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


WIRE = {
    "long header": (request(b"", b"X-Key: " + 1400 * SECRET), 431),
    "long line": (request(b"", line=b"GET /" + 1400 * SECRET), 431),
    "many headers": (request(b"", *(b"X-%d: SECRET" % k for k in range(300))), 400),
    "no header": (request(b"", b"Authorization Bearer SECRET"), 400),
    "no chunk": (request(b"", b"Transfer-Encoding: chunked") + b"SECRET\r\n", 400),
    "no page": (request(b"", line=b"GET /SECRET"), 404),
    "no such method": (request(b"", line=b"GET /v1/completions"), 405),
    "expectation": (request(b"{}", b"Expect: SECRET"), 417),
    "gzip": (request(GZIP, b"Content-Encoding: gzip"), 200),
    "brotli": (request(b"x", b"Content-Encoding: br"), 415),
    "no gzip": (request(SECRET + GZIP, b"Content-Encoding: gzip"), 400),
    "corrupt deflate": (request(SECRET, b"Content-Encoding: deflate"), 400),
    "long gzip": (request(gzip.compress(bytes(9 << 20)), b"Content-Encoding: gzip"), 413),
}


def test_every_answer_has_openais_form_and_nothing_of_the_request(caplog):
    async def answer(port, data):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
        body = await reader.readexactly(length)
        writer.close()
        return head, body

    async def run():
        fleet = SimulatedFleet([spec()], speed=20.0)
        async with fleet:
            found = {name: await answer(fleet.servers[0].port, d) for name, (d, _) in WIRE.items()}
        return found

    for name, (head, body) in asyncio.run(run()).items():
        status = WIRE[name][1]
        assert int(head.split()[1]) == status, name
        assert b"content-type: application/json" in head.lower() and SECRET not in head + body
        if status != 200:
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert "SECRET" not in caplog.text


def test_headers_that_do_not_come_end_the_connection(monkeypatch):
    monkeypatch.setattr(server_module, "SWEEP_S", 0.01)

    async def scenario(session, server):
        task = await begun(session, server, 300)  # a request that is under way stays
        monkeypatch.setattr(server_module, "HEADERS_S", 0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
        assert await reader.read() == b""
        writer.close()
        return await task

    assert served(scenario, speed=1.0).error == ""


def test_nothing_of_a_request_is_logged(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("SECRET")

    async def scenario(session, server):
        await post(session, completions(server), b'{"SECRET"')
        monkeypatch.setattr(server_module, "read_request", fails)
        async with session.post(completions(server), data=b"{}") as response:
            return response.status, await response.text()

    status, text = served(scenario)
    assert status == 500 and "SECRET" not in text
    assert "SECRET" not in caplog.text
    assert "a request failed: RuntimeError at" in caplog.text


@pytest.mark.parametrize("named", [["--card", "h100"], ["--profile", "h100-llama-3.1-8b"]])
def test_servers_of_a_told_engine(named, tmp_path):
    words = [*named, "--model", "llama-3.1-8b", "--engine", "vllm@0.11"]
    (spec,) = command._specs(command._parser().parse_args(words), tmp_path)
    assert load(spec.profile).host == engine_host("vLLM", "0.11")
