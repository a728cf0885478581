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
def test_a_docstring_can_be_read(family):
    for name in dir(module(family)):
        lines = (getattr(module(family), name).__doc__ or "").splitlines()
        assert sum(not line.lstrip().startswith("|") for line in lines) <= 92, name


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


def placement_text(root):
    page = (root / "docs" / "placement.md").read_text(encoding="utf-8")
    return (module("expert_placement").ExpertPlacementEnv.__doc__ or "") + page


def placement_rows(root):
    doc = placement_text(root)
    lines = (line.strip().strip("|").split("|") for line in doc.splitlines() if line.count("|") > 3)
    return [[cell.strip() for cell in line] for line in lines]


def test_placement_states_every_scenario_with_its_cluster_and_load(root):
    cluster = module("expert_placement", "cluster")
    config = module("expert_placement", "config")
    told = {
        row[0].replace("`", "").removesuffix(" (default)"): row[1:] for row in placement_rows(root)
    }
    scales = "scale_4, scale_8, ... scale_256"
    names = [name for name in cluster.list_scenarios() if not name.startswith("scale")] + [scales]
    assert set(names) <= set(told)
    assert cluster.list_scenarios()[-1] == "scale_256" and "scale_8" in cluster.list_scenarios()
    for name in names:
        gpus, links, load = (  # one that is as another says so by name
            cell + told.get(cell.partition("as `")[2].partition("`")[0], ["", "", ""])[k]
            for k, cell in enumerate(told[name])
        )
        given = cluster.scenario("scale_8" if name == scales else name)
        assert gpus.startswith(", ".join(map(str, given["gpus"])))
        if name != "drift":
            rates = given["nic_bps"]
            rates = rates if isinstance(rates, tuple) else (rates,)
            assert f"{', '.join(f'{rate / 1e6:g}' for rate in rates)} Mbit/s" in links
            assert f"message a{'n expert' if 'expert' in given['messages'] else ' server'}" in links
        if "tokens" in load:
            assert f"{given['output_tokens']} tokens" in load or name == scales
        if "in " in load:
            assert f"{given['mean_interarrival_s']:g} s" in load
        assert (f"every {given.get('rotate_s', 0):g} s" in load) == ("rotate_s" in given)
    slots = config.build_problem().cluster
    doc = placement_text(root)
    assert f"{slots.slots[0]} of the {slots.layers * slots.experts:,} of" in doc
    assert f"{slots.slots[-1]} on others" in doc
