"""Writes the pages that come from the code; mkdocs runs it (`mkdocs build`).

A page a family of environments: a rendered frame, the docstrings, then what this folder's page says
of its data. Agents: curves and results of their trainings, the module's docstring and the model
cards. Baselines: the registry. Results: the pictures drawn from the tables in
``experiments/results``. The home page is the README, and so on: nothing is written twice.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import re
import tempfile
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import gymnasium
import mkdocs_gen_files
import numpy as np
from safetensors import safe_open

from servegym.agents.lib.checkpoint import AGENTS, shipped
from servegym.baselines.registry import list_policies
from servegym.envs.families import FAMILIES
from servegym.experiments.bench import short
from servegym.experiments.evaluation.leaderboard import markdown, read_board
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.fidelity.report import draw as draw_fidelity
from servegym.experiments.papers.claims import HEADINGS, TITLES, tally
from servegym.experiments.papers.claims import lines as claim_lines
from servegym.experiments.papers.plotting import as_png, label_ends, legend, pyplot
from servegym.experiments.papers.study import draw, list_pictures
from servegym.experiments.papers.verdicts import judge
from servegym.experiments.render import render_episode
from servegym.experiments.train_and_compare import CURVE, TABLE, plot

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"


def write(path: str, text: str) -> None:
    """One page; in a table an interval is not broken."""
    lines = [
        re.sub(r" \[([-+.\d]+), ([-+.\d]+)\]", " [\\1,\u00a0\\2]", line)
        if line[:1] == "|"
        else line
        for line in text.rstrip().split("\n")
    ]
    with mkdocs_gen_files.open(path, "w") as stream:
        stream.write("\n".join(lines) + "\n")
    print(f"docs: {path}", flush=True)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], right: Collection[int] = ()
) -> list[str]:
    """A Markdown table; the columns of the indexes ``right`` are right aligned."""
    rules = ["---:" if k in right else "---" for k in range(len(headings))]
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (headings, rules, *cells)]


def fenced(text: str) -> str:
    """A docstring as Markdown: doctest examples as code blocks, which it takes for quotations."""
    out, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith((">>>", "...")) or (block and line.strip()):
            block.append(line)
            continue
        if block:
            out += ["```pycon", *block, "```"]
            block = []
        out.append(line.removesuffix(":") if line.endswith("::") else line)
    return "\n".join(out)


def picture(env_id: str) -> bytes:
    """A frame of an episode as PNG."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        file = Path(folder) / "frame.png"
        render_episode(env_id, None, None, {}, out=file)
        return file.read_bytes()


def documented(cls: type, anchors: Mapping[str, str]) -> str:
    """A class's docstring as Markdown, its headings a level down, the pages it names as links."""
    text = demoted(fenced(inspect.cleandoc(cls.__doc__ or "")))
    text = re.sub(r"`docs/([\w-]+)\.md`", r"[\1](\1.md)", text)
    for name, anchor in anchors.items():
        if name != cls.__name__:
            text = text.replace(f"`{name}`", f"[`{name}`](#{anchor})")
    return text


PAGES = {"routing": "routing", "prefix": "prefix-routing"}
"""Group of a family -> its page, where that has another name."""
VIEWS = ("summary", "flat", "graph")
"""The first of these that a family has is the id to start with."""


def environments() -> list[dict[str, str]]:
    """A page a family: problem, picture, an id a section, the first to start with; the data."""
    nav = []
    for family in sorted(
        FAMILIES, key=lambda one: [*PAGES].index(one.group) if one.group in PAGES else 9
    ):
        start = next(view for view in VIEWS if view in family.views)
        order = dict.fromkeys([start, "graph", *family.views])
        classes = {
            env_id: gymnasium.make(env_id).unwrapped.__class__
            for env_id in map(family.view_id, order)
        }
        if family.parallel:
            function = importlib.import_module(f"servegym.envs.{family.name}").parallel_env
            classes[f"PettingZoo: servegym.envs.{family.name}.parallel_env"] = get_type_hints(
                function
            )["return"]
        anchors = {
            cls.__name__: re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title, cls in classes.items()
        }
        page = PAGES.get(family.group, family.group)
        with mkdocs_gen_files.open(f"{page}.png", "wb") as stream:
            stream.write(picture(family.view_id(start)))
        render = importlib.import_module(f"servegym.envs.{family.name}.render")
        caption = " ".join((render.__doc__ or "").split())
        lines = [f"# {family.heading}", ""]
        for title, cls in classes.items():
            text = documented(cls, anchors)
            if len(lines) == 2:
                problem, _, text = text.partition("\n\n")
                lines += [problem, "", "<figure markdown>", f"![A rendered frame]({page}.png)"]
                lines += [f"<figcaption>{caption}</figcaption>", "</figure>", ""]
            lines += [f"## {title}", "", text, ""]
        world = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        lines += ["## The data", "", demoted(with_tables(world, family.group))]
        write(f"{page}.md", "\n".join(lines))
        nav.append({family.title: f"{page}.md"})
    return nav


