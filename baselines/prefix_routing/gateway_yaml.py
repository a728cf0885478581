"""Gateways' files in YAML: llm-d's ``EndpointPickerConfig`` and Dynamo's ``worker_selection``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

from servegym._checks import did_you_mean
from servegym._files import MalformedFileError
from servegym.baselines.prefix_routing.plugins import CARDS, FILTERS, GATEWAYS, SCORERS, Setting

_LABEL = {"label": "servegym/card", "attributeKey": "card", "valueType": "string"}
_PRODUCER = {"type": "label-producer", "name": "card-label", "parameters": _LABEL}
_SIMULATED = {**FILTERS, **SCORERS}
_KEPT_KEYS = ("apiVersion", "kind", "plugins", "schedulingProfiles", "dataLayer", "requestHandler")
_KEPT_TYPES = ("max-score-picker", "single-profile-handler", "decode-filter", "metrics-data-source")
_KEPT_ENDS = ("-producer", "-extractor", "-parser")
# Parameters that say where a plugin gets its data, or how the index is kept.
_KEPT_PARAMETERS = """
    inFlightLoadProducerName prefixMatchInfoProducerName latencyPredictionInfoProducerName
    blockSize hashBlockSize blockSizeTokens maxPrefixBlocksToMatch maxPrefixTokensToMatch
    lruCapacityPerServer autoTune attributeKey producer headerName nonTextTokenWeight requestTimeout
""".split()
_NEUTRAL = {"ttftSource": "prefillThroughput", "prefixLengthWeight": 0}
_DYNAMO_OTHERS = """
    --router-kv-overlap-score-weight --kv-overlap-score-weight --overlap-score-weight --load-aware
    --router-load-aware --router-queue-threshold --router-policy-config --router-track-output-blocks
    --no-router-assume-kv-reuse --no-router-track-active-blocks --no-router-track-prefill-tokens
""".split()
"""Flags of Dynamo that would change the choice, and are not simulated."""


def refuse(field: str, problem: str, fix: str) -> NoReturn:
    """Raise the error of a field, of a file that the caller knows."""
    raise MalformedFileError("", None, field, problem, fix)


def number(field: str, value: Any) -> float:
    """The value of a field as a number."""
    try:
        return float("true" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        refuse(field, f"is {value!r}", "give a number")


def plain(value: float) -> float | int:
    """A number as it is written: whole ones without a point."""
    return int(value) if value.is_integer() else value


def load_yaml(text: str) -> dict[Any, Any]:
    """The mapping that a text says."""
    import yaml

    try:
        return _mapping("file", yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError) as error:
        refuse("file", f"is no YAML: {error}", "write it again")


def _mapping(field: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict | None):
        refuse(field, f"is {value!r}", "give a mapping")
    return value or {}


def _mappings(field: str, value: Any) -> list[dict[Any, Any]]:
    if not isinstance(value, list | None):
        refuse(field, f"is {value!r}", "give a list")
    return [_mapping(field, each) for each in value or ()]


def _put(where: dict[Any, Any], key: str, value: float, default: float | None = None) -> None:
    """Write a number, unless it is there already, or not there and the default."""
    if value != (float(where[key]) if key in where else default):
        where[key] = plain(value)


# Dynamo's.


def changes_dynamo(name: str, value: Any) -> bool:
    """Whether a flag, a variable or a field of Dynamo would change the choice unsimulated."""
    no = "no-" if str(value).lower() == "false" else ""
    flag = f"--{no}{name.removeprefix('DYN_').lower().replace('_', '-')}"
    return (name if name.startswith("--") else flag) in _DYNAMO_OTHERS


def _instance(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """The instance that is used."""
    selection = _mapping("worker_selection", content.get("worker_selection"))
    name = selection.get("aggregated")
    for instance in _mappings("worker_selection.instances", selection.get("instances")):
        if name is not None and instance.get("name") == name:
            kind = instance.get("type")
            if kind == "dynamo-default-cost-fn":
                return instance
            refuse(f"instances: {name}", f"has type {kind!r}", "give dynamo-default-cost-fn")
    problem = f"is {name!r}, which names none of 'instances'"
    refuse("worker_selection.aggregated", problem, "prefill and decode apart are not here")


def read_instance(content: Mapping[Any, Any]) -> Setting:
    """What the instance of Dynamo's rule says."""
    for name, value in _mapping("router", content.get("router")).items():
        if value is not None and changes_dynamo(str(name), value):
            refuse(f"router.{name}", "changes the choice and is not simulated", "leave it out")
    knobs, setting = GATEWAYS["dynamo"].knobs, {}
    for name, value in _mapping("parameters", _instance(content).get("parameters")).items():
        if name in knobs:
            setting[name] = number(name, value)
        elif name not in ("host_cache_hit_weight", "disk_cache_hit_weight"):
            refuse(str(name), "is not simulated", f"have {', '.join(knobs)}")
    return setting


def put_instance(content: dict[Any, Any], setting: Setting) -> None:
    """Write a setting into it."""
    instance = _instance(content)
    instance["parameters"] = instance.get("parameters") or {}
    for name, knob in GATEWAYS["dynamo"].knobs.items():
        _put(instance["parameters"], name, setting[name], knob.default)


# EndpointPickerConfig.

_Plugins = dict[str, dict[Any, Any]]


