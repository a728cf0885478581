"""The list of mutants holds for the tree as it is."""

from collections import Counter

from .mutants import MUTANTS


def test_every_mutant_changes_a_text_that_is_there_once(root):
    for mutant in MUTANTS:
        assert (root / mutant.path).read_text().count(mutant.old) == 1, mutant
        file, test = mutant.node.split("::")
        assert f"def {test}(" in (root / file).read_text(), mutant
        assert mutant.new != mutant.old
    counts = Counter(mutant.family for mutant in MUTANTS)
    families = {folder.parent.name for folder in (root / "envs").glob("*/kernel")}
    assert set(counts) == families and min(counts.values()) >= 6, counts
