"""What the train calls of a job get: recipe and job over the defaults, complete and checked before anything runs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from functions.base.wire import Json
from functions.call.train_params import KlParams, LoraParams, OptimizerParams, TrainParams
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.job.sections import ModelConfig, OptimConfig, TrainConfig
from orchestrator.recipes import RECIPES, find_recipe
from orchestrator.recipes.settings import job_models, streamed_functions, train_settings


def job(recipe: str, base: Path, **tables: Json) -> JobConfig:
    needed: Json = {"name": "j", "steps": 5, "recipe": recipe, "model": {"path": "m"}, "data": {"train": "t"}}
    return parse_job(needed | {key: needed.get(key, {}) | table for key, table in tables.items()}, base=base)


def settings(recipe: str, base: Path, **tables: Json) -> dict[str, TrainParams]:
    return train_settings(job(recipe, base, **tables), find_recipe(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_penalty_of_which_the_job_says_only_the_coefficient_is_complete(recipe: str, tmp_path: Path) -> None:
    found = settings(recipe, tmp_path, algorithm={"kl": {"coef": 0.02}})
    own = RECIPES[recipe].settings.get("kl", {})
    wanted = KlParams(where=own.get("where", KlParams.where), kind=own.get("kind", KlParams.kind), coef=0.02)
    assert {params.kl for params in found.values()} == {wanted}
    assert "reference" in job_models(RECIPES[recipe], found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_penalty_unless_the_job_asks_for_one(recipe: str, tmp_path: Path) -> None:
    assert all(params.kl is None for params in settings(recipe, tmp_path).values())


def test_a_users_recipe_without_kl(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from orchestrator.recipes import recipe\n\n@recipe(paper='none')\nasync def own(step):\n    '''Own.'''\n"
    )
    found = settings(f"{file}:own", tmp_path, algorithm={"kl": {"kind": "k2"}})
    assert found["actor"].kl == KlParams(kind="k2"), "the coefficient is the default"


def test_each_model_has_its_objective_and_its_optimizer(tmp_path: Path) -> None:
    found = settings("safe_rlhf", tmp_path, train={"lr": 3e-4, "mini_batches": 2}, critic={"lr": 7e-4})
    assert {model: (p.model, p.objective, p.optimizer.lr) for model, p in found.items()} == {
        "actor": ("actor", "policy", 3e-4),
        "critic": ("critic", "value", 7e-4),
        "cost-critic": ("cost-critic", "value", 7e-4),
    }
    assert {p.optimizer.total_steps for p in found.values()} == {10}, "5 steps of 2 mini-batches: a schedule's end"


def test_what_streams(tmp_path: Path) -> None:
    every = ("generate", "reward", "train-critic", "train")
    assert streamed_functions(settings("grpo", tmp_path), every, deterministic=False) == {"train"}
    assert streamed_functions(settings("ppo", tmp_path), every, deterministic=False) == {"train-critic"}
    assert streamed_functions(settings("ppo", tmp_path), every, deterministic=True) == set()


def test_adapters_of_a_critic_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora: adapters are for the policy objective"):
        settings("ppo", tmp_path, model={"lora_rank": 2})


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"kl": 1}, r"algorithm\.kl: got 1, wants an object"),
        ({"kl": {"kind": "k9"}}, r"algorithm\.kl: kind: got 'k9', wants one of k1, k2"),
        ({"loss": "vanila"}, r"algorithm: loss: got 'vanila', wants one of vanilla"),
        ({"optimizer": {"lr": 1.0}}, r"algorithm\.optimizer: is set by \[train\]"),
    ],
)
def test_refused(algorithm: Json, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        settings("grpo", tmp_path, algorithm=algorithm)


def test_a_setting_has_one_default() -> None:
    """What a job's section says where it is silent is what a train call says where it is silent."""
    sections = ((OptimConfig, OptimizerParams()), (TrainConfig, TrainParams()), (TrainConfig, OptimizerParams()))
    for section, params in sections:
        both = {field.name for field in fields(params)} & set(section.model_fields)
        assert both
        for name in both - ({"optimizer"} if isinstance(params, TrainParams) else set()):  # there all its settings
            assert section.model_fields[name].default == getattr(params, name), name
    assert ModelConfig.model_fields["lora_alpha"].default == LoraParams(rank=1).alpha
    assert ModelConfig.model_fields["dtype"].default == TrainParams().dtype


def test_over_and_back(tmp_path: Path) -> None:
    given = settings("safe_rlhf", tmp_path, algorithm={"kl": {"coef": 0.1}}, model={"dtype": "bfloat16"})["cost-critic"]
    changed = given.over({"cost": None, "score": {"column": "cost"}, "values": "cost_values"})
    assert (changed.cost, changed.score.column, changed.values) == (None, "cost", "cost_values")
    assert changed.over({"cost": given.to_json()["cost"], "score": {}, "values": "values"}) == given
