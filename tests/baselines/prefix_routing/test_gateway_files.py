"""Files of gateways: read, written and read again, and what is refused by which name."""

import copy
import json
import random

import pytest
import yaml

from servegym._files import MalformedFileError
from servegym.baselines.prefix_routing.gateway_files import (
    DEFAULTS,
    default_file,
    read_gateway_file,
)
from servegym.baselines.prefix_routing.plugins import AIBRIX, CARDS, FILTER, GATEWAYS, GUIDE

from ...robustness.test_loader_fuzz import json_damages

LLM_D = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: approx-prefix-cache-producer
  parameters: {maxPrefixTokensToMatch: 40960}
- type: prefix-cache-affinity-filter
  parameters: {affinityThreshold: 0.75, ttftSource: prefillThroughput}
- type: token-load-scorer
  name: load
  parameters: {queueThresholdTokens: 38700, inFlightLoadProducerName: mine}
- type: inflight-load-producer
  name: mine
- {type: queue-scorer}
- type: label-producer
  name: cards
  parameters: {label: gpu, attributeKey: gpu-kind, valueType: string}
- type: endpoint-attribute-weight-scorer
  parameters: {attributeKey: gpu-kind, producer: cards, weights: {h100: 2.5, l40s: 1}}
- type: max-score-picker
schedulingProfiles:
- name: mixed
  plugins:
  - pluginRef: prefix-cache-affinity-filter
  - pluginRef: load
    weight: 2
  - pluginRef: queue-scorer
  - {pluginRef: endpoint-attribute-weight-scorer, weight: 0.5}
  - pluginRef: max-score-picker
dataLayer: {injectDefaults: false}
"""
OLD = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
  parameters: {hashBlockSize: 64, maxPrefixBlocksToMatch: 256, lruCapacityPerServer: 31250}
- type: kv-cache-utilization-scorer
- type: max-score-picker
- type: single-profile-handler
"""
DYNAMO = """\
router: {use_kv_events: true, router_ttl_secs: 120, router_track_output_blocks: false}
worker_selection:
  aggregated: mine
  instances:
  - name: other
    type: dynamo-two-tier-cost-fn
  - name: mine
    type: dynamo-default-cost-fn
    parameters: {overlap_score_credit: 1.5, host_cache_hit_weight: 0.75}
"""
SGLANG = """\
# Started by hand --cache-threshold 0.9
python -m sglang_router.launch_router --worker-urls http://a:1 http://b:2 \\
  --policy cache_aware --cache-threshold 0.25 \\
  --balance-abs-threshold=16 --max-tree-size 67108864 --host "$HOST"  # --balance-rel-threshold 9
"""
FRONTEND = (
    "python -m dynamo.frontend --router-mode kv --router-prefill-load-scale=3 --http-port 8000"
)
VARIABLES = """\
export DYN_ROUTER_MODE=kv
export DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT="0.5"
export DYN_ROUTER_USE_KV_EVENTS=false
"""
BLOCK_SIZE = f"{AIBRIX}BLOCK_SIZE=128\n"
POD = f"{BLOCK_SIZE}ROUTING_ALGORITHM=prefix-cache\n{AIBRIX}STANDARD_DEVIATION_FACTOR=2\n"
LOAD = "token-load-scorer"
FILES = {
    "llm-d": (
        LLM_D,
        {
            f"{FILTER}.affinityThreshold": 0.75,
            f"{FILTER}.explorationProbability": 0.0,
            f"{FILTER}.maxTTFTPenaltyMs": 18000.0,
            f"{FILTER}.peakPrefillThroughput": 15928.0,
            LOAD: 2.0,
            f"{LOAD}.queueThresholdTokens": 38700.0,
            "queue-scorer": 1.0,
            CARDS: 0.5,
            f"{CARDS}.h100": 2.5,
            f"{CARDS}.l40s": 1.0,
        },
    ),
    "llm-d, old": (OLD, {"prefix-cache-scorer": 1.0, "kv-cache-utilization-scorer": 1.0}),
    "llm-d, newest": (OLD.replace("inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1"), None),
    "dynamo": (DYNAMO, {"overlap_score_credit": 1.5}),
    "dynamo, flags": (FRONTEND, {"prefill_load_scale": 3.0}),
    "dynamo, variables": (VARIABLES, {"overlap_score_credit": 0.5}),
    "sglang": (SGLANG, {"cache-threshold": 0.25, "balance-abs-threshold": 16.0}),
    "aibrix": (POD, {f"{AIBRIX}STANDARD_DEVIATION_FACTOR": 2.0}),
}


