"""Lists the algorithms: what each is, its paper, the models it needs, and the settings that it changes."""

from argparse import Namespace

from orchestrator.commands.arguments import json_output, print_json
from orchestrator.recipes import RECIPES

HELP = "list the algorithms"
EXAMPLE = "rlhf-orchestrate recipes --json"


arguments = json_output


def execute(given: Namespace) -> int:
    if given.json:
        print_json(
            [
                {"name": r.name, "summary": r.summary, "paper": r.paper, "models": r.models, "settings": r.settings,
                 "options": r.options}
                for r in RECIPES.values()
            ]
        )  # fmt: skip
        return 0
    for recipe in RECIPES.values():
        print(f"{recipe.name}\n    {recipe.summary}\n    {recipe.paper}")
        settings = ", ".join(f"{key} = {value!r}" for key, value in recipe.settings.items())
        print(f"    models: {', '.join(recipe.models)}\n    settings: {settings}\n")
    return 0