TRAININGS: dict[str, tuple[str, ...]] = {
    "ppo": ("routing/learning_ppo",),
    "ppo_requests": ("prefix/learning",),
    "sac_rows": ("routing/learning_sac_rows",),
    "sac_han": ("routing/learning_sac_han",),
    "td_afterstates": ("routing/learning_td_afterstates",),
    "ppo_serverless": ("serverless/learning",),
    **dict.fromkeys(
        ("ppo_placement", "mappo_placement"),
        ("placement/learning_edge_hetero", "placement/learning_paper_testbed"),
    ),
}
"""Agent -> tables of its trainings with several seeds."""
METRICS = {
    "qos": "average QoS of validation episodes",
    "val_reward": "mean reward of a validation request",
    "val_latency_s": "mean latency of validation episodes, s",
    "attainment": "share within both objectives, validation episodes",
}
"""Column of a learning curve -> its name."""


def curves_of(table: str) -> list[dict[str, Any]]:
    """The learning curves of a table: rows with ``policy`` and ``training``, rules without."""
    path = RESULTS / f"{table.replace('/learning', '/learning_curves')}.csv"
    rows = read_rows(path if path.exists() else RESULTS / f"{table}.csv")
    for row in rows:
        if "run" in row:  # seed_1 is a training of the table's only agent
            row["policy"], _, number = row["run"].partition("_")
            row["policy"] = "ppo_serverless" if row["policy"] == "seed" else row["policy"]
            row["policy"] = row["run"] if not number.isdecimal() else row["policy"]
        row["training"] = row.get("training", row.get("seed", row.get("run")))
    return [row for row in rows if row.get("split", "val") == "val"]


