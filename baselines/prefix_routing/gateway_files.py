"""The files of gateways, read into settings and written from them: YAML, flags or variables.

What a file says of anything but the choice of a replica stays in it, but for comments in YAML. A
plugin, policy or parameter that would change the choice and is not in `plugins` is refused by name.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from servegym._checks import choose
from servegym._files import MalformedFileError
from servegym.baselines.prefix_routing.gateway_yaml import (
    changes_dynamo,
    load_yaml,
    number,
    plain,
    put_instance,
    put_profile,
    read_instance,
    read_profile,
    refuse,
)
from servegym.baselines.prefix_routing.plugins import AIBRIX, GATEWAYS, Setting

SUFFIXES = (".yaml", ".yml", ".flags", ".env", ".sh", ".txt")
DEFAULTS = {
    "llm-d": """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
""",
    "sglang": "--policy cache_aware\n",
    "dynamo": """\
worker_selection:
  aggregated: tuned
  instances:
  - name: tuned
    type: dynamo-default-cost-fn
    parameters: {}
""",
    "aibrix": "ROUTING_ALGORITHM=prefix-cache\n",
}
"""What each gateway does without a file, as one: llm-d's default.go @0b59e4e."""

_DYNAMO_FLAGS = {
    "--router-kv-overlap-score-credit": "overlap_score_credit",
    "--router-kv-overlap-score-credit-decay": "overlap_score_credit_decay",
    "--router-prefill-load-scale": "prefill_load_scale",
    "--router-decode-active-request-weight": "decode_active_request_weight",
    "--router-temperature": "router_temperature",
}
_FLAGS = {
    "sglang": {f"--{name}": name for name in GATEWAYS["sglang"].knobs},
    "dynamo": _DYNAMO_FLAGS
    | {f"DYN_{f[2:]}".replace("-", "_").upper(): name for f, name in _DYNAMO_FLAGS.items()},
    "aibrix": {name: name for name in GATEWAYS["aibrix"].knobs},
}
_RULES = {
    "sglang": {"--policy": "cache_aware"},
    "dynamo": {"--router-mode": "kv", "DYN_ROUTER_MODE": "kv"},
    "aibrix": {"ROUTING_ALGORITHM": "prefix-cache", "AIBRIX_ROUTING_ALGORITHM": "prefix-cache"},
}
"""Words that name the rule, and the one that is here."""
_AIBRIX_OTHERS = ("AIBRIX_LOAD_BALANCE_", "AIBRIX_ROUTING_AUTO_BLEND_")


class GatewayFile(NamedTuple):
    """A gateway's file.

    Attributes:
        gateway: One of `plugins.GATEWAYS`.
        setting: What it says of the choice.
        content: The parsed YAML, or the text of flags and variables.
    """

    gateway: str
    setting: Setting
    content: Any

    @property
    def suffix(self) -> str:
        """The ending of its kind of file."""
        return ".flags" if isinstance(self.content, str) else ".yaml"

    def text(self, setting: Mapping[str, float]) -> str:
        """The file with another setting.

        Raises:
            ValueError: As `plugins.Gateway.check`.
        """
        setting = GATEWAYS[self.gateway].check(setting)
        if isinstance(self.content, str):
            return _put_words(self.gateway, self.content, setting)
        import yaml

        content = copy.deepcopy(self.content)
        (put_profile if self.gateway == "llm-d" else put_instance)(content, setting)
        return yaml.safe_dump(content, sort_keys=False)


def default_file(gateway: str) -> GatewayFile:
    """What a gateway does without a file, see `DEFAULTS`."""
    return _parsed(DEFAULTS[choose("gateway", gateway, DEFAULTS)])


