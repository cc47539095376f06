"""One file per algorithm, its dataflow in a few lines. `rlhf-orchestrate recipes` lists them."""

from functions.base.suggest import did_you_mean
from orchestrator.base.errors import ConfigError
from orchestrator.recipes.base import Recipe, recipe, recipe_from_file
from orchestrator.recipes.cispo import cispo
from orchestrator.recipes.dapo import dapo
from orchestrator.recipes.distillation import distillation, topk_distillation
from orchestrator.recipes.gigpo import gigpo
from orchestrator.recipes.given import dpo, reward_model, sft
from orchestrator.recipes.grpo import dr_grpo, grpo
from orchestrator.recipes.gspo import gspo
from orchestrator.recipes.ppo import ppo
from orchestrator.recipes.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from orchestrator.recipes.remax import remax
from orchestrator.recipes.rloo import rloo
from orchestrator.recipes.safe_rlhf import safe_rlhf

RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        ppo, grpo, dr_grpo, rloo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, dapo, gspo, gigpo, cispo,
        safe_rlhf, distillation, topk_distillation, sft, dpo, reward_model,
    )
}  # fmt: skip


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or a user's own by `<file.py>:<name>`. Raises ConfigError."""
    if ".py:" in name:
        return recipe_from_file(name)
    if name not in RECIPES:
        known = f"there are {', '.join(RECIPES)}, or <file.py>:<name>"
        raise ConfigError(f"recipe: unknown {name!r}{did_you_mean(name, RECIPES)} ({known})")
    return RECIPES[name]


__all__ = ["RECIPES", "Recipe", "find_recipe", "recipe"]