def trainings(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """The evaluations of each training at each rate."""
    runs: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["cpu_s"] != "":
            key = row["policy"], row["training"], row.get("rate")
            runs.setdefault(key, []).append(row)
    return runs


def draw_curves(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG: a line a training by processor seconds, dashed the rules in the range it reaches."""
    y = next(column for column in METRICS if column in rows[0])
    rates = list(dict.fromkeys(row.get("rate") for row in rows))
    size = (max(5.2 * len(rates), 8.0), 4.4)
    figure, axes = pyplot().subplots(1, len(rates), figsize=size, squeeze=False)
    figure.set_layout_engine("constrained")
    for axis, rate in zip(axes.flat, rates, strict=True):
        part = [row for row in rows if row.get("rate") == rate]
        runs, colours = trainings(part), iter(("black", "tab:blue"))
        looks: dict[str, dict[str, Any]] = {}
        for (name, *_), run in runs.items():
            if name not in looks:
                shuffled = {"color": "0.6", "linestyle": ":", "label": "shuffled rewards"}
                plain = {"color": next(colours, "C1"), "marker": ".", "ms": 3, "label": name}
                looks[name] = shuffled if "shuffled" in name else plain
            axis.plot([r["cpu_s"] for r in run], [r[y] for r in run], linewidth=1, **looks[name])
            looks[name]["label"] = None  # once in the legend
        learned = [run[1:] or run for (name, *_), run in runs.items() if "shuffled" not in name]
        reached = [row[y] for run in learned for row in run]
        low, high = min(reached), max(reached)
        room = 3 * (high - low) or np.inf
        rules = {row["policy"]: row[y] for row in part if row["cpu_s"] == ""}
        near = {k: v for k, v in rules.items() if low - room <= v <= high + room}
        low, high = min([low, *near.values()]), max([high, *near.values()])
        margin = 0.06 * (high - low) or 1.0
        axis.set(xlim=(0, None), ylim=(low - margin, high + margin))
        axis.set(xlabel="processor seconds of the training")
        axis.set_title("" if rate is None else f"{rate:g} requests/s", fontsize=10)
        levels = {name: f"C{1 + k}" for k, name in enumerate(near)}
        for name, value in near.items():
            axis.axhline(value, color=levels[name], linestyle="--", linewidth=1)
        label_ends(axis, near, levels)
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel(METRICS[y])
    legend(figure, axes[0, 0])
    return as_png(figure)


def trained(name: str, table: str) -> list[str]:
    """What a table says of an agent: learning curves, seconds, the first finding, the command."""
    others, record = set(AGENTS) - {name}, read_record(RESULTS / f"{table}.csv")
    rows = [r for r in curves_of(table) if r["policy"].removesuffix("_shuffled") not in others]
    file = f"{name}/{table.replace('/', '_')}.png"
    with mkdocs_gen_files.open(f"agents/{file}", "wb") as stream:
        stream.write(draw_curves(rows))
    own = [(row["training"], row["cpu_s"]) for row in rows if row["policy"] == name]
    seconds = dict(sorted(own, key=lambda one: one[1])).values()  # the last of each training
    text = f"{len(seconds)} trainings from random weights, {min(seconds):.0f} to "
    text += f"{max(seconds):.0f} s of a core each ({origin(record)}). "
    text += "Dashed: rules on the same validation episodes."
    lines = [f"![Learning curves of {name}]({file})", "", text, "", record["notes"][0]["text"], ""]
    return [*lines, "```sh", record["command"].replace(" (code:", "  # (code:"), "```", ""]


def agents() -> list[dict[str, str]]:
    """A page an agent: its trainings, then, in CleanRL's form, what it is."""
    nav = []
    for name in AGENTS:
        path = ROOT / "agents" / f"{name}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = [f"# {name}", ""]
        for table in TRAININGS.get(name, ()):
            lines += trained(name, table)
        lines += ["## Description", "", fenced(ast.get_docstring(tree) or ""), "", "## Usage", ""]
        lines += ["```sh", f"python agents/{name}.py --seed 1", "```", ""]
        for family in FAMILIES:
            for checkpoint, file in shipped(family.name).items():
                if written_by(file) == name:
                    card = demoted(file.with_suffix(".md").read_text(encoding="utf-8"))
                    lines += [f"## Checkpoint `{checkpoint}`", "", card, ""]
        write(f"agents/{name}.md", "\n".join(lines))
        nav.append({name: f"agents/{name}.md"})
    return nav


def written_by(file: Path) -> str:
    """The agent that a checkpoint names in its metadata."""
    with safe_open(file, "np") as stream:
        return stream.metadata()["agent"]


def demoted(markdown: str) -> str:
    """A card's headings two levels down, without its YAML head and its title."""
    lines = re.sub(r"\A---\n.*?^---\n", "", markdown, flags=re.DOTALL | re.MULTILINE).splitlines()
    lines = lines[1:] if lines and lines[0].startswith("# ") else lines
    return "\n".join(f"#{line}" if re.match(r"#+ ", line) else line for line in lines)


def baselines() -> None:
    """A table a family, from the registry and the shipped checkpoints."""
    lines = [
        "# Baselines",
        "",
        "The code of a family is in `baselines/FAMILY`, with the equations.",
    ]
    for family, title in ((one.name, one.title) for one in FAMILIES):
        body = [
            (f"`{info.name}`", info.description + " (clairvoyant)" * info.clairvoyant)
            for info in list_policies(family)
        ]
        for name, file in shipped(family).items():
            agent = written_by(file)
            body.append((f"`{name}`", f"trained by [{agent}](agents/{agent}.md)"))
        lines += ["", f"## {title}", "", *table(("name", "what it does"), body)]
    write("baselines.md", "\n".join(lines))


def origin(record: dict[str, Any]) -> str:
    """Machine and date of a result."""
    machine = [record.get("machine", {}).get(key) for key in ("system", "cpu")]
    return ", ".join(str(one) for one in (*machine, record.get("date")) if one)


ROWS = 3
"""Rows of a point of the leaderboard on a page, besides the plain ones."""


def named(stem: str) -> str:
    """A heading for a result: ``fig12_rate`` is Figure 12: rate, ``policies`` is Policies."""
    match = re.match(r"(fig|table)([\d_]*\d[a-z]?)_(.+)", stem)
    if match is None:
        return stem.replace("_", " ").capitalize()
    kind = {"fig": "Figure", "table": "Table"}[match[1]]
    number = "/".join(part.lstrip("0") for part in match[2].split("_"))
    return f"{kind} {number}: {match[3].replace('_', ' ')}"


def place(path: Path) -> tuple[Any, ...]:
    """Order of the results: figures and tables as in the paper, then what goes beyond it."""
    parts = [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path.stem)]
    return parts[0] not in ("fig", "table"), *parts


def claims() -> None:
    """The counts and the rule of the papers' claims; what differs on demand."""
    rule = inspect.cleandoc(judge.__doc__ or "").partition("\n\n")[2].partition("Args:")[0]
    lines = [
        "# The papers' claims",
        "",
        "`servegym claims` prints every claim beside what was measured. A claim without a figure",
        "agrees where it holds in every case looked at, *in part* where it holds in some.",
        "*Elsewhere* is no verdict: the paper does not name these models, fees, cards, fleets or",
        "rates. A change of a percentage is judged by this rule.",
        "",
        rule.strip(),
        "",
    ]
    for family, title in TITLES.items():
        claimed, said = [], [""]
        for *claim, setting, here, verdict in claim_lines(family):
            said = claim if claim[0] else said  # a claim's first finding says what it claims
            if verdict in ("disagrees", "in part"):
                claimed.append((*said, setting, here, verdict))
        lines += [f"## {title}", "", f"{tally(family)}.", "", '??? note "What differs"', ""]
        lines += [f"    {line}" for line in table(HEADINGS, claimed)] + [""]
    write("claims.md", "\n".join(lines))


def results() -> list[dict[str, str]]:
    """A page a family of results: the pictures, each with its first finding."""
    nav = []
    for family, title in ((one.group, one.title) for one in FAMILIES):
        studies = list_pictures(family)
        pictures = {stem: draw(study, RESULTS / family) for stem, study in studies.items()}
        for table in {table for tables in TRAININGS.values() for table in tables}:
            group, stem = table.split("/")
            if group == family:
                pictures[stem] = draw_curves(curves_of(table))
        if (RESULTS / family / f"{TABLE}.csv").exists():
            tables = [read_rows(RESULTS / family / f"{name}.csv") for name in (CURVE, TABLE)]
            pictures[TABLE] = plot(*tables)
        text = f"`servegym figures {family}` makes the figures of the paper; each table in "
        text += f"`experiments/results/{family}` names its command."
        lines = [f"# Results: {title}", "", text, ""]
        for path in sorted((RESULTS / family).glob("*.json"), key=place):
            record = read_record(path)
            png = pictures.get(path.stem)
            if png is None or not record["notes"]:
                continue
            with mkdocs_gen_files.open(f"results/{family}/{path.stem}.png", "wb") as stream:
                stream.write(png)
            link = f"{family}/{path.stem}.png"  # a narrow page links to its full size
            lines += [f"## {named(path.stem)}", "", f"[![{path.stem}]({link})]({link})", ""]
            lines += [record["notes"][0]["text"].partition(". ")[0].rstrip(".") + ".", ""]
        write(f"results/{family}.md", "\n".join(lines))
        nav.append({title: f"results/{family}.md"})
    return nav


TUTORIALS = (
    "train_your_first_router",
    "compare_two_policies",
    "use_it_from_sb3",
    "add_a_policy",
    "add_a_placement_policy",
    "add_your_own_profile",
)
"""In the order in which one learns."""


def tutorials() -> list[dict[str, str]]:
    """A page a script of ``docs/tutorials``: its docstring, then the code."""
    nav = []
    for name in TUTORIALS:
        source = (ROOT / "docs" / "tutorials" / f"{name}.py").read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(source)) or ""
        title, _, text = doc.partition("\n")
        code = source.split('"""', 2)[2].strip()
        page = f"# {title.rstrip('.')}\n{text}\n\n```python\n{code}\n```\n"
        page += f"\nRun it with `python docs/tutorials/{name}.py`.\n"
        write(f"tutorials/{name}.md", page)
        nav.append({title.rstrip("."): f"tutorials/{name}.md"})
    return nav


