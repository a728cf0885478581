"""The papers' claims against the committed results: ``servegym claims [FAMILY]``.

Each reads the CSV of its figure. A gain over a reference that learnt too little is *open*;
*elsewhere* marks findings at settings that the paper does not name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from servegym._checks import choose
from servegym.envs.families import FAMILIES, family_named
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import print_table, read_rows
from servegym.experiments.papers.placement import claims as claims_placement
from servegym.experiments.papers.prefix import claims as claims_prefix
from servegym.experiments.papers.routing import claims as claims_routing
from servegym.experiments.papers.serverless import claims as claims_serverless
from servegym.experiments.papers.study import RESULTS
from servegym.experiments.papers.verdicts import Claim, Finding

VERDICTS = ("agrees", "same direction", "in part", "disagrees", "open")
CLAIMS: tuple[Claim, ...] = tuple(
    claim._replace(family=module.__name__.split(".")[-2])
    for module in (claims_routing, claims_serverless, claims_placement, claims_prefix)
    for claim in module.CLAIMS
)
"""Every claim that a committed table can be held against, paper by paper in its order."""

TITLES = {family.group: family.heading for family in FAMILIES}


def findings(claim: Claim, folder: Path = RESULTS) -> list[Finding]:
    """The findings of a claim in the committed results; one open finding where there are none."""
    path = folder / claim.family / f"{claim.source}.csv"
    if not path.exists():
        return [Finding("", "not measured here", "open")]
    return list(claim.read(read_rows(path)))


def lines(family: str, folder: Path = RESULTS) -> list[list[str]]:
    """The table of a family: place, claim, the paper's figure, setting, ours, verdict."""
    table = []
    for claim in CLAIMS:
        if claim.family == family:
            head = [claim.place, claim.text, claim.paper]
            for one in findings(claim, folder):
                table.append([*head, one.setting, one.here, one.verdict])
                head = ["", "", ""]
    return table


def tally(family: str, folder: Path = RESULTS) -> str:
    """How many findings of a family have each verdict, in words."""
    number = Counter(verdict for *_, verdict in lines(family, folder) if verdict != "elsewhere")
    counts = [f"{number[verdict]} {verdict}" for verdict in VERDICTS if number[verdict]]
    return f"{number.total()} findings: {', '.join(counts)}"


HEADINGS = ("where", "claim", "the paper", "setting", "here", "verdict")


def main(argv: Sequence[str]) -> int:
    """Command line; see ``servegym claims --help``."""
    parser = command_parser("claims")
    parser.add_argument("family", nargs="*", help=f"which families ({', '.join(TITLES)}; all)")
    names = parser.parse_args(argv).family
    chosen = [choose("family", family_named(name).group, TITLES) for name in names]
    for family in chosen or TITLES:
        print(f"{TITLES[family]}: {tally(family)}")
    for family in chosen or TITLES:
        notes = [claims_routing.EARLIER] if family == "routing" else []
        print_table(TITLES[family], HEADINGS, lines(family), notes, left=len(HEADINGS))
    return 0
