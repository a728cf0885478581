"""What is asked of a simulated server, and the text and tokens of it.

A token is a piece of text: up to eight letters with the space before them, up to three digits, and
so on, about 1.3 tokens for an English word; its id is a checksum of the piece. Generated text is of
words that are one token each, so that a chat whose answer is sent back has the tokens it had.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import accumulate, islice
from typing import Any
from zlib import crc32

import numpy as np

from servegym.envs.workloads.lengths import length_quantiles, sample_lengths
from servegym.hardware_profiles.measure.openai_protocol import read_json as decode

_PIECE = re.compile(
    r" ?[^\W\d_]{1,8}| ?\d{1,3}|\s+(?!\S)|\s| ?[^\w\s]{1,3}|.", re.DOTALL | re.UNICODE
)
_WORDS = (
    "a about after all an and are as at be been but by can day did do each even far few find first "
    "for from get give go good great had has have he her here him his how if in into is it its "
    "just keep know large last less life like line little long look made make many may me mean "
    "more most much must my near new next night no not now of off old on one only or other our "
    "out over own part place point read right river room run same say sea see seem set she side "
    "small so some soon still stone such sun take tell than that the their them then there they "
    "thing think this time to too tree turn two under up us use very voice wait walk was water way "
    "we well went were what when where which while who why wide will wind with word work world "
    "year yet you young"
).split()
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SPARE_ELEMENTS = 1 << 16
"""Of a body, besides those of its prompt."""
DEFAULT_TOKENS = 16
"""``max_tokens`` of a completion that does not say, as OpenAI's."""


_RANGES = dict(temperature=(0, 2), top_p=(1e-9, 1), min_p=(0, 1), top_k=(-1, 1 << 31))
_RANGES |= dict(presence_penalty=(-2, 2), frequency_penalty=(-2, 2), repetition_penalty=(1e-9, 100))
_RANGES |= dict(n=(1, 1), best_of=(1, 1), priority=(0, 0))  # one answer; first come, first served
_LEAST = dict(max_completion_tokens=1, max_tokens=1, min_tokens=0, seed=-(1 << 62))
_TYPES = dict(stop=(str, list), stop_token_ids=(list,), cache_salt=(str,), user=(str,))
_TYPES |= dict(tools=(list,), tool_choice=(str, dict), response_format=(dict,))
_TYPES |= dict(logprobs=(bool, int), top_logprobs=(int,), logit_bias=(dict,), top_k=(int,))
_TYPES |= dict(stream=(bool,), stream_options=(dict,), ignore_eos=(bool,))
_USAGE = dict(include_usage=(bool,), continuous_usage_stats=(bool,))
_NAMES = {str: "a text that is not empty", list: "a list", dict: "an object"}
_NAMES |= {bool: "true or false", int: "a whole number"}
_PARTS = dict(text="text", input_text="text", output_text="text", refusal="refusal")
_NOT_SIMULATED = (
    *("echo", "suffix", "use_beam_search", "top_logprobs", "logprobs", "prompt_logprobs"),
    *("truncate_prompt_tokens", "prompt_embeds", "documents", "functions", "function_call"),
    *("chat_template", "continue_final_message", "return_token_ids", "include_stop_str_in_output"),
)
MOST_STOPS = 64
"""Texts that end an answer, each of which is looked for in it."""


