"""The functions of a job: which there are, what each is told, what each costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.config import JobConfig
from orchestrator.errors import ConfigError
from orchestrator.planner.base import FunctionLimits
from orchestrator.planner.devices import device, kv_capacity_tokens
from orchestrator.planner.model_shape import read_shape
from orchestrator.platforms.base import FunctionSpec
from orchestrator.versions import CRITICS


def function_specs(job: JobConfig, models: Sequence[str]) -> list[FunctionSpec]:
    """In the order in which a step first uses them."""
    model = {"dtype": job.model.dtype}
    engine = {"engine": job.rollout.engine, "slots": job.rollout.slots, "deterministic": job.deterministic}
    vllm = {"vllm": dict(job.rollout.vllm)} if job.rollout.vllm else {}
    specs = [_spec(job, "generate", "generate", model | engine | vllm), _spec(job, "reward", "reward", {})]
    if "reference" in models:
        specs.append(_spec(job, "reference", "reference", model))
    critics = [critic for critic in CRITICS if critic in models]
    specs += [_spec(job, critic, "reference", model) for critic in critics]
    specs += [_spec(job, f"train-{critic}", "train", {}) for critic in critics]
    return [*specs, _spec(job, "train", "train", {})]


def _spec(job: JobConfig, name: str, kind: str, options: dict[str, Any]) -> FunctionSpec:
    config = job.function(name)
    return FunctionSpec(
        name=name,
        kind=kind,
        options=options,
        max_replicas=config.replicas,
        gpus=config.gpus,
        cpus=config.threads,
        memory_gb=config.memory_gb,
        usd_per_hour=config.usd_per_hour,
    )


def function_limits(job: JobConfig, specs: Sequence[FunctionSpec]) -> dict[str, FunctionLimits]:
    """Raises ConfigError for a model that the GPUs of one replica cannot hold, or whose shape cannot be read."""
    kv = kv_tokens(job)
    return {
        spec.name: FunctionLimits(
            spec.max_replicas, spec.usd_per_hour, spec.gpus, max_batch=job.rollout.slots,
            kv_tokens=kv if spec.kind == "generate" else None,
        )
        for spec in specs
    }  # fmt: skip


def kv_tokens(job: JobConfig) -> int | None:
    """Keys and values that one replica of generate has room for; None: not known, or (torch, transformers) no limit
    but the slots. vLLM's `kv_cache_mb`, or what `planner.gpu` has beside the weights.
    """
    size_mb, gpu = job.rollout.vllm.get("kv_cache_mb"), job.planner.gpu
    if job.rollout.engine not in ("auto", "vllm") or (size_mb is None and gpu is None):
        return None
    gpus = job.function("generate").gpus
    try:
        shape = read_shape(Path(job.model.path), bytes_per_value=4 if job.model.dtype == "float32" else 2)
        if size_mb is not None:  # of each GPU
            return max(1, gpus) * int(size_mb) * 2**20 // shape.kv_bytes_per_token
        assert gpu is not None, "one of both is set"
        return kv_capacity_tokens(device(gpu), shape, gpus, usable=job.rollout.vllm.get("memory_fraction", 0.9))
    except ValueError as error:
        raise ConfigError(f"functions.generate.gpus: {error}") from None


def check_room(job: JobConfig, limits: FunctionLimits, longest_prompt: int) -> None:
    """Raises ConfigError where the longest sample that the job allows has no room in one replica of generate, or is
    longer than what the model was made for.
    """
    rooms = {"one replica of generate has room for": limits.kv_tokens, "the model's context is": _context(job)}
    longest = longest_prompt + job.rollout.max_response_length
    for what, room in rooms.items():
        if room is not None and longest > room:
            most = room - longest_prompt
            wanted = f"at most {most}" if most > 0 else f"shorter prompts: the longest has {longest_prompt} tokens"
            raise ConfigError(
                f"rollout.max_response_length: a sample may have {longest} tokens, {what} {room} (wants {wanted})"
            )


def _context(job: JobConfig) -> int | None:
    """None: the model's config names none."""
    config = json.loads((Path(job.model.path) / "config.json").read_bytes())
    found = config.get("text_config", config).get("max_position_embeddings")
    return found if isinstance(found, int) else None
