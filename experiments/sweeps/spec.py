"""Sweep files in wandb's format ("Sweep configuration"), read and checked, without an account.

What the package's sweeps need: bayes or random, a ``metric``, ``value``, ``values`` or ``min`` and
``max`` with three distributions, and hyperband. Every other key is refused by its name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from servegym._checks import LARGEST, choose, real, whole

NEEDED = ("program", "method", "metric", "parameters")
KEYS = (*NEEDED, "name", "description", "early_terminate")
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    path: Path
    program: str  # script of the agent, relative to the root of the repository
    method: str  # how parameters are chosen
    metric: str  # name of the number in the run's log
    maximize: bool  # whether more of it is better
    constants: Mapping[str, Any]  # arguments with one value
    searched: Mapping[str, BaseDistribution]  # arguments that differ between runs
    min_iter: int  # evaluations before hyperband may stop a run; 0 never stops one
    eta: int  # hyperband's reduction factor

    @property
    def module(self) -> str:
        """Import name of the program, as in ``servegym.agents.sac_han``."""
        return "servegym." + ".".join(Path(self.program).with_suffix("").parts)


def list_sweeps() -> list[str]:
    """Names of the sweeps that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_sweep(name: str | Path) -> Sweep:
    """Read a sweep file (YAML), or a shipped sweep by name.

    Raises:
        ValueError: naming the file, the key, what was given and what is allowed.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{choose('sweep', str(name), list_sweeps())}.yaml"
    if not path.is_file():
        raise ValueError(f"sweep is {str(name)!r}: no such file")
    try:
        return _checked(path, yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _checked(path: Path, content: Any) -> Sweep:
    content = _mapping("a sweep", content, KEYS)
    for key in NEEDED:
        if key not in content:
            raise ValueError(f"{key} is missing")
    method = choose("method", content["method"], ("bayes", "random"))
    metric = _mapping("metric", content["metric"], ("name", "goal"))
    name, goals = metric.get("name"), ("minimize", "maximize")
    goal = choose("metric.goal", metric.get("goal", "minimize"), goals)
    if not isinstance(name, str) or name != name.strip() or not name:
        raise ValueError(f"metric.name is {name!r}; write a text without blanks at its ends")
    constants: dict[str, Any] = {}
    searched: dict[str, BaseDistribution] = {}
    for parameter, about in _mapping("parameters", content["parameters"]).items():
        found = _parameter(f"parameters.{parameter}", about)
        if isinstance(found, CategoricalDistribution) and len(found.choices) == 1:
            constants[str(parameter)] = found.choices[0]
        else:
            searched[str(parameter)] = found
    if not searched:
        raise ValueError("parameters must have one to be searched, with values or min and max")
    keys = ("type", "min_iter", "eta")
    early = _mapping("early_terminate", content.get("early_terminate") or {}, keys)
    if early:
        choose("early_terminate.type", early.get("type"), ("hyperband",))
    least = whole("early_terminate.min_iter", early.get("min_iter", 1 if early else 0), 0)
    eta = whole("early_terminate.eta", early.get("eta", 3), 2)
    program, maximize = str(content["program"]), goal == "maximize"
    sweep = Sweep(path, program, method, name, maximize, constants, searched, least, eta)
    if not program.startswith("agents/") or importlib.util.find_spec(sweep.module) is None:
        raise ValueError(f"program is {program!r}; no agent of servegym has it")
    return sweep


def _mapping(where: str, about: Any, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A mapping with these keys; without ``keys`` it has any."""
    if not isinstance(about, dict):
        raise ValueError(f"{where} must be a mapping, as in {{value: 1}}")
    for key in about if keys else ():
        choose(f"key of {where}", key, keys)
    return about


def _parameter(where: str, about: Any) -> BaseDistribution:
    about = _mapping(where, about, ("value", "values", "min", "max", "distribution"))
    if "value" in about or "values" in about:
        values = [about["value"]] if "value" in about else about["values"]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}.values must be a list with at least one value")
        for value in values:
            if not isinstance(value, str | int | float):
                raise ValueError(f"{where}: {value!r} is no number, text, true or false")
        return CategoricalDistribution(values)
    if "min" not in about or "max" not in about:
        raise ValueError(f"{where} needs value, values, or min and max")
    low, high = about["min"], about["max"]
    for key, value in (("min", low), ("max", high)):
        real(f"{where}.{key}", value, -LARGEST)
    if low >= high:
        raise ValueError(f"{where}: min {low} is not below max {high}")
    both_whole = isinstance(low, int) and isinstance(high, int)
    laws = ("int_uniform",) if both_whole else ()
    laws = (*laws, "uniform", *(("log_uniform_values",) if low > 0 else ()))
    law = choose(f"{where}.distribution", about.get("distribution", laws[0]), laws)
    if law == "int_uniform":
        return IntDistribution(low, high)
    return FloatDistribution(float(low), float(high), log=law == "log_uniform_values")