class BadRequest(ValueError):
    """A request that cannot be served; ``param`` is the field, ``status`` that of the answer."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class Ask:
    """A request."""

    chat: bool  # whether it is a chat completion
    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    min_tokens: int
    ignore_eos: bool  # whether the answer has exactly ``max_tokens`` tokens
    stream: bool  # whether the answer comes token by token
    usage: bool  # whether a stream ends with the counts of tokens
    running: bool  # whether every event of such a stream has them
    stop: tuple[str, ...]  # texts that end the answer
    seed: int  # of the answer
    cache_salt: str  # requests share cached blocks only with those of the same salt


def tokens_of(text: str, most: int | None = None) -> list[int]:
    """Token ids of a text, below 2^32; of its first ``most`` tokens."""
    pieces = islice(_PIECE.finditer(text), most)
    return [crc32(piece[0].encode("utf-8", "surrogatepass")) for piece in pieces]


def _mark(name: str) -> int:
    return crc32(b"\0" + name.encode("utf-8", "surrogatepass"))


def _wrong(name: str, form: str, value: Any) -> BadRequest:
    return BadRequest(f"{name} must be {form}, got {value!r:.50}", name)


def _prompt(body: Mapping[str, Any], most: int) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokens_of(prompt, most)
    if isinstance(prompt, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 32 for i in prompt[:most]
    ):
        return prompt[:most]
    raise BadRequest("prompt must be one text, or one list of token ids", "prompt")


def _content(message: Mapping[str, Any], where: str) -> list[str]:
    """The texts of a message: one, parts, or none of an assistant's."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if content in (None, []) and message["role"] in ("assistant", "function"):
        return []
    texts = [
        part.get(_PARTS.get(str(part.get("type")), "")) if isinstance(part, dict) else part
        for part in (content if isinstance(content, list) else ())
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{where}.content must be a text, or parts of text", "messages")
    return texts  # pyright: ignore[reportReturnType]


def _function(tool: Any) -> Any:
    """The name in a tool or a choice of one; None if there is none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _tools(body: Mapping[str, Any], most: int) -> list[int]:
    """Tokens of the tools of a chat, which are a part of its prompt."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    names = [_function(tool) for tool in tools or ()]
    if not all(isinstance(name, str) for name in names):
        raise BadRequest("tools must be functions, each with a name", "tools")
    words = (None, "none") if tools is None else (None, "none", "auto", "required")
    if not (_function(choice) in names if isinstance(choice, dict) else choice in words):
        form = "none, or with tools auto, required or one of their functions"
        raise _wrong("tool_choice", form, choice)
    text = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools or ())
    return [_mark("tools"), *tokens_of(text, most), _mark("end")] if tools else []


def _messages(body: Mapping[str, Any], most: int) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", "messages")
    tokens: list[int] = []
    tools = _tools(body, most)
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise BadRequest(f"{where} must have a role of {', '.join(ROLES)}", "messages")
        if role not in ("system", "developer"):  # chat templates put tools before the talk
            tokens += tools
            tools = []
        tokens.append(_mark(role))
        for text in _content(message, where):
            tokens += tokens_of(text, max(0, most - len(tokens)))
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
                raise BadRequest(f"{where}.tool_calls must be a list of objects", "messages")
            text = json.dumps(calls, sort_keys=True)
            tokens += tokens_of(text, max(0, most - len(tokens)))
        tokens.append(_mark("end"))
        if len(tokens) >= most:
            break
    answers = body.get("add_generation_prompt") is not False
    return [*tokens, *tools, *([_mark("assistant")] if answers else [])]


def inflate(data: bytes, encoding: str, most: int) -> bytes:
    """Decode a body of one part, compressed by gzip or deflate; more than ``most`` bytes are none.

    Raises:
        BadRequest: If it has more, is damaged, or is encoded otherwise.
    """
    if encoding not in ("gzip", "deflate"):
        raise BadRequest("Content-Encoding must be gzip or deflate", status=415)
    raw = encoding == "deflate" and data[:1] and data[0] & 15 != 8  # without zlib's header
    stream = zlib.decompressobj(31 if encoding == "gzip" else -15 if raw else 15)
    try:
        body = stream.decompress(data, most + 1)
    except zlib.error:
        body = b""
    if len(body) > most:
        raise BadRequest("The body is larger than the server takes.", status=413)
    if not stream.eof or stream.unused_data:
        raise BadRequest("The body cannot be decoded.")
    return body


def read_json(data: bytes, context: int) -> Any:
    """The body of a request.

    Raises:
        BadRequest: If it is no JSON, is nested deeply, or is beyond the context by its elements: to
            read them would hold the other requests of the server.
    """
    try:
        return decode(data, 3 * context + SPARE_ELEMENTS)  # up to three are a token
    except OverflowError:
        raise BadRequest(f"This model's maximum context length is {context} tokens.") from None
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _check_types(body: Mapping[str, Any], table: Mapping[str, tuple[type, ...]]) -> None:
    for name, types in table.items():
        value = body.get(name)
        empty = value == "" and name != "user"
        if value is not None and (type(value) not in types or empty):
            raise _wrong(name, " or ".join(_NAMES[one] for one in types), value)


def _check_forms(body: Mapping[str, Any]) -> None:
    """Refuse what real servers refuse in fields that change no times, and what is not simulated."""
    for name, (low, high) in _RANGES.items():
        value = body.get(name)
        if value is not None and not (type(value) in (int, float) and low <= value <= high):
            raise _wrong(name, f"a number from {low} to {high}" if low < high else f"{low}", value)
    for name, low in _LEAST.items():
        value = body.get(name)
        if value is not None and (type(value) is not int or value < low):
            raise _wrong(name, f"a whole number of at least {low}", value)
    _check_types(body, _TYPES)
    _check_types(body.get("stream_options") or {}, _USAGE)
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        value = body.get(name) or ()
        value = [value] if isinstance(value, str) else value
        if not {*map(type, value)} <= {kind} or "" in value or len(value) > MOST_STOPS:
            raise _wrong(name, f"a list of up to {MOST_STOPS}, each {_NAMES[kind]}", value)
    form, forms = body.get("response_format"), "text, json_object, json_schema, structural_tag"
    if form is not None and form.get("type") not in forms.split(", "):
        raise _wrong("response_format", f"of a type of {forms}", form)
    for name in _NOT_SIMULATED:
        value = body.get(name)  # 0 asks for something, too
        if value not in (None, "", [], {}) and value is not False:
            raise BadRequest(f"{name} is not simulated; leave it out", name)


