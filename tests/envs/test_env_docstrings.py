"""What the environments' docstrings say is what the code does."""

import doctest
import importlib
import re

import pytest

from servegym.envs.families import FAMILIES as RECORDS

FAMILIES = tuple(family.name for family in RECORDS)


def module(family, name="env"):
    return importlib.import_module(f"servegym.envs.{family}.{name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_examples_run(family):
    failed, tried = doctest.testmod(module(family))
    assert tried > 3 and failed == 0


def test_serverless_states_the_values_of_actions_and_the_slo_classes(root):
    doc = module("serverless_moe").ServerlessMoEEnv.__doc__ or ""
    doc = " ".join((doc + (root / "docs" / "serverless.md").read_text(encoding="utf-8")).split())
    config = module("serverless_moe", "config")
    described = config.ServerlessArguments.described()
    for name in ("w_headroom_mb", "y_headroom_mb", "z_headroom"):
        values = ", ".join(str(x) for x in described[name].default)
        assert re.search(rf"\| {values}( MB)? \(`{name}`\) \|", doc), name
    for ttft, tpot in config.PRESETS["dynamic"]["slo"]:
        assert f"({ttft:g} s, {1000 * tpot:g} ms)" in doc
    harder = config.slo_classes(config.load_model("mixtral-8x7b"))
    assert f"({harder[0][0]:g} s, {harder[0][1]:g} s)" in doc
    assert f"({harder[-1][0]:g} s, {harder[-1][1]:g} s)" in doc
    problem = config.build_problem(view=module("serverless_moe", "kernel.layout").DICT)
    assert f"`{problem.nvec.tolist()}`" in doc and f"{problem.nvec.sum()} entries" in doc
    for name in ("main", "remote"):
        specs = getattr(problem.system, f"{name}_specs_mb")
        assert f"({specs[0]:g}, {specs[-1]:g}, {specs[1] - specs[0]:g})" in doc
