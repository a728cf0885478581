"""Sweep files in wandb's format, read and checked, so that they run with and without an account.

What is supported is what the sweeps of this package need: ``method`` bayes, random or grid; a
``metric`` with ``name`` and ``goal``; parameters by ``value``, by ``values``, or by ``min`` and
``max`` with the distributions uniform, int_uniform and log_uniform_values; ``run_cap``; and early
termination by hyperband with ``min_iter`` and ``eta``. Every other key is refused by its name. See
wandb's documentation, "Sweep configuration".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servegym._checks import LARGEST, choose, real, whole

METHODS = ("bayes", "random", "grid")
GOALS = ("minimize", "maximize")
DISTRIBUTIONS = ("uniform", "int_uniform", "log_uniform_values")
NEEDED = ("program", "method", "metric", "parameters")
KEYS = (*NEEDED, "name", "description", "early_terminate", "run_cap")
EARLY = ("type", "min_iter", "eta")
# Of wandb's keys those that are not carried out, and what to write.
_LEFT_OUT = {
    "command": "arguments beside the parameters are parameters with one value",
    "metric.target": "runs go on to their ends; leave it out",
    "early_terminate.max_iter": "write min_iter, which is max_iter / eta ** s",
    "early_terminate.s": "write min_iter, which is max_iter / eta ** s",
    "early_terminate.strict": "leave it out",
}
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Parameter:
    """One argument of the program: values, or a range."""

    name: str
    values: tuple[Any, ...] = ()  # what it may be; one value is a constant
    low: float = 0.0
    high: float = 0.0  # included
    whole: bool = False  # whether a range is of whole numbers
    log: bool = False  # whether it is uniform in the logarithm


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    path: Path
    program: str  # script of the agent, relative to the root of the repository
    method: str  # how parameters are chosen
    metric: str  # name of the number in the run's log
    maximize: bool  # whether more of it is better
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    min_iter: int = 0  # evaluations before hyperband may stop a run; 0 never stops one
    eta: int = 3  # hyperband's reduction factor
    run_cap: int | None = None  # most runs, whatever is asked for

    @property
    def module(self) -> str:
        """Import name of the program, as in ``servegym.agents.sac_han``."""
        return "servegym." + ".".join(Path(self.program).with_suffix("").parts)

    @property
    def searched(self) -> dict[str, Parameter]:
        """The parameters that differ between runs."""
        return {name: p for name, p in self.parameters.items() if len(p.values) != 1}


def list_sweeps() -> list[str]:
    """Names of the sweeps that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_sweep(name: str | Path) -> Sweep:
    """Read a sweep file (YAML), or a shipped sweep by name.

    Raises:
        ValueError: naming the file, the key, what was given and what is allowed.
    """
    import yaml

    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{choose('sweep', str(name), list_sweeps())}.yaml"
    if not path.is_file():
        raise ValueError(f"sweep is {str(name)!r}: no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    try:
        return _checked(path, content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(path: Path, content: Any) -> Sweep:
    content = _mapping("", content, KEYS)
    for key in NEEDED:
        if key not in content:
            raise ValueError(f"{key} is missing")
    method = choose("method", content["method"], METHODS)
    metric = _mapping("metric", content["metric"], ("name", "goal"))
    name, goal = metric.get("name"), choose("metric.goal", metric.get("goal", "minimize"), GOALS)
    if not isinstance(name, str) or name != name.strip() or not name:
        raise ValueError(f"metric.name is {name!r}; write a text without blanks at its ends")
    abouts = _mapping("parameters", content["parameters"])
    if not abouts:
        raise ValueError("parameters must name at least one argument")
    parameters = {str(name): _parameter(str(name), about) for name, about in abouts.items()}
    for parameter in parameters.values() if method == "grid" else ():
        if not parameter.values:
            raise ValueError(f"parameters.{parameter.name}: a grid needs values")
    early = _mapping("early_terminate", content.get("early_terminate") or {}, EARLY)
    if early:
        choose("early_terminate.type", early.get("type"), ("hyperband",))
    least = whole("early_terminate.min_iter", early.get("min_iter", 1 if early else 0), 0)
    eta = whole("early_terminate.eta", early.get("eta", 3), 2)
    cap = content.get("run_cap")
    if cap is not None:
        whole("run_cap", cap, 1)
    program = str(content["program"])
    sweep = Sweep(path, program, method, name, goal == "maximize", parameters, least, eta, cap)
    if not program.startswith("agents/") or importlib.util.find_spec(sweep.module) is None:
        raise ValueError(f"program is {program!r}; no agent of servegym has it")
    return sweep


def _mapping(where: str, about: Any, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A mapping that is carried out, key by key; without ``keys`` it has any."""
    if not isinstance(about, dict):
        raise ValueError(f"{where or 'a sweep'} must be a mapping, as in {{value: 1}}")
    for key in about if keys else ():
        place = f"{where}.{key}".lstrip(".")
        if why := _LEFT_OUT.get(place):
            raise ValueError(f"{place} is not carried out: {why}")
        choose(f"{where}.key".lstrip("."), key, keys)
    return about


def _parameter(name: str, about: Any) -> Parameter:
    where = f"parameters.{name}"
    about = _mapping(where, about, ("value", "values", "min", "max", "distribution"))
    if "value" in about or "values" in about:
        values = [about["value"]] if "value" in about else about["values"]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}.values must be a list with at least one value")
        for value in values:
            if not isinstance(value, str | int | float):
                raise ValueError(f"{where}: {value!r} is no number, text, true or false")
        return Parameter(name, tuple(values))
    if "min" not in about or "max" not in about:
        raise ValueError(f"{where} needs value, values, or min and max")
    low, high = about["min"], about["max"]
    for key, value in (("min", low), ("max", high)):
        real(f"{where}.{key}", value, -LARGEST)
    if low >= high:
        raise ValueError(f"{where}: min {low} is not below max {high}")
    both_whole = isinstance(low, int) and isinstance(high, int)
    usual = "int_uniform" if both_whole else "uniform"
    law = choose(f"{where}.distribution", about.get("distribution", usual), DISTRIBUTIONS)
    if law == "int_uniform" and not both_whole:
        raise ValueError(f"{where}: int_uniform needs whole numbers as min and max")
    if law == "log_uniform_values" and low <= 0:
        raise ValueError(f"{where}: log_uniform_values needs a min above 0")
    return Parameter(name, (), low, high, law == "int_uniform", law == "log_uniform_values")
