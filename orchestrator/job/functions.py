"""The functions of a job: which there are, what each is told, what each costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig
from orchestrator.job.roles import ROLES, Role, roles_of
from orchestrator.planner.base import TAIL, FunctionLimits
from orchestrator.planner.devices import device, kv_capacity_tokens
from orchestrator.planner.model_shape import read_shape, text_config
from orchestrator.platforms.base import FunctionSpec


def function_specs(job: JobConfig, models: Sequence[str]) -> list[FunctionSpec]:
    """In the order in which a step first uses them."""
    environment = () if job.environment is None else ("environment",)
    roles = roles_of([*models, *environment], tail=TAIL in job.functions)
    if not job.steps:  # an evaluation
        roles = [role for role in roles if role.kind in ("generate", "environment", "reward")]
    return [_spec(job, role) for role in roles if role.name != "reward" or job.reward.score != "environment"]


def fused(job: JobConfig) -> bool:
    """Whether a model that trains beside the actor does so in its gang, each in the bubbles of the other's pipeline."""
    return job.function("train").parallel.pp > 1


def generators(job: JobConfig) -> list[str]:
    """The functions that generate: `generate`, and the one that a step's tail may go on with where the job has it."""
    return [role.name for role in roles_of((), tail=TAIL in job.functions) if role.kind == "generate"]


def model_directory(job: JobConfig, model: str) -> tuple[str, Path]:
    """The key that says where one of the job's models starts from, and the directory."""
    key = next(role.directory for role in ROLES if role.model == model)
    section, _, name = key.partition(".")
    own: str | None = getattr(getattr(job, section), name)
    return (key, Path(own)) if own is not None else ("model.path", Path(job.model.path))


def _options(job: JobConfig, role: Role) -> dict[str, Any]:
    """What a replica is started with."""
    tp = job.function(role.name).parallel.tp
    ranks = {"tp": tp} if role.kind in ("reference", "reward") and tp > 1 else {}
    if role.kind not in ("generate", "reference"):  # a trainer is told by its calls
        return ranks
    return ranks | {"dtype": job.model.dtype} | (_engine(job, role.name) if role.kind == "generate" else {})


def _engine(job: JobConfig, name: str) -> dict[str, Any]:
    """What the engine of a generating function is told; vLLM splits the model over all GPUs of the replica."""
    gpus = job.function(name).gpus
    vllm = dict(job.rollout.vllm) | ({"gpus": gpus} if gpus > 1 else {})
    engine = {"engine": job.rollout.engine, "slots": job.rollout.slots, "deterministic": job.deterministic}
    return engine | ({"vllm": vllm} if vllm else {})


def _spec(job: JobConfig, role: Role) -> FunctionSpec:
    config = job.function(role.name)
    return FunctionSpec(
        name=role.name,
        kind=role.kind,
        options=_options(job, role),
        max_replicas=config.replicas,
        gpus=config.gpus,
        cpus=config.threads,
        memory_gb=config.memory_gb,
        usd_per_hour=config.usd_per_hour,
    )


def function_limits(job: JobConfig, specs: Sequence[FunctionSpec]) -> dict[str, FunctionLimits]:
    """Raises ConfigError for a model that the GPUs of one replica cannot hold, or whose shape cannot be read."""
    return {
        spec.name: FunctionLimits(
            spec.max_replicas, spec.usd_per_hour, spec.gpus, max_batch=job.rollout.slots,
            kv_tokens=kv_tokens(job, spec.name) if spec.kind == "generate" else None,
        )
        for spec in specs
    }  # fmt: skip


def kv_tokens(job: JobConfig, function: str) -> int | None:
    """Keys and values that one replica of a generating function has room for; None: not known, or (torch,
    transformers) no limit but the slots. vLLM's `kv_cache_mb`, or what `planner.gpu` has beside the weights.
    """
    size_mb, gpu = job.rollout.vllm.get("kv_cache_mb"), job.planner.gpu
    if job.rollout.engine not in ("auto", "vllm") or (size_mb is None and gpu is None):
        return None
    gpus = job.function(function).gpus
    try:
        shape = read_shape(Path(job.model.path), bytes_per_value=4 if job.model.dtype == "float32" else 2)
        if size_mb is not None:  # of each GPU; a key head is on every GPU where there are more GPUs than heads
            return min(max(1, gpus), shape.kv_heads) * int(size_mb) * 2**20 // shape.kv_bytes_per_token
        assert gpu is not None, "one of both is set"
        return kv_capacity_tokens(device(gpu), shape, gpus, usable=job.rollout.vllm.get("memory_fraction", 0.9))
    except ValueError as error:
        raise ConfigError(f"functions.{function}.gpus: {error}") from None


def check_room(job: JobConfig, limits: Mapping[str, FunctionLimits], longest_prompt: int) -> None:
    """Raises ConfigError where the longest sample that the job allows has no room in one replica that generates, or is
    longer than what the model was made for.
    """
    rooms = {f"one replica of {name} has room for": limits[name].kv_tokens for name in generators(job)}
    rooms["the model's context is"] = model_context(job)
    longest = longest_prompt + job.rollout.max_response_length
    for what, room in rooms.items():
        if room is not None and longest > room:
            most = room - longest_prompt
            wanted = f"at most {most}" if most > 0 else f"shorter prompts: the longest has {longest_prompt} tokens"
            raise ConfigError(
                f"rollout.max_response_length: a sample may have {longest} tokens, {what} {room} (wants {wanted})"
            )


def check_split(job: JobConfig) -> None:
    """Raises ConfigError for a model that vLLM cannot split over a replica's GPUs: each gets whole attention heads."""
    heads = text_config(Path(job.model.path)).get("num_attention_heads")
    for name in generators(job):
        gpus = job.function(name).gpus
        if gpus > 1 and isinstance(heads, int) and heads % gpus:
            fit = ", ".join(str(n) for n in range(1, min(8, heads) + 1) if heads % n == 0)
            raise ConfigError(
                f"functions.{name}.gpus: got {gpus} for the model's {heads} attention heads (wants {fit})"
            )


def model_context(job: JobConfig) -> int | None:
    """None: the model's config names none."""
    found = text_config(Path(job.model.path)).get("max_position_embeddings")
    return found if isinstance(found, int) else None