@pytest.fixture
def read(tmp_path):
    """Reads a text as a file."""

    def from_text(text):
        path = tmp_path / "given.yaml"
        path.write_text(text)
        return read_gateway_file(path)

    return from_text


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_and_written_as_it_was(name, read):
    text, setting = FILES[name]
    file = read(text)
    gateway = name.partition(",")[0]
    assert file.gateway == gateway
    if setting is not None:
        defaults = {} if gateway == "llm-d" else GATEWAYS[gateway].default()
        assert file.setting == defaults | setting
    written = file.text(file.setting)
    assert read(written).setting == file.setting
    if file.suffix == ".flags":
        assert written == text
    elif text != OLD and name != "llm-d, newest":  # their profile was not written out
        assert file.suffix == ".yaml" and yaml.safe_load(written) == yaml.safe_load(text)


@pytest.mark.parametrize("gateway", DEFAULTS)
def test_default_files_say_what_the_gateway_does(gateway, read):
    file = default_file(gateway)
    assert file.gateway == gateway and file.setting == GATEWAYS[gateway].default()
    assert read(file.text(file.setting)) == read(DEFAULTS[gateway])


@pytest.mark.parametrize("text", [*(text for text, _ in FILES.values()), *DEFAULTS.values()])
def test_a_written_setting_is_read_again(text, read):
    file = read(text)
    chance = random.Random(3)
    for _ in range(40):
        setting = {}
        for knob, (default, low, high, _, whole, *_) in GATEWAYS[file.gateway].knobs.items():
            drawn = max(chance.uniform(low, high or 1.0), 0.0) if low < high else default
            setting[knob] = float(round(drawn)) if whole else drawn
        setting |= {f"{CARDS}.h100": 1.0, f"{CARDS}.l40s": 0.3} if file.gateway == "llm-d" else {}
        again = read(file.text(setting)).setting
        for knob, value in setting.items():
            kind = knob.partition(".")[0]  # a plugin of weight 0 is gone
            gone = not setting.get(kind, setting.get(f"{kind}.affinityThreshold"))
            assert again.get(knob) == (None if gone and file.gateway == "llm-d" else value)


def without(setting, *names):
    return {name: x for name, x in setting.items() if not name.startswith(names)}


def test_only_what_is_new_changes_in_an_endpoint_picker_config(read):
    file, before = read(LLM_D), yaml.safe_load(LLM_D)
    # Another weight and another parameter.
    setting = file.setting | {LOAD: 3.0, f"{LOAD}.queueThresholdTokens": 5000.0}
    expected = copy.deepcopy(before)
    expected["plugins"][2]["parameters"]["queueThresholdTokens"] = 5000
    expected["schedulingProfiles"][0]["plugins"][1]["weight"] = 3
    written = file.text(setting)
    assert yaml.safe_load(written) == expected
    assert "weight: 3\n" in written and "queueThresholdTokens: 5000\n" in written
    # What has the weight 0 goes, as an entry and as a plugin.
    for gone in (without(file.setting, LOAD), file.setting | {LOAD: 0.0}):
        expected = copy.deepcopy(before)
        del expected["plugins"][2], expected["schedulingProfiles"][0]["plugins"][1]
        assert yaml.safe_load(file.text(gone)) == expected
    gone = without(file.setting, FILTER)
    assert FILTER not in file.text(gone)
    # What is new comes with its weight, and with parameters that are not the default.
    setting = file.setting | {
        "active-request-scorer": 1.0,
        "active-request-scorer.maxBusyScore": 0.5,
    }
    expected = copy.deepcopy(before)
    new = {"type": "active-request-scorer", "parameters": {"maxBusyScore": 0.5}}
    expected["plugins"].append(new)
    new = {"pluginRef": "active-request-scorer", "weight": 1}
    expected["schedulingProfiles"][0]["plugins"].append(new)
    assert yaml.safe_load(file.text(setting)) == expected
    assert read(LLM_D).content == before == file.content


def test_weights_of_cards_come_with_a_producer_of_their_label():
    file = default_file("llm-d")
    setting = {CARDS: 2.0, f"{CARDS}.h100": 1.0, f"{CARDS}.l40s": 0.25}
    written = yaml.safe_load(file.text(file.setting | setting))
    *_, scorer, producer = written["plugins"]
    assert producer["type"] == "label-producer"
    assert scorer["parameters"] == {
        "attributeKey": producer["parameters"]["attributeKey"],
        "producer": producer["name"],
        "weights": {"h100": 1, "l40s": 0.25},
    }


