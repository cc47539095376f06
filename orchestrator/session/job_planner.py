"""The planner that a job file asks for: [planner] in, StaticPlanner or AdaptivePlanner out."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig
from orchestrator.job.functions import model_directory
from orchestrator.job.roles import BY_NAME
from orchestrator.planner import latency
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import TAIL, Planner
from orchestrator.planner.devices import Device, ModelShape, device, kv_capacity_tokens
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.learned import Priors
from orchestrator.planner.model_shape import read_shape
from orchestrator.planner.policies import ADAPTIVE, STATIC, Policy
from orchestrator.planner.scaling import Goal
from orchestrator.planner.static import StaticPlanner
from orchestrator.platforms.base import FunctionSpec

PROCESS_S = 25.0
"""Cold start of a GPU function without its weights, until some were seen: on record for vLLM from nothing."""
LINK_GB_S = 6.25
"""Weights, and a cut's keys and values, into one GPU until seen: g6e.48xlarge has 400 Gbit/s for 8."""


def job_planner(job: JobConfig, specs: Sequence[FunctionSpec]) -> Planner:
    """Raises ConfigError for a model that its GPU cannot hold, or whose shape cannot be read."""
    if job.planner.policy == "static":
        return StaticPlanner(keep_warm=job.planner.keep_warm)
    return adaptive_planner(job, specs)


def adaptive_planner(job: JobConfig, specs: Sequence[FunctionSpec]) -> AdaptivePlanner:
    """With policy = "static": one that decides nothing, to predict what the static planner's steps take."""
    goal = Goal(job.planner.objective or "knee", job.planner.deadline_s, job.planner.budget_usd)
    gangs = [spec.name for spec in specs if spec.kind == "train"]
    return AdaptivePlanner(job_policy(job), goal=goal, priors=job_priors(job, specs), gangs=gangs)


def job_policy(job: JobConfig) -> Policy:
    if job.planner.policy == "adaptive":
        return ADAPTIVE
    return replace(STATIC, keep=job.planner.keep_warm)


def job_priors(job: JobConfig, specs: Sequence[FunctionSpec]) -> Priors:
    """The roofline of `planner.gpu` for functions that run a model on GPUs; no GPU named: nothing is believed."""
    if job.planner.gpu is None:
        return Priors()
    gpu = device(job.planner.gpu)
    generators: dict[str, GenerateCost] = {}
    work: dict[str, WorkCost] = {}
    start_s: dict[str, float] = {}
    for spec in specs:
        if not spec.gpus or spec.kind == "reward":
            continue
        shape = _shape(job, spec.name)
        start_s[spec.name] = latency.start_prior_s(spec.gpus, shape, process_s=PROCESS_S, load_gb_s=LINK_GB_S)
        if spec.kind == "generate":
            generators[spec.name] = _generate(gpu, shape, spec)
        elif spec.kind == "reference":
            work[spec.name] = latency.forward_prior(gpu, shape, spec.gpus)
        else:
            work[spec.name] = latency.train_prior(gpu, shape, spec.gpus, recompute=job.train.gradient_checkpointing)
    return Priors(generators.get("generate"), work, start_s, tail=generators.get(TAIL))


def _generate(gpu: Device, shape: ModelShape, spec: FunctionSpec) -> GenerateCost:
    try:
        kv_capacity_tokens(gpu, shape, spec.gpus)
    except ValueError as error:
        raise ConfigError(f"functions.{spec.name}.gpus: {error}") from None
    return latency.generate_prior(gpu, shape, spec.gpus, link_gb_s=LINK_GB_S)


def _shape(job: JobConfig, function: str) -> ModelShape:
    key, path = model_directory(job, BY_NAME[function].model)
    try:
        return read_shape(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