def read_gateway_file(path: str | os.PathLike[str]) -> GatewayFile:
    """Read the file of a gateway.

    Raises:
        MalformedFileError: Naming the field that cannot be used, and why.
        ValueError: A number is out of range.
        OSError: It cannot be opened.
    """
    try:
        return _parsed(Path(path).read_text("utf-8"))
    except MalformedFileError as error:
        raise MalformedFileError(path, None, error.field, error.problem, error.fix) from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _parsed(text: str) -> GatewayFile:
    content: Any = text
    if "EndpointPickerConfig" in text or "worker_selection" in text:
        content = load_yaml(text)
        gateway = "llm-d" if content.get("kind") == "EndpointPickerConfig" else "dynamo"
        if gateway == "dynamo" and "worker_selection" not in content:
            fix = "give the EndpointPickerConfig or worker_selection alone, as the router reads it"
            refuse("kind", f"is {content.get('kind')!r}", fix)
        setting = (read_profile if gateway == "llm-d" else read_instance)(content)
    else:
        gateway = _gateway_of(text)
        setting = _of_words(gateway, text)
    return GatewayFile(gateway, GATEWAYS[gateway].check(setting), content)


# Flags and variables.

_PAIR = re.compile(
    r"""(?<![^\s"'])(?P<name>--[\w-]+|\w+(?==))(?:(?:=|\s+(?!--))["']?(?P<value>[^\s"']+)["']?)?"""
)


def _pairs(text: str) -> list[tuple[str, re.Match[str]]]:
    """The flags and variables by name, each with a group ``value`` (None: it has none)."""
    bare = re.sub(r"(?m)(?<!\S)#.*$|\\\n", lambda match: " " * len(match[0]), text)
    return [(match["name"], match) for match in _PAIR.finditer(bare)]


def _changes(gateway: str, name: str, value: Any) -> bool:
    """Whether it would change the choice, and is not simulated."""
    if gateway == "dynamo":
        return changes_dynamo(name, value)
    return name in ("--prefill-policy", "--decode-policy") or name.startswith(_AIBRIX_OTHERS)


def _gateway_of(text: str) -> str:
    for gateway, flags in _FLAGS.items():
        for name, match in _pairs(text):
            if name in flags or name in _RULES[gateway] or _changes(gateway, name, match["value"]):
                return gateway
    fix = "give an EndpointPickerConfig, or flags of SGLang's router, of Dynamo's or AIBrix's"
    refuse("file", "is of no gateway that is known here", fix)


def _of_words(gateway: str, text: str) -> Setting:
    flags, rules, setting = _FLAGS[gateway], _RULES[gateway], {}
    for name, match in _pairs(text):
        value = match["value"]
        if _changes(gateway, name, value):
            refuse(name, "changes the choice and is not simulated", "leave it out")
        if name in rules and value != rules[name]:
            refuse(name, f"is {value!r}", f"{rules[name]!r} is the rule that has numbers")
        if name in flags:
            setting[flags[name]] = number(name, value)
        elif gateway == "aibrix" and name.startswith(AIBRIX) and "_IMBALANCE_" in name:
            refuse(name, "is of another version of the rule", f"give {', '.join(flags)}")
    return setting


def _put_words(gateway: str, text: str, setting: Setting) -> str:
    """The text with the numbers of a setting, those that are missing after the last known word."""
    flags, knobs = _FLAGS[gateway], GATEWAYS[gateway].knobs
    known = [each for each in _pairs(text) if each[0] in flags or each[0] in _RULES[gateway]]
    there = {flags.get(name) for name, _ in known}
    last, match = known[-1]
    as_flags, gap, at = last.startswith("--"), " ", match.end()
    before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
    after = text[at:].partition("\n")[0]
    if not as_flags and before.strip() in ("", "export") and after.lstrip()[:1] in ("", "#"):
        gap, at = f"\n{before}", at + len(after)  # a variable alone in its line
    new = ""
    for name, knob in flags.items():
        missing = knob not in there and setting[knob] != knobs[knob].default
        if missing and name.startswith("--") == as_flags:
            new += f"{gap}{name}{' ' if as_flags else '='}{plain(setting[knob])}"
    text = text[:at] + new + text[at:]
    for name, match in reversed(known):
        if name in flags and float(match["value"]) != setting[flags[name]]:
            start, end = match.span("value")
            text = f"{text[:start]}{plain(setting[flags[name]])}{text[end:]}"
    return text