def test_a_file_without_a_profile_gets_one(read):
    written = yaml.safe_load(read(OLD).text({"prefix-cache-scorer": 3.0}))
    assert written["schedulingProfiles"] == [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "prefix-cache-scorer", "weight": 3},
                {"pluginRef": "max-score-picker"},
            ],
        }
    ]
    assert written["plugins"][0] == yaml.safe_load(OLD)["plugins"][0]
    empty = OLD + "schedulingProfiles:\n- name: bare\n  plugins:\n"
    assert read(empty).setting == {}
    assert read(read(empty).text(GUIDE)).setting.keys() > GUIDE.keys()


def test_only_what_is_new_changes_in_dynamos_yaml(read):
    file = read(DYNAMO)
    expected = yaml.safe_load(DYNAMO)
    expected["worker_selection"]["instances"][1]["parameters"] |= {
        "overlap_score_credit": 2,
        "prefill_load_scale": 0.5,
    }
    setting = file.setting | {"overlap_score_credit": 2.0, "prefill_load_scale": 0.5}
    assert yaml.safe_load(file.text(setting)) == expected


@pytest.mark.parametrize(
    ("name", "change", "old", "new"),
    [
        ("sglang", {"cache-threshold": 0.5}, "--cache-threshold 0.25", "--cache-threshold 0.5"),
        ("sglang", {"balance-abs-threshold": 2e6}, "threshold=16", "threshold=2000000"),
        (
            "sglang",
            {"balance-rel-threshold": 1.25},
            "threshold=16",
            "threshold=16 --balance-rel-threshold 1.25",
        ),
        (
            "dynamo, flags",
            {"prefill_load_scale": 1 / 3, "decode_active_request_weight": 7.0},
            "scale=3",
            f"scale={1 / 3} --router-decode-active-request-weight 7",
        ),
        (
            "dynamo, variables",
            {"overlap_score_credit": 4.0, "router_temperature": 0.5},
            'CREDIT="0.5"\n',
            'CREDIT="4"\nexport DYN_ROUTER_TEMPERATURE=0.5\n',
        ),
        (
            "aibrix",
            {f"{AIBRIX}STANDARD_DEVIATION_FACTOR": 3.0, f"{AIBRIX}LOAD_IMBALANCE_FACTOR": 1.5},
            "FACTOR=2",
            f"FACTOR=3\n{AIBRIX}LOAD_IMBALANCE_FACTOR=1.5",
        ),
    ],
)
def test_only_what_is_new_changes_in_flags_and_variables(name, change, old, new, read):
    text = FILES[name][0]
    file = read(text)
    assert text.count(old) == 1
    assert file.text(file.setting | change) == text.replace(old, new)


def test_variables_before_a_command_stay_before_it_and_the_last_of_a_flag_counts(read):
    file = read("DYN_ROUTER_MODE=kv python -m dynamo.frontend\n")
    written = file.text(file.setting | {"prefill_load_scale": 2.0})
    assert written == (
        "DYN_ROUTER_MODE=kv DYN_ROUTER_PREFILL_LOAD_SCALE=2 python -m dynamo.frontend\n"
    )
    file = read("--cache-threshold 0.1 --cache-threshold 0.2")
    assert file.setting["cache-threshold"] == 0.2
    assert file.text(file.setting | {"cache-threshold": 0.4}).count(" 0.4") == 2


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