def read_request(body: Any, chat: bool, names: Collection[str], context: int) -> Ask:
    """The request of a decoded body; `BadRequest` if it cannot be served, with the field.

    The server's model has these names, and prompt and answer up to ``context`` tokens.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    model = body.get("model")
    if model is not None and model not in names:
        raise BadRequest(f"The model `{model!s:.100}` does not exist.", "model", 404)
    _check_forms(body)
    # One more than fits tells that it does not; to count the rest would hold other requests.
    prompt = (_messages if chat else _prompt)(body, context + 1)
    if not prompt:
        raise BadRequest("prompt must have at least one token", "prompt")
    room = context - len(prompt)
    newer = body.get("max_completion_tokens") is not None
    name = "max_completion_tokens" if newer else "max_tokens"
    most = body.get(name)
    if most is None:
        most = max(room, 1) if chat else min(DEFAULT_TOKENS, max(room, 1))
    if most > room:
        size = f"{'at least ' * (room < 0)}{len(prompt)}"
        raise BadRequest(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{size} tokens in the {'messages' if chat else 'prompt'} and {str(most)[:20]} in the "
            "completion. Please reduce the length of the input or of the completion.",
            name if room > 0 else ("messages" if chat else "prompt"),
        )
    least = body.get("min_tokens") or 0
    if least > most:
        raise BadRequest(f"min_tokens={least} must be at most {name}={most}", "min_tokens")
    stream, options = bool(body.get("stream")), body.get("stream_options") or {}
    if options and not stream:
        raise BadRequest("stream_options needs stream = true", "stream_options")
    stop, usage = body.get("stop") or (), bool(options.get("include_usage"))
    return Ask(
        chat=chat,
        prompt=tuple(prompt),
        max_tokens=most,
        min_tokens=least,
        ignore_eos=bool(body.get("ignore_eos")),
        stream=stream,
        usage=usage,
        running=usage and bool(options.get("continuous_usage_stats")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=body.get("seed") or 0,
        cache_salt=body.get("cache_salt") or "",
    )


@cache
def _lengths() -> np.ndarray:
    return length_quantiles("sharegpt", "output_tokens")


def answer(ask: Ask, seed: int = 0) -> tuple[list[str], list[int], str]:
    """What is answered to a request: the same to the same prompt.

    Unless the end of the text is ignored the answer's length is drawn from the answers of ShareGPT
    (quantiles published with Helix), by a hash of the prompt and the seeds. The first of
    its stop texts after ``min_tokens`` cuts it, as in vLLM.

    Returns:
        The text of every token, their ids, and why the answer ends: ``stop`` or ``length``.
    """
    data = np.asarray(ask.prompt, dtype=np.uint32).tobytes()
    seeds = f"{seed} {ask.seed}".encode()[:64]
    draws = np.random.default_rng(int.from_bytes(blake2b(data, digest_size=8, key=seeds).digest()))
    count, reason = ask.max_tokens, "length"
    if not ask.ignore_eos:
        drawn = max(int(sample_lengths(_lengths(), draws.random(1))[0]), ask.min_tokens, 1)
        if drawn < count:
            count, reason = drawn, "stop"
    text = [f" {_WORDS[k]}" for k in draws.integers(0, len(_WORDS), count)]
    if ask.chat:  # an answer begins without a space
        text[0] = text[0][1:]
    ids = [crc32(piece.encode()) for piece in text]
    ends, whole = [0, *accumulate(map(len, text))], "".join(text)
    least = ends[min(ask.min_tokens, count)]
    begins = [(whole.find(stop, max(0, least - len(stop) + 1)), len(stop)) for stop in ask.stop]
    found = min(((at + size, at) for at, size in begins if at >= 0), default=None)
    if found is not None:
        count, reason = bisect_left(ends, found[0]), "stop"
        text = [text[k][: max(0, found[1] - ends[k])] for k in range(count)]
    return text, ids[:count], reason
