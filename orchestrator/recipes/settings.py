"""What every train call of a job gets: the recipe's settings, the job's over them, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from functions.base.wire import Json
from functions.call.function import FatalError
from functions.train.params import TrainParams
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig, OptimConfig
from orchestrator.recipes.base import Recipe

OWN = ("optimizer", "model", "objective", "temperature", "max_response_length", "dropped", "epochs", "mini_batches",
       "micro_batch_tokens", "dtype", "gradient_checkpointing", "lora")  # fmt: skip
"""Params that other sections of a job say."""


def train_settings(job: JobConfig, recipe: Recipe) -> Json:
    """JSON of TrainParams without model and objective. Raises ConfigError naming the key."""
    for name, config in job.functions.items():
        if job.deterministic and name.startswith("train") and config.replicas > 1:
            raise ConfigError(
                f"functions.{name}.replicas: got {config.replicas}, deterministic = true wants 1: "
                "the sums of a gang of ranks agree with those of one to 1e-6, not to the bit"
            )
    for key in job.algorithm:
        if key in OWN:
            raise ConfigError(f"algorithm.{key}: is set by [train], [rollout] or [model], not here")
    settings = merged(recipe.settings, job.algorithm)
    if not (settings.get("kl") or {}).get("coef"):
        settings["kl"] = None
    rank = job.model.lora_rank
    settings |= {
        "temperature": job.rollout.temperature or 1.0,
        "max_response_length": job.rollout.max_response_length,
        "epochs": job.train.epochs,
        "mini_batches": job.train.mini_batches,
        "micro_batch_tokens": job.train.micro_batch_tokens,
        "gradient_checkpointing": job.train.gradient_checkpointing,
        "dtype": job.model.dtype,
        "lora": {"rank": rank, "alpha": job.model.lora_alpha} if rank else None,
        "optimizer": optimizer_settings(job, job.train),
    }
    try:
        TrainParams.from_json(settings)
    except FatalError as error:
        raise ConfigError(str(error).replace("params", "algorithm", 1)) from error
    return settings


def streamed_functions(settings: Mapping[str, Any], functions: Iterable[str], *, deterministic: bool) -> frozenset[str]:
    """The train functions among them that may begin before all samples are there (a deterministic job has none)."""
    objective = {name: "policy" if name == "train" else "value" for name in functions if name.startswith("train")}
    if deterministic:
        return frozenset()
    return frozenset(
        f for f, kind in objective.items() if TrainParams.from_json({**settings, "objective": kind}).streams
    )


def job_models(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The recipe's models, and the reference where a KL penalty asks for it."""
    needed = () if settings["kl"] is None or "reference" in recipe.models else ("reference",)
    return (*recipe.models, *needed)


def optimizer_settings(job: JobConfig, config: OptimConfig) -> Json:
    """JSON of OptimizerParams; a schedule ends with the job."""
    settings = config.model_dump(include=set(OptimConfig.model_fields))
    steps = job.steps * job.train.epochs * job.train.mini_batches
    return settings | {"betas": list(config.betas), "total_steps": steps}


def recipe_options(job: JobConfig, recipe: Recipe) -> Json:
    """The recipe's options, the job's over them. Raises ConfigError for one that the recipe does not have."""
    for key in job.recipe_options:
        if key not in recipe.options:
            close = difflib.get_close_matches(key, recipe.options, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f" (it has {', '.join(recipe.options) or 'none'})"
            raise ConfigError(f"recipe_options.{key}: recipe {recipe.name!r} has no such option{hint}")
    return {**recipe.options, **job.recipe_options}


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Json:
    """`over` on top of `under`; tables are merged, everything else replaced."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
