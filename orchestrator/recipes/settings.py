"""What the train calls of a job get: the recipe's settings, the job's over them, checked before anything runs."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from functions.base.chat import Chat
from functions.base.suggest import did_you_mean
from functions.base.wire import Json
from functions.call.function import FatalError
from functions.call.train_params import OWN, ROLLOUT_BOUNDS, TrainParams
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig, elsewhere
from orchestrator.job.roles import BY_NAME, TRAINERS
from orchestrator.job.sections import OptimConfig
from orchestrator.recipes.base import Recipe


def train_settings(job: JobConfig, recipe: Recipe) -> dict[str, TrainParams]:
    """What each model that the recipe trains is trained with, complete. Raises ConfigError naming the key."""
    for name, config in job.functions.items():
        if job.deterministic and BY_NAME[name].kind == "train" and config.replicas > 1:
            raise ConfigError(
                f"functions.{name}.replicas: got {config.replicas}, deterministic = true wants 1: "
                "the sums of a gang of ranks agree with those of one to 1e-6, not to the bit"
            )
    for key in job.algorithm:
        if key in OWN:
            raise ConfigError(f"algorithm.{key}: is set by [train], [rollout] or [model], not here")
        if key not in (known := [field.name for field in fields(TrainParams) if field.name not in OWN]):
            hint = did_you_mean(key, known, within="algorithm.") or f"; the keys here are {', '.join(known)}"
            raise ConfigError(f"algorithm.{key}: unknown key{elsewhere(key) or hint}")
    rank, weights = job.model.lora_rank, {"score": {"weights": dict(found)}} if (found := job.reward.weighting) else {}
    settings = merged(merged(_kept_settings(job, recipe), weights), job.algorithm) | {
        "temperature": job.rollout.temperature or 1.0,
        "top_p": job.rollout.top_p if job.rollout.temperature else 1.0,  # greedy: of the whole distribution
        "top_k": job.rollout.top_k if job.rollout.temperature else 0,
        **_of_sampling(job),
        "max_response_length": job.rollout.max_response_length,
        "max_rollout_logprob_diff": rollout_diff(job, recipe),
        "epochs": job.train.epochs,
        "mini_batches": job.train.mini_batches,
        "micro_batch_tokens": job.train.micro_batch_tokens,
        "gradient_checkpointing": job.train.gradient_checkpointing,
        "dtype": job.model.dtype,
        "lora": {"rank": rank, "alpha": job.model.lora_alpha} if rank else None,
    }
    trained = [role for model, role in TRAINERS.items() if model in {"actor", *recipe.models}]
    optimizers = {"policy": _optimizer(job, job.train), "value": _optimizer(job, job.critic)}
    try:
        return {
            role.model: _without_idle_kl(TrainParams.from_json({
                **settings, "model": role.model, "objective": role.objective, "optimizer": optimizers[role.objective],
            }))
            for role in trained if role.objective is not None
        }  # fmt: skip
    except FatalError as error:
        raise ConfigError(str(error).replace("params", "algorithm", 1)) from error


def _of_sampling(job: JobConfig) -> Json:
    """What else log-probabilities are compared under, where the job says anything. Raises ConfigError."""
    found: Json = {}
    if job.rollout.min_p and job.rollout.temperature:
        found["min_p"] = job.rollout.min_p
    if job.rollout.repetition_penalty != 1:
        found["repetition_penalty"] = job.rollout.repetition_penalty
    if job.rollout.bad_words:
        try:
            found["banned"] = Chat.load(Path(job.model.path)).words(job.rollout.bad_words)
        except ValueError as error:
            raise ConfigError(f"model.path: {error}") from error
    return found


def _kept_settings(job: JobConfig, recipe: Recipe) -> Json:
    """The recipe's, without the options of a loss or an advantage that the job replaces by another."""
    own = recipe.settings
    replaced = [key for key in ("loss", "advantage") if job.algorithm.get(key, own.get(key)) != own.get(key)]
    return {name: value for name, value in own.items() if name.removesuffix("_options") not in replaced}


def rollout_diff(job: JobConfig, recipe: Recipe | None = None) -> Any:
    """max_rollout_logprob_diff of the job; where it says none, room for an engine of fewer bits than the trainer."""
    said = {**(recipe.settings if recipe else {}), **job.algorithm}.get("max_rollout_logprob_diff")
    halved = job.rollout.engine == "vllm" and job.rollout.vllm.get("dtype", "float32") != "float32"
    return ROLLOUT_BOUNDS["bfloat16"] if said is None and halved else said


def _without_idle_kl(params: TrainParams) -> TrainParams:
    """A penalty of coefficient 0 is none: nobody is asked for the reference's log-probabilities."""
    return replace(params, kl=None) if params.kl is not None and not params.kl.coef else params


def _optimizer(job: JobConfig, config: OptimConfig) -> Json:
    """JSON of OptimizerParams; a schedule ends with the job."""
    settings = config.model_dump(include=set(OptimConfig.model_fields))
    return settings | {"total_steps": job.steps * job.train.epochs * job.train.mini_batches}


def streamed_functions(
    settings: Mapping[str, TrainParams], functions: Iterable[str], *, deterministic: bool
) -> frozenset[str]:
    """The train functions among them that may begin before all samples are there (a deterministic job has none)."""
    streams = frozenset(TRAINERS[model].name for model, params in settings.items() if params.streams)
    return frozenset() if deterministic else streams & frozenset(functions)


def job_models(recipe: Recipe, settings: Mapping[str, TrainParams]) -> tuple[str, ...]:
    """The recipe's models, and the reference where a KL penalty asks for it."""
    needed = () if settings["actor"].kl is None or "reference" in recipe.models else ("reference",)
    return (*recipe.models, *needed)


def recipe_options(job: JobConfig, recipe: Recipe) -> Json:
    """The recipe's options, the job's over them. Raises ConfigError for one that the recipe does not have."""
    for key in job.recipe_options:
        if key not in recipe.options:
            hint = did_you_mean(key, recipe.options) or f" (it has {', '.join(recipe.options) or 'none'})"
            raise ConfigError(f"recipe_options.{key}: recipe {recipe.name!r} has no such option{hint}")
    return {**recipe.options, **job.recipe_options}


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Json:
    """`over` on top of `under`; tables are merged, everything else replaced."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
