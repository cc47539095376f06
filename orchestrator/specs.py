"""The functions of a job: which there are, what each is told, what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.config import JobConfig
from orchestrator.planner.base import FunctionLimits
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


def function_limits(job: JobConfig, specs: list[FunctionSpec]) -> dict[str, FunctionLimits]:
    return {
        spec.name: FunctionLimits(spec.max_replicas, spec.usd_per_hour, spec.gpus, max_batch=job.rollout.slots)
        for spec in specs
    }
