"""The records of the environments' arguments: what they hold, what they refuse, what they say."""

import dataclasses
import doctest
import importlib
import json
import re

import gymnasium as gym
import pytest

from servegym.envs._arguments import Arguments, choice, ends, number, span, switch, whole
from servegym.envs.families import FAMILIES
from servegym.envs.serverless_moe import config
from servegym.envs.serverless_moe.env import ServerlessMoEEnv
from servegym.envs.serverless_moe.kernel.layout import DICT

OTHER = {  # arguments that stand for others, by id
    "servegym/LLMRouting-v1": {"fleet": "h100-8", "rate": 3.0},
    "servegym/ServerlessMoEFlat-v1": {"preset": "seed", "model": "toy"},
    "servegym/ExpertPlacement-v0": {"scenario": "drift", "model": "toy"},
    "servegym/PrefixRouting-v1": {"scenario": "chat", "rate": 3.0},
}


def env_class(family):
    return gym.envs.registration.load_env_creator(gym.spec(family.env_id).entry_point)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made(Arguments):
    """Two groups of made-up arguments."""

    headings = dict(size="engine", reward="reward")
    size: int = whole(5, 1, "experts", high=9)
    rate: tuple = span(2.0, "requests/s", high=50.0)
    share: float = number(None, 0.0, "of the memory", high=1.0, open_low=True)
    reward: str = choice("slow", ("slow", "fast"), "what is paid", box="fast")
    keep: bool = switch(False, "whether it keeps", box=True)


def test_values_are_checked_and_plain_and_never_change():
    made = Made.fill({"size": 3, "rate": [1, 2]})
    values = {"size": 3, "rate": (1.0, 2.0), "share": None, "reward": "slow", "keep": False}
    assert dict(made) == values
    assert ends(made.rate) == (1.0, 2.0) and ends(Made().rate) == (2.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.size = 4
    with pytest.raises(ValueError, match="size=10 must be a whole number, between 1 and 9"):
        dataclasses.replace(made, size=10)
    with pytest.raises(ValueError, match="reward='slo' is unknown.* Did you mean 'slow'"):
        dataclasses.replace(made, reward="slo")


def test_ids_with_one_box_have_their_own_defaults():
    assert (Made(view=1).reward, Made(view=1).keep) == ("fast", True)
    assert Made.fill({"reward": None, "keep": None}, view=2) == Made(view=2)
    assert Made.fill({"reward": "slow", "keep": False}, view=1).reward == "slow"


@pytest.mark.parametrize("name", ["sise", "view", "headings"])
def test_an_unknown_argument_is_refused_with_the_nearest(name):
    hint = " Did you mean 'size'" if name == "sise" else ""
    with pytest.raises(ValueError, match=f"unexpected keyword argument '{name}'.{hint}") as caught:
        Made.fill({name: 3})
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_an_argument_refused_closes_without_a_word(family):
    creator = gym.envs.registration.load_env_creator(gym.spec(family.env_id).vector_entry_point)
    creator.__new__(creator).close()


def test_the_table_says_defaults_and_bounds():
    assert Made.table()[2:] == [
        "| engine | `size` | `5` | from 1 to 9 | experts |",
        "|  | `rate` | `2.0` | above 0 to 50 | requests/s |",
        "|  | `share` | none | above 0 to 1 | of the memory |",
        '| reward | `reward` | `"slow"`; `fast` with one Box | `slow`, `fast` | what is paid |',
        "|  | `keep` | `False`; `True` with one Box |  | whether it keeps |",
    ]


@pytest.mark.parametrize("env_id", OTHER)
def test_the_arguments_of_a_problem_make_it_again(env_id):
    env = gym.make(env_id, **OTHER[env_id]).unwrapped
    arguments = dict(env.problem.arguments)
    again = type(env)(**json.loads(json.dumps(arguments))).problem.arguments
    assert json.dumps(dict(again)) == json.dumps(arguments)
    for name, value in OTHER[env_id].items():
        assert name == "fleet" or arguments[name] == value


def test_every_family_writes_its_arguments_in_its_docstring():
    for family in FAMILIES:
        cls = env_class(family)
        assert set(cls.arguments.headings) <= set(cls.arguments.described())
        for name in (*cls.arguments.described(), "render_mode"):
            assert f"| `{name}` |" in (cls.__doc__ or "")
        for columns in cls.columns.values():
            assert all(f"| `{column.name}` |" in (cls.__doc__ or "") for column in columns)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_examples_of_a_docstring_run(family):
    module = importlib.import_module(f"servegym.envs.{family.name}.env")
    failed, tried = doctest.testmod(module)
    assert tried > 3 and failed == 0


def test_serverless_states_the_values_of_actions_and_the_slo_classes(root):
    doc = ServerlessMoEEnv.__doc__ or ""
    doc = " ".join((doc + (root / "docs" / "serverless.md").read_text(encoding="utf-8")).split())
    described = config.ServerlessArguments.described()
    for name in ("w_headroom_mb", "y_headroom_mb", "z_headroom"):
        values = ", ".join(str(x) for x in described[name].default)
        assert re.search(rf"\| {values}( MB)? \(`{name}`\) \|", doc), name
    for ttft, tpot in config.PRESETS["dynamic"]["slo"]:
        assert f"({ttft:g} s, {1000 * tpot:g} ms)" in doc
    harder = config.slo_classes(config.load_model("mixtral-8x7b"))
    assert f"({harder[0][0]:g} s, {harder[0][1]:g} s)" in doc
    assert f"({harder[-1][0]:g} s, {harder[-1][1]:g} s)" in doc
    problem = config.build_problem(view=DICT)
    assert f"`{problem.nvec.tolist()}`" in doc and f"{problem.nvec.sum()} entries" in doc
    for name in ("main", "remote"):
        specs = getattr(problem.system, f"{name}_specs_mb")
        assert f"({specs[0]:g}, {specs[-1]:g}, {specs[1] - specs[0]:g})" in doc
