"""The traps of the package layout, each with its guard."""

import ast
import functools
import importlib
import importlib.metadata
import importlib.resources
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import gymnasium
import pytest

import servegym
from servegym._command_line import run_main

FOLDERS = ("envs", "baselines", "agents", "hardware_profiles", "experiments")
OUTSIDE = ("experiments/studies", "envs/workloads/build", "hardware_profiles/build")
"""Folders of the tree that the wheel does not hold."""


@pytest.fixture(scope="module")
def setuptools(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture(scope="module")
def sources(root):
    """The Python files of the wheel."""
    return [path for path in _files(root) if not _is_outside(root, path)]


def _files(root):
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]


def _is_outside(root, path):
    return any(path.is_relative_to(root / folder) for folder in OUTSIDE)


def _package(root, folder):
    """The import name of a folder that holds an __init__.py."""
    parts = folder.relative_to(root).parts
    return "servegym" if parts == ("envs", "_root") else ".".join(("servegym", *parts))


def test_package_list_equals_the_tree(root, setuptools, sources):
    found = {_package(root, path.parent) for path in sources if path.name == "__init__.py"}
    listed = setuptools["packages"]
    assert len(listed) == len(set(listed))
    assert found == set(listed)
    assert [path for path in sources if not (path.parent / "__init__.py").exists()] == []


def test_every_package_and_data_file_is_installed(root, setuptools, sources):
    """A folder or file that is not listed is missing from the wheel only."""
    for name in setuptools["packages"]:
        importlib.import_module(name)
    for path in sources:
        package = importlib.resources.files(_package(root, path.parent))
        assert package.joinpath(path.name).is_file(), path
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            data = path.suffix in (".json", ".npz", ".typed", ".yaml", ".safetensors")
            if path.is_file() and data and not _is_outside(root, path):
                package = importlib.resources.files(_package(root, path.parent))
                assert package.joinpath(path.name).is_file(), path


ROOMS = (
    "servegym._",
    "servegym.hardware_profiles",
    "servegym.envs.workloads",
    "servegym.envs",
    "servegym.baselines",
    "servegym.agents",
    "servegym.experiments",
)
"""What a module may import comes from its own room or one before it."""


@functools.cache
def _imported(path):
    """The full names that a file imports: of modules, and of what it takes from them."""
    names, tree = [], ast.parse(path.read_text(encoding="utf-8"))
    if path.stem == "__init__":  # what a package loads at first use, it names for type checkers
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _within(name, modules):
    """Whether a name is one of these modules or lies in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _room(module):
    matching = [k for k, room in enumerate(ROOMS) if module.startswith(room)]
    return max(matching, key=lambda k: len(ROOMS[k]), default=0)


def test_imports_run_from_right_to_left_and_in_no_circle(root):
    """Every import anywhere in a file counts, those inside functions and for types as well.

    ``from package import module`` counts as one of the package and one of the module.
    """
    modules = {}
    for path in _files(root):
        package = _package(root, path.parent)
        modules[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    arrows = {}
    for name, path in modules.items():
        arrows[name] = (set(_imported(path)) & modules.keys()) - {name}
    # The package itself reads the families' ids to register them.
    arrows["servegym"].remove("servegym.envs.families")
    back = [(a, b) for a in arrows for b in arrows[a] if _room(b) > _room(a)]
    assert back == []
    left = dict(arrows)
    while free := [name for name, to in left.items() if not to & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == [], "these import each other, or what does"


def test_the_version_is_the_same_everywhere(root):
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert servegym.__version__ == version == importlib.metadata.version("serve-gym")
    assert f"\nversion: {version}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## {version} " in (root / "CHANGELOG.md").read_text()


def test_nothing_in_the_wheel_needs_what_lies_outside_it(root, sources):
    outside = [f"servegym.{folder.replace('/', '.')}" for folder in OUTSIDE]
    needs = [path for path in sources for name in _imported(path) if _within(name, outside)]
    assert needs == []


def test_no_module_shadows_the_standard_library(sources):
    """Python puts a script's folder first on the path: agents/random.py would replace random."""
    names = {path.stem for path in sources} | {path.parent.name for path in sources}
    assert names & set(sys.stdlib_module_names) <= {"__init__", "__main__"}


def test_no_folder_is_imported_by_its_bare_name(root, sources):
    """``import envs`` from the root would register every id a second time."""
    bare = [
        (path.relative_to(root), name)
        for path in [*sources, *sorted((root / "tests").rglob("*.py"))]
        for name in _imported(path)
        if name.split(".")[0] in FOLDERS
    ]
    assert bare == []


def test_agents_do_not_import_each_other(root):
    files = sorted((root / "agents").glob("*.py"))
    agents = {f"servegym.agents.{p.stem}" for p in files if "__main__" in p.read_text()}
    assert agents
    for path in files:
        assert not [name for name in _imported(path) if _within(name, agents)], path


