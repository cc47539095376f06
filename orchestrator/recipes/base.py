"""What a recipe is: an algorithm's dataflow in a few lines, and the settings that make it that algorithm.

    @recipe(paper="Shao et al. 2024, arXiv 2402.03300", advantage="grpo", loss="vanilla")
    async def grpo(step: Step) -> None:
        samples = step.generate()
        step.train("actor", samples, step.reward(samples))

A user's own recipe is such a function in a Python file, named in the job: recipe = "my_recipe.py:my_function".
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from functions.call import userfile
from functions.call.function import FatalError
from orchestrator.base.errors import ConfigError
from orchestrator.step.step import Step

Dataflow = Callable[[Step], Awaitable[None]]


@dataclass(frozen=True)
class Recipe:
    name: str
    dataflow: Dataflow
    paper: str
    models: tuple[str, ...]
    """The models it trains or asks: "actor", "critic", "cost-critic", "reference" (which any KL penalty adds)."""
    settings: Mapping[str, Any]
    """What makes it this algorithm: TrainParams (functions/call/train_params.py); [algorithm] goes over it."""
    options: Mapping[str, Any]
    """What the dataflow itself reads, as `step.options`; [recipe_options] goes over them."""
    given: tuple[str, ...] = ()
    """Columns of the data set that hold the responses to learn from: none where the policy samples them."""
    product: str = "actor"
    """The model that the job makes."""

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.dataflow) or "").split("\n", 1)[0]


def recipe(
    *, paper: str, models: tuple[str, ...] = ("actor",), options: Mapping[str, Any] | None = None,
    given: tuple[str, ...] = (), product: str = "actor", **settings: Any,
) -> Callable[[Dataflow], Recipe]:  # fmt: skip
    """Makes a dataflow function a Recipe of the function's name."""

    def decorate(dataflow: Dataflow) -> Recipe:
        name: str = dataflow.__name__
        return Recipe(name, dataflow, paper, models, settings, dict(options or {}), given, product)

    return decorate


def recipe_from_file(name: str) -> Recipe:
    """The recipe at `<file.py>:<name>`. Raises ConfigError in one line."""
    try:
        found = userfile.load(name)
    except FatalError as error:
        raise ConfigError(f"recipe: {error}") from error
    if not isinstance(found, Recipe):
        raise ConfigError(f"recipe: {name} is no recipe; decorate it with @recipe(...)")
    return found
