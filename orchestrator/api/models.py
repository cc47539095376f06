"""What the API answers. Times are Unix seconds, costs US dollars, durations seconds."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from orchestrator.api.jobs import Job, State
from orchestrator.api.summary import Summary
from orchestrator.telemetry.headline import headline

TREND = 40


class JobView(BaseModel):
    """A training job."""

    id: str
    name: str
    recipe: str
    state: State
    step: int | None = Field(description="Last committed step; null before step 0 is")
    steps: int
    created_at: float
    submitted_by: str = Field(description="The name of the token; empty for a run of the command line")
    started_at: float | None
    ended_at: float | None
    cost_usd: float | None = Field(description="As of the last committed step")
    executions: int = Field(description="How many times an orchestrator has worked on it")
    stages: list[str] = Field(description="Functions at work now")
    replicas: dict[str, int] = Field(description="Replicas that exist now, by function")
    metrics: dict[str, float] = Field(description="The few of the last step that a person follows")
    trend: list[float] = Field(description="Mean score, or the loss, of at most 40 steps, evenly spread, oldest first")
    spent_usd: float | None = Field(description="As of the last look into the books, within a step too")
    spent_replica_s: float | None = Field(description="Seconds of replicas, as of the same look")
    wall_s: float | None = Field(description="Seconds in which orchestrators have worked on it")
    last_event: int = Field(description="Id of its last event")
    sample_failures: int = Field(description="Samples that were dropped because their scorer failed")
    can: list[Literal["cancel", "resume", "delete"]] = Field(description="What may be asked of it now")
    message: str | None = Field(description="Why it waits, has failed or was stopped")


class JobDetail(JobView):
    """A training job with its configuration."""

    config: dict[str, Any] = Field(description="The resolved job, without secrets")
    trains: dict[str, Any] = Field(description="What each model is trained with: the job's over the recipe's settings")


class JobList(BaseModel):
    jobs: list[JobView] = Field(description="Newest first")
    next: str | None = Field(description="Pass it as `after` for the next page; null at the end")


def _can(job: Job) -> list[str]:
    if not job.settled:
        return ["cancel"]
    return ["delete"] if job.state == "succeeded" else ["resume", "delete"]


def trend(summary: Summary) -> list[float]:
    """The headlines (telemetry/headline.py) of at most TREND steps."""
    found = [e.data["metrics"][name] for e in summary.commits if (name := headline(e.data["metrics"]))]
    return found if len(found) <= TREND else [found[(len(found) - 1) * k // (TREND - 1)] for k in range(TREND)]


def view(job: Job) -> dict[str, Any]:
    """The fields of JobView."""
    summary = job.summary
    return {
        "id": job.id,
        "name": job.desired.name,
        "recipe": job.config.recipe,
        "state": job.state,
        "step": summary.step,
        "steps": job.config.steps,
        "created_at": job.desired.created_at,
        "submitted_by": job.desired.owner,
        "started_at": summary.started_at,
        "ended_at": None if summary.end is None or not job.settled else summary.end.time,
        "cost_usd": summary.cost_usd,
        "executions": summary.execution,
        "stages": summary.stages if job.alive else [],
        "replicas": summary.replicas if job.alive else {},
        "metrics": summary.metrics,
        "trend": trend(summary),
        "spent_usd": None if job.now is None else job.now["usd"],
        "spent_replica_s": None if job.now is None else job.now.get("replica_s"),
        "wall_s": None if job.now is None else job.now["wall_s"],
        "last_event": summary.last_id,
        "sample_failures": summary.sample_failures,
        "can": _can(job),
        "message": job.desired.why or (summary.message if job.settled else None),
    }