def notebook(name: str) -> dict[str, str]:
    """A page of a notebook of ``docs/tutorials``, with what its cells printed and drew."""
    path = ROOT / "docs" / "tutorials" / f"{name}.ipynb"
    lines = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        text = "".join(cell["source"])
        lines += [text, ""] if cell["cell_type"] == "markdown" else ["```python", text, "```", ""]
        for output in cell.get("outputs", ()):
            if "text" in output:
                said = "".join(output["text"]).splitlines()
                said = [*said[:3], "..."] if len(said) > 8 else said
                lines += ["```text", *said, "```", ""]
            elif png := output["data"].get("image/png"):
                with mkdocs_gen_files.open(f"tutorials/{name}_{number}.png", "wb") as stream:
                    stream.write(b64decode(png))
                lines += [f"![What the cell draws]({name}_{number}.png)", ""]
    write(f"tutorials/{name}.md", "\n".join(lines))
    return {lines[0].partition("\n")[0].lstrip("# "): f"tutorials/{name}.md"}


def benchmarks() -> None:
    """Speeds beside their references: the table that the benchmark left, with its machine."""
    lines = [
        "# Benchmarks",
        "",
        "A speed says more about a machine than about the code, so each "
        "figure has a reference of the same run beside it; the ratio is how many times as "
        "fast as the reference it is. Processor time of one thread, medians of several "
        "timings taken in turn.",
        "",
    ]
    path = RESULTS / "bench.csv"
    record = read_record(path)
    lines += [origin(record), "", "```sh", record["command"], "```", ""]
    body = []
    for row in read_rows(path):
        value, of_it = short(row["value"]), short(row["reference_value"])
        against = f"{row['reference']}: {of_it}" if row["reference"] else ""
        body.append((row["what"], f"{value} {row['unit']}", against, short(row["ratio"])))
    lines += table(("what", "value", "reference", "ratio"), body, right=(1, 3))
    write("benchmarks.md", "\n".join(lines))