def _plugins(content: Mapping[Any, Any]) -> _Plugins:
    """The plugins by name."""
    plugins: _Plugins = {}
    known = (*_SIMULATED, *_KEPT_TYPES)
    for plugin in _mappings("plugins", content.get("plugins")):
        kind = str(plugin.get("type"))
        name = str(plugin.get("name") or kind)
        if kind not in known and not kind.endswith(_KEPT_ENDS):
            fix = f"have {', '.join(known)}.{did_you_mean(kind, known)}"
            refuse(f"plugins: {name}", f"has type {kind!r}, which is not simulated", fix)
        kinds = {one["type"] for one in plugins.values()} & set(_SIMULATED)
        if name in plugins or kind in kinds or (name != kind and name in _SIMULATED):
            refuse(f"plugins: {name}", "has the type or name of another", "have one of each")
        parameters = _mapping(f"{name}: parameters", plugin.get("parameters"))
        if parameters.get("addEstimatedOutputTokens"):
            refuse(f"{name}: addEstimatedOutputTokens", "is not simulated", "leave it out")
        plugins[name] = plugin
    return plugins


def _only_profile(content: Mapping[Any, Any], plugins: _Plugins) -> dict[Any, Any]:
    """The one profile, a shallow copy."""
    ends = ("-scorer", "-filter", "-picker")
    every = [{"pluginRef": name} for name, one in plugins.items() if one["type"].endswith(ends)]
    profiles = _mappings("schedulingProfiles", content.get("schedulingProfiles"))
    if len(profiles) > 1:
        refuse("schedulingProfiles", f"has {len(profiles)}", "one profile is simulated")
    profile = profiles[0] if profiles else {"name": "default", "plugins": every}
    entries = _mappings("schedulingProfiles: plugins", profile.get("plugins"))
    names = [entry.get("pluginRef") for entry in entries]
    for name in names:
        if name not in list(plugins):
            refuse("pluginRef", f"is {name!r}", f"plugins has {', '.join(plugins)}")
        if names.count(name) > 1:
            refuse("pluginRef", f"is {name!r} twice", "have it once")
    return {**profile, "plugins": entries}


def read_profile(content: Mapping[Any, Any]) -> Setting:
    """What the one profile says; see `put_profile`."""
    for key, value in content.items():
        if key not in _KEPT_KEYS and value:
            refuse(str(key), "is not simulated", f"have {', '.join(_KEPT_KEYS)}")
    plugins = _plugins(content)
    setting: Setting = {}
    for entry in _only_profile(content, plugins)["plugins"]:
        name = entry["pluginRef"]
        kind = plugins[name]["type"]
        if kind in SCORERS:
            setting[kind] = number(f"{name}: weight", entry.get("weight", 1.0))
        if kind in _SIMULATED:
            setting |= _of_plugin(kind, plugins[name].get("parameters") or {})
    return setting


def _of_plugin(kind: str, parameters: Mapping[Any, Any]) -> Setting:
    knobs = _SIMULATED[kind].knobs
    setting = {f"{kind}.{name}": knob.default for name, knob in knobs.items()}
    for name, value in parameters.items():
        field = f"{kind}: {name}"
        if kind == CARDS and name == "weights":
            for card, weight in _mapping(field, value).items():
                setting[f"{kind}.{card}"] = number(f"{field}: {card}", weight)
        elif name in knobs:
            setting[f"{kind}.{name}"] = number(field, value)
        elif name not in _KEPT_PARAMETERS and value != _NEUTRAL.get(name, refuse):
            fix = f"have {', '.join(knobs) or 'none'}"
            refuse(field, f"is {value!r}, which is not simulated", fix)
    return setting


def put_profile(content: dict[Any, Any], setting: Setting) -> None:
    """Write a setting into the one profile: plugins of weight 0 go, new ones come at the end."""
    plugins = _plugins(content)
    profile = _only_profile(content, plugins)
    names = {plugin["type"]: name for name, plugin in plugins.items()}
    for kind, (_, knobs) in _SIMULATED.items():
        name, entries = names.get(kind, kind), profile["plugins"]
        weight = setting.get(kind if kind in SCORERS else f"{kind}.affinityThreshold", 0.0)
        if not weight:
            plugins.pop(name, None)
            profile["plugins"] = [each for each in entries if each["pluginRef"] != name]
            continue
        entry = next((each for each in entries if each["pluginRef"] == name), None)
        if entry is None:
            entries.append({"pluginRef": name})
            entries[-1] |= {"weight": plain(weight)} if kind in SCORERS else {}
        elif kind in SCORERS:
            _put(entry, "weight", weight, 1.0)
        plugin = plugins.setdefault(name, {"type": kind})
        parameters = plugin.get("parameters") or {}
        if kind == CARDS:
            _put_cards(plugins, parameters, setting)
        for key, knob in knobs.items():
            _put(parameters, key, setting.get(f"{kind}.{key}", knob.default), knob.default)
        if parameters:
            plugin["parameters"] = parameters
    content |= {"plugins": list(plugins.values()), "schedulingProfiles": [profile]}


def _put_cards(plugins: _Plugins, parameters: dict[Any, Any], setting: Setting) -> None:
    """Write the weights of cards, and a producer of the label that names the card if none is."""
    if "attributeKey" not in parameters:
        parameters |= {"attributeKey": _LABEL["attributeKey"], "producer": _PRODUCER["name"]}
        plugins[_PRODUCER["name"]] = copy.deepcopy(_PRODUCER)
    cards = [name.removeprefix(f"{CARDS}.") for name in setting if name.startswith(f"{CARDS}.")]
    old = {str(card): weight for card, weight in (parameters.get("weights") or {}).items()}
    for card in cards:
        _put(old, card, setting[f"{CARDS}.{card}"])
    parameters["weights"] = {card: old[card] for card in cards}