QUEUE = "- {type: queue-scorer}"
REFUSED = {
    "a mistyped plugin": (
        changed(LLM_D, QUEUE, "- {type: que-scorer}"),
        "plugins: que-scorer.*Did you mean 'queue-scorer'",
    ),
    "two of a type": (
        changed(LLM_D, QUEUE, f"{QUEUE}\n- {{type: queue-scorer, name: two}}"),
        "plugins: two",
    ),
    "an unknown parameter": (
        changed(LLM_D, "affinityThreshold: 0.75", "affinityThresold: 0.75"),
        f"{FILTER}: affinityThresold.*affinityThreshold",
    ),
    "a source of predictions": (
        changed(LLM_D, "ttftSource: prefillThroughput", "ttftSource: latencyPredictor"),
        "ttftSource.*latencyPredictor",
    ),
    "flow control": (f"{LLM_D}flowControl: {{maxBytes: 1}}\n", "flowControl"),
    "a reference to nothing": (
        changed(LLM_D, "- pluginRef: queue-scorer", "- pluginRef: queue"),
        "pluginRef.*'queue'",
    ),
    "a reference twice": (
        changed(LLM_D, "- pluginRef: queue-scorer", "- pluginRef: load"),
        "pluginRef.*'load' twice",
    ),
    "a weight in words": (changed(LLM_D, "weight: 2", "weight: heavy"), "load: weight.*'heavy'"),
    "a negative weight": (changed(LLM_D, "weight: 2", "weight: -2"), "token-load-scorer=-2"),
    "a card's weight in words": (changed(LLM_D, "l40s: 1", "l40s: low"), "weights: l40s.*'low'"),
    "no YAML": (f"{LLM_D} - {{", "'file'.*is no YAML"),
    "a list": ("- EndpointPickerConfig", "'file'"),
    "within a ConfigMap": (
        "kind: ConfigMap\ndata:\n  epp.yaml: |\n    kind: EndpointPickerConfig\n",
        "'kind'.*'ConfigMap'.*alone",
    ),
    "flags of a container": (
        '- "--policy=cache_aware"\n- "--cache-threshold=high"',
        "--cache-threshold.*'high'",
    ),
    "another function": (
        changed(DYNAMO, "aggregated: mine", "aggregated: other"),
        "instances: other.*dynamo-two-tier-cost-fn",
    ),
    "Dynamo's number in words": (
        changed(DYNAMO, "credit: 1.5", "credit: lots"),
        "overlap_score_credit.*'lots'",
    ),
    "another mode": (changed(FRONTEND, "mode kv", "mode random"), "--router-mode.*'random'"),
    "a queue": (f"{VARIABLES}export DYN_ROUTER_QUEUE_THRESHOLD=4\n", "DYN_ROUTER_QUEUE_THRESHOLD"),
    "another policy": (
        changed(SGLANG, "cache_aware", "round_robin"),
        "--policy.*'round_robin'.*'cache_aware'",
    ),
    "a flag's number in words": (
        changed(SGLANG, "threshold 0.25", "threshold low"),
        "--cache-threshold.*'low'",
    ),
    "a share above 1": (changed(SGLANG, "threshold 0.25", "threshold 25"), "cache-threshold=25"),
    "another algorithm": (
        changed(POD, "prefix-cache\n", "random\n"),
        "ROUTING_ALGORITHM.*'random'",
    ),
    "a blend": (f"{POD}AIBRIX_ROUTING_AUTO_BLEND_PREFIX_CACHE_WEIGHT=5\n", "AUTO_BLEND"),
    "an earlier gate": (
        f"{POD}{AIBRIX}POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT=8\n",
        "ABS_COUNT.*another version",
    ),
    "an unknown gateway": ("envoy --concurrency 4\n", "'file'.*no gateway"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_simulated_is_refused_by_name(what, read):
    text, pattern = REFUSED[what]
    with pytest.raises(ValueError, match=rf"(?s)given\.yaml.*{pattern}"):
        read(text)


def test_what_is_not_a_text_and_an_unknown_gateway_are_refused(tmp_path):
    path = tmp_path / "given.yaml"
    path.write_bytes(b"\xff\xfe\x00kind")
    with pytest.raises(ValueError, match="given.yaml"):
        read_gateway_file(path)
    with pytest.raises(OSError, match=r"none\.yaml"):
        read_gateway_file(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="gateway='llmd'.*'llm-d'"):
        default_file("llmd")
    with pytest.raises(ValueError, match="queue-score "):
        default_file("llm-d").text({"queue-score": 1.0})


@pytest.mark.parametrize("text", [LLM_D, OLD, DYNAMO, DEFAULTS["llm-d"]])
def test_a_damaged_document_is_read_or_refused(text, read):
    damages, outcomes = [*json_damages(json.dumps(yaml.safe_load(text)).encode())], []
    for _, damaged, _ in random.Random(1).sample(damages, 80):
        try:
            file = read(yaml.safe_dump(json.loads(damaged)) + "# EndpointPickerConfig")
        except ValueError as error:
            outcomes.append(isinstance(error, MalformedFileError))
        else:
            outcomes.append(None)
            again = read(file.text(file.setting)).setting
            kept = {name: x for name, x in file.setting.items() if again.get(name) == x}
            for name in file.setting.keys() - kept.keys():  # of plugins without a weight
                kind = name.partition(".")[0]
                assert 0.0 in (
                    file.setting.get(kind),
                    file.setting.get(f"{kind}.affinityThreshold"),
                )
    assert {True, None} <= set(outcomes)