def home() -> None:
    """The README with its links turned into this site's; the repository's own files are named."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    text = re.sub(r"\[([^\]]*)\]\((?:CITATION.cff|[A-Z]+(?:.md)?)\)", r"`\1`", text)
    write("index.md", text.replace("first_steps.ipynb)", "first_steps.md)"))


def findings() -> list[dict[str, str]]:
    """The pages of this folder, with links to the tables' pages in place of their folders."""
    nav = []
    for family in FAMILIES:
        page = f"findings/{family.group}.md"
        if (ROOT / "docs" / page).exists():
            text = (ROOT / "docs" / page).read_text(encoding="utf-8")
            folder = f"](../../experiments/results/{family.group})"
            write(page, text.replace(folder, f"](../results/{family.group}.md)"))
            nav.append({family.title: page})
    return nav


def with_tables(text: str, group: str) -> str:
    """A page of this folder with its tables, which are results of a group."""

    def rows_of(match: re.Match[str]) -> str:
        rows = read_rows(RESULTS / group / f"{match[1]}.csv")
        cells = [
            [f"{x:,.10g}" if isinstance(x, float) else x for x in row.values()] for row in rows
        ]
        return "\n".join(table(tuple(rows[0]), cells))

    return re.sub(r"<!-- table: (\w+) -->", rows_of, text)


def hardware() -> None:
    """The page of this folder, with the picture of the measured run against its replay."""
    with mkdocs_gen_files.open("fidelity.png", "wb") as stream:
        stream.write(draw_fidelity(RESULTS / "fidelity"))
    alternative = "Running and waiting requests, KV use and latencies, measured and simulated"
    picture = f"![{alternative}](fidelity.png)"
    text = with_tables((ROOT / "docs" / "hardware.md").read_text(encoding="utf-8"), "fidelity")
    write("hardware.md", text.replace("<!-- picture of the measured run -->", picture))


def leaderboard() -> None:
    """The best of the committed standard evaluation."""
    write("leaderboard.md", markdown(read_board(RESULTS / "leaderboard.csv"), best=ROWS))


home()
benchmarks()
hardware()
baselines()
claims()
leaderboard()
standing = [{"Leaderboard": "leaderboard.md"}, {"Benchmarks": "benchmarks.md"}]
mkdocs_gen_files.config["nav"] = [
    {"Home": "index.md"},
    {
        "Tutorials": [
            notebook("first_steps"),
            *tutorials(),
            {"Tune your gateway's file": "tune.md"},
            {"Put a trained router before your servers": "tutorials/gateway.md"},
            {"Other libraries and machines": "interop.md"},
        ]
    },
    {"Environments": environments()},
    {"Agents": [*agents(), {"Metrics": "metrics.md"}]},
    {"Baselines": "baselines.md"},
    {"Findings": [*findings(), {"The papers' claims": "claims.md"}, {"Glossary": "glossary.md"}]},
    {"Results": [*standing, *results()]},
    {
        "Machines": [
            {"Hardware": "hardware.md"},
            {"Activations": "activations.md"},
            {"Test a gateway": "serve.md"},
            {"Real engines": "real-engines.md"},
        ]
    },
]
