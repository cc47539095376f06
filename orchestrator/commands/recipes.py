"""Lists the algorithms: what each is, its paper, the models it needs, and the settings that it changes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from orchestrator.recipes import RECIPES

HELP = "list the algorithms"


def arguments(_parser: ArgumentParser) -> None:
    """None."""


def execute(_given: Namespace) -> int:
    for recipe in RECIPES.values():
        print(f"{recipe.name}\n    {recipe.summary}\n    {recipe.paper}")
        settings = ", ".join(f"{key} = {value!r}" for key, value in recipe.settings.items())
        print(f"    models: {', '.join(recipe.models)}\n    settings: {settings}\n")
    return 0
