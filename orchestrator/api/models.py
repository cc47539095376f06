"""What the API answers. Times are Unix seconds, costs US dollars, durations seconds."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from orchestrator.api.jobs import Job, State


class JobView(BaseModel):
    """A training job."""

    id: str
    name: str
    recipe: str
    state: State
    step: int | None = Field(description="Last committed step; null before step 0 is")
    steps: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    cost_usd: float | None = Field(description="As of the last committed step")
    executions: int = Field(description="How many times an orchestrator has worked on it")
    stages: list[str] = Field(description="Functions at work now")
    replicas: dict[str, int] = Field(description="Replicas that exist now, by function")
    metrics: dict[str, float] = Field(description="The few of the last step that a person follows")
    sample_failures: int = Field(description="Samples that were dropped because their scorer failed")
    message: str | None = Field(description="Why it has failed or was cancelled")


class JobDetail(JobView):
    """A training job with its configuration."""

    config: dict[str, Any] = Field(description="The resolved job, without secrets")


class JobList(BaseModel):
    jobs: list[JobView] = Field(description="Newest first")
    next: str | None = Field(description="Pass it as `after` for the next page; null at the end")


class Metrics(BaseModel):
    """A column per metric; null where a step has none of it."""

    steps: list[int]
    metrics: dict[str, list[float | None]]


class FunctionCost(BaseModel):
    replica_s: float
    busy_s: float
    gpu_s: float
    usd: float
    starts: int


class StepCost(BaseModel):
    step: int
    wall_s: float
    usd: float
    functions: dict[str, FunctionCost]


class CostView(BaseModel):
    """The books of a job: until now, by function, by step, and what reserved machines would have cost."""

    usd: float
    wall_s: float
    functions: dict[str, FunctionCost]
    serverful: dict[str, FunctionCost]
    executions: int
    steps: list[StepCost]
    open: StepCost | None = Field(description="The step that is not committed yet; null before the first books")


class Checkpoint(BaseModel):
    """The versions of a job's models as of a step, whose weights are still kept."""

    step: int
    created_at: float
    versions: dict[str, dict[str, Any]]


class Checkpoints(BaseModel):
    checkpoints: list[Checkpoint] = Field(description="Oldest first")
    model: bool = Field(description="The final model was exported to `model/` of the run directory")


class Samples(BaseModel):
    """Samples of one step: prompt, response, reward."""

    step: int | None
    total: int = Field(description="How many of them match")
    samples: list[dict[str, Any]]


def view(job: Job) -> dict[str, Any]:
    """The fields of JobView."""
    summary = job.summary
    return {
        "id": job.id,
        "name": job.wish.name,
        "recipe": job.config.recipe,
        "state": job.state,
        "step": summary.step,
        "steps": job.config.steps,
        "created_at": job.wish.created_at,
        "started_at": summary.started_at,
        "ended_at": None if summary.end is None or not job.settled else summary.end.time,
        "cost_usd": summary.cost_usd,
        "executions": summary.execution,
        "stages": summary.stages if job.alive else [],
        "replicas": summary.replicas if job.alive else {},
        "metrics": summary.metrics,
        "sample_failures": summary.sample_failures,
        "message": summary.message if job.settled else None,
    }
