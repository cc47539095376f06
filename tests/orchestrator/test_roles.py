"""What follows from the table of roles: which functions a job has, and where their models start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from functions.server.kinds import KINDS
from orchestrator.job.config import parse_job
from orchestrator.job.functions import function_specs, generators, model_directory
from orchestrator.job.roles import BY_NAME, CRITICS, ROLES, TRAINERS, roles_of
from orchestrator.recipes import RECIPES


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (("actor",), ["generate", "reward", "train"]),
        (("actor", "reference"), ["generate", "reward", "reference", "train"]),
        (("actor", "critic"), ["generate", "reward", "critic", "train-critic", "train"]),
        (("cost-critic", "critic", "actor"),
         ["generate", "reward", "critic", "cost-critic", "train-critic", "train-cost-critic", "train"]),
    ],
)  # fmt: skip
def test_the_functions_of_a_job_by_its_models(models: tuple[str, ...], names: list[str]) -> None:
    assert [role.name for role in roles_of(models, tail=False)] == names
    assert [role.name for role in roles_of(models, tail=True)] == ["generate", "generate-tail", *names[1:]]


def test_the_table_is_whole() -> None:
    assert len(BY_NAME) == len(ROLES), "a name is one function's"
    assert {role.kind for role in ROLES} == set(KINDS), "kinds are those that a replica can run"
    assert all((role.kind == "train") == (role.objective is not None) for role in ROLES)
    for critic in CRITICS:
        assert TRAINERS[critic].objective == "value"
        assert [r.operation for r in ROLES if r.model == critic and r.kind == "reference"] == ["values"]
    for recipe in RECIPES.values():
        assert set(recipe.models) <= {role.model for role in ROLES}


def test_where_models_start_from(tmp_path: Path) -> None:
    table = {"name": "j", "steps": 1, "model": {"path": "m"}, "data": {"train": "t"}, "reference": {"path": "r"}}
    job = parse_job(table, base=tmp_path)
    assert model_directory(job, "actor") == ("model.path", tmp_path / "m")
    assert model_directory(job, "reference") == ("reference.path", tmp_path / "r")
    assert model_directory(job, "cost-critic") == ("model.path", tmp_path / "m"), "none of its own: the policy's"
    job = parse_job(table | {"critic": {"path": "c"}}, base=tmp_path)
    for model in CRITICS:
        assert model_directory(job, model) == ("critic.path", tmp_path / "c")
    assert generators(job) == ["generate"]
    assert [s.options for s in function_specs(job, ["actor", "critic"]) if s.kind != "generate"] == [
        {}, {"dtype": "float32"}, {}, {},
    ]  # fmt: skip