def test_import_is_light():
    """Importing servegym registers the ids; neither it nor profiles or catalogs load much."""
    code = """
import sys, gymnasium
import servegym
from servegym.envs.workloads import load_catalog
from servegym.experiments import cli
from servegym.hardware_profiles import load_fleet
from servegym.hardware_profiles.measure import command, link, server
load_fleet("paper-linear")
load_catalog("alpaca_eval_7b")
heavy = {"numba", "torch", "scipy", "pandas", "matplotlib", "pettingzoo", "jsonschema"}
print(sorted(heavy & set(sys.modules)))
print(sorted(key for key in gymnasium.registry if key.startswith("servegym/")))
"""
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out[0] == "[]"
    assert "servegym/LLMRouting-v1" in out[1]


def test_readme_names_every_id(root):
    ids = [key for key in gymnasium.registry if key.startswith("servegym/")]
    rows = [line for line in (root / "README.md").read_text().splitlines() if line[:1] == "|"]
    assert len(ids) >= 3
    for name in ids:
        assert any(f"`{name}`" in row for row in rows), name


def test_readme_python_runs(root):
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert len(block.strip().splitlines()) <= 12
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_readme_commands_exist(root):
    from servegym.experiments.cli import COMMANDS

    text = (root / "README.md").read_text()
    used = set(re.findall(r"^servegym (\w+)", text, re.MULTILINE))
    assert used and used <= COMMANDS.keys()
    targets = set(re.findall(r"^(\w+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", text, re.MULTILINE)) <= targets


def test_constraints_pin_everything_exactly(root):
    pins = {}
    for line in (root / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, equals, version = line.partition("==")
            assert equals and re.fullmatch(r"[\w.]+", version), line
            pins[name.lower().replace("_", "-")] = version
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # Libraries that hold Gymnasium, numpy or Pillow back are installed by hand.
    checked = [name for name in extras if name not in ("interop", "ray", "video")]
    wanted = [*project["dependencies"], *sum((extras[name] for name in checked), [])]
    for requirement in wanted:
        name = re.match(r"[\w-]+", requirement).group().lower().replace("_", "-")
        assert name in pins, requirement


def test_no_data_file_is_large(root):
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.stat().st_size <= 1_000_000, path


SCRIPTS = sorted(
    path.name
    for path in (Path(__file__).resolve().parent.parent / "agents").glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    "script",
    [
        script if script == "sac_han.py" else pytest.param(script, marks=pytest.mark.slow)
        for script in SCRIPTS
    ],
)
def test_a_script_runs_as_a_file(root, script):
    """Agents are single files: ``python agents/x.py --help`` works from anywhere."""
    path = root / "agents" / script
    done = subprocess.run(
        [sys.executable, str(path), "--help"], capture_output=True, text=True, cwd=path.anchor
    )
    assert done.returncode == 0 and "--seed" in done.stdout, done.stderr


def test_every_script_tells_a_mistake_in_one_line(root, capsys):
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            _, guard, end = path.read_text("utf-8").partition('if __name__ == "__main__":')
            if guard:
                assert "run_main(" in end or "run_agent(" in end, path

    for error, message in (
        (ValueError("rate: got 0;\n it must be above 0"), "rate: got 0; it must be above 0"),
        (ModuleNotFoundError("", name="optuna.x"), "optuna is not installed; in a checkout"),
    ):
        main = mock.Mock(side_effect=error)
        with pytest.raises(SystemExit) as end:
            run_main(main)
        told = capsys.readouterr().err
        assert end.value.code == 2 and told.count("\n") == 1
        assert told.startswith(f"servegym: error: {message}")
    with pytest.raises(KeyError):
        run_main(lambda: {}["a fault of ours stays loud"])


def test_the_readme_fits_one_page(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 1000


def test_every_table_is_named(root):
    """As ``folder/stem`` or in backticks, by a page, a card or a claim; or by a figure's module."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    pages += (root / "agents" / "checkpoints").rglob("*.md")
    pages += (root / "experiments" / "papers").rglob("*.py")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)

    def is_named(table):
        name = re.escape(table.stem)
        said = rf"\b{table.parent.name}/{name}\b|`{name}`|<!-- table: {name} -->"
        if re.match("fig|table|theorem", name):  # as the module of the figure has it
            said += rf'|"{name}[".]'
        return re.search(said, text)

    tables = list((root / "experiments" / "results").rglob("*.csv"))
    assert [table for table in tables if not is_named(table)] == []
    assert len(tables) <= 112


def test_the_command_of_a_table_names_code_and_options_of_the_tree_or_a_commit(root):
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (root / "experiments").rglob("*.py")
    )
    for path in (root / "experiments" / "results").rglob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        for made in (record, *record.get("merged", ())):
            words = shlex.split(made["command"])
            if "(code:" in words:
                assert re.search(r" \(code: commit [0-9a-f]{8}\)$", made["command"]), path
                continue
            if words[0] != "servegym":
                module = words[words.index("-m") + 1].removeprefix("servegym.")
                assert (root / f"{module.replace('.', '/')}.py").exists(), (path, module)
            for option in (word for word in words if word.startswith("--")):
                field = option[2:].replace("-", "_")  # of a record that options are made of
                assert f'"{option}"' in sources or f"    {field}: " in sources, (path, option)


def test_no_shipped_file_names_a_path_of_a_machine(root):
    machine = re.compile(rb"[\"' =](/tmp|/home|/root|/work|/Users)/")
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.suffix in (".json", ".csv", ".md", ".yaml", ".safetensors"):
                assert machine.search(path.read_bytes()) is None, path
