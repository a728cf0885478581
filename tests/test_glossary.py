"""The glossary names every policy that users can type."""

import re

import pytest

pytest.importorskip("torch")
from servegym.agents import shipped  # noqa: E402
from servegym.agents.lib.checkpoint import AGENTS  # noqa: E402
from servegym.baselines.registry import list_policies  # noqa: E402
from servegym.envs.families import FAMILIES  # noqa: E402


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.group)
def test_every_policy_has_a_line(root, family):
    text = (root / "docs" / "glossary.md").read_text(encoding="utf-8")
    section = text.split(f"### {family.title}\n")[1].split("\n### ")[0]
    marks = dict(re.findall(r"^\| `(\w+)`( \([ct]\))? \|", section, re.MULTILINE))
    trained = [name for name in shipped(family.name)]
    if family.name == "expert_placement":  # a file for each cluster, named by the agent
        trained = [name for name in trained if name in AGENTS]
    policies = {info.name: " (c)" * info.clairvoyant for info in list_policies(family.name)}
    assert marks == policies | dict.fromkeys(trained, " (t)")
