"""What a recipe is: an algorithm's dataflow in a few lines, and the settings that make it that algorithm.

    @recipe(paper="Shao et al. 2024, arXiv 2402.03300", advantage="grpo", policy_loss="vanilla")
    async def grpo(step: Step) -> None:
        samples = step.generate()
        step.train("actor", samples, step.reward(samples))

A user's own recipe is such a function in a Python file, named in the job: recipe = "my_recipe.py:my_function".
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.step import Step

Dataflow = Callable[[Step], Awaitable[None]]


@dataclass(frozen=True)
class Recipe:
    name: str
    dataflow: Dataflow
    paper: str
    models: tuple[str, ...]
    """The models it trains or asks: "actor" always, "reference", "critic", "cost-critic"."""
    settings: Mapping[str, Any]
    """Settings of the train function that make it this algorithm; a job's [algorithm] overrides them."""

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.dataflow) or "").split("\n", 1)[0]


def recipe(*, paper: str, models: tuple[str, ...] = ("actor",), **settings: Any) -> Callable[[Dataflow], Recipe]:
    """Makes a dataflow function a Recipe of the function's name."""

    def decorate(dataflow: Dataflow) -> Recipe:
        name: str = dataflow.__name__
        return Recipe(name, dataflow, paper, models, settings)

    return decorate


def recipe_from_file(path: Path, name: str) -> Recipe:
    """The recipe `name` of a user's Python file. Raises ConfigError in one line."""
    if not path.is_file():
        raise ConfigError(f"recipe: {path}: no such file")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None, "a .py file"
    assert spec.loader is not None, "a .py file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"recipe: {path}: cannot be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, Recipe):
        recipes = [key for key, value in vars(module).items() if isinstance(value, Recipe)]
        has = ", ".join(recipes) or "none"
        raise ConfigError(f"recipe: {path} has no recipe {name!r} (it has {has}); decorate it with @recipe(...)")
    return found
