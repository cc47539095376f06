"""What the routes of view_routes.py answer. Times are Unix seconds, or (`_s`) seconds since the job's first start."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class Metrics(BaseModel):
    """A column per metric; null where a step has none of it."""

    steps: list[int] = Field(description="With `points`, the last step of each run")
    metrics: dict[str, list[float | None]] = Field(description="With `points`, the mean over each run of steps")
    low: dict[str, list[float | None]] = Field(description="The least of each run; empty without `points`")
    high: dict[str, list[float | None]] = Field(description="The greatest of each run; empty without `points`")
    names: list[str] = Field(description="Every metric that any of the run's steps has")


class FunctionCost(BaseModel):
    replica_s: float
    busy_s: float
    gpu_s: float
    usd: float
    starts: int
    parked_s: float = Field(0.0, description="Of processes between replicas, without a GPU; beside replica_s")


class StepCost(BaseModel):
    step: int
    wall_s: float
    usd: float
    functions: dict[str, FunctionCost]


class CostView(BaseModel):
    """The books of a job: until now, by function, by step."""

    usd: float
    wall_s: float
    functions: dict[str, FunctionCost]
    executions: int
    steps: list[StepCost]
    open: StepCost | None = Field(description="The step that is not committed yet; null before the first books")


class CostSteps(BaseModel):
    """The books as columns: sums over runs of committed steps."""

    steps: list[int] = Field(description="The last step of each run")
    counts: list[int] = Field(description="Steps of each run")
    wall_s: list[float]
    functions: dict[str, dict[str, list[float]]] = Field(description="function: measure: one number per run")


class Used(BaseModel):
    wall_s: float
    replica_s: float
    gpu_s: float
    usd: float


class Held(Used):
    machines: str = Field(description="Which, in words")


class Reserved(BaseModel):
    """The run's first steps on machines that are held throughout, simulated (orchestrator/simulation/reserved.py)."""

    steps: int | None = Field(description="Steps 0 to this one are compared; null: not known yet")
    used: Used | None = Field(None, description="What the run used for them")
    dedicated: Held | None = Field(None, description="Each function on machines of its own")
    colocated: Held | None = Field(None, description="All functions taking turns on the same machines")
    why: str | None = Field(None, description="Why there is nothing to compare with")


class WhereStep(BaseModel):
    """Where a step's time went (orchestrator/telemetry/where.py)."""

    step: int
    parts: dict[str, float] = Field(description="Seconds, in the order of a bar; they add up to the step's")
    advice: str = Field(description="What would make it faster, and by how much; empty: nothing worth a sentence")


class Where(BaseModel):
    steps: list[WhereStep] = Field(description="Oldest first")


class Checkpoint(BaseModel):
    """The versions of a job's models as of a step, whose weights are still kept."""

    step: int
    created_at: float
    versions: dict[str, dict[str, Any]]
    bytes: int | None = Field(description="Of their own files; null where they lie elsewhere")


class Profile(BaseModel):
    """A call's trace by torch.profiler, a gzipped Chrome trace."""

    step: int
    name: str = Field(description="The function, and which of its calls: `train-1.json.gz`")
    bytes: int


class Checkpoints(BaseModel):
    checkpoints: list[Checkpoint] = Field(description="Oldest first")
    profiles: list[Profile] = Field(description="Traces of calls, of the steps of [profile]")
    run: str = Field(description="The run's directory on the server")
    model: bool = Field(description="The final model was exported to `model/` of the run directory")


class Sign(BaseModel):
    """A number that says how a run does (orchestrator/telemetry/health.py)."""

    name: str
    level: Literal["good", "warn", "bad"]
    value: str
    reason: str = Field(description="What it is, and its bound")


class Health(BaseModel):
    signs: list[Sign] = Field(description="Empty before the first training step")


class Group(BaseModel):
    group: int
    count: int
    mean: float
    deviation: float


class Tool(BaseModel):
    tool: str
    calls: int
    failed: int


class Samples(BaseModel):
    """Samples of one step: prompt, response, reward."""

    step: int | None
    steps: list[int] = Field(description="The first and the last step that have samples; empty: none has")
    total: int = Field(description="How many of them match")
    scores: list[float] = Field(description="Of all samples of the step that are kept")
    groups: list[Group] = Field(description="Of each prompt: its samples' mean score and deviation")
    tools: list[Tool] = Field(description="Of their conversations; `failed`: the model read an error")
    samples: list[dict[str, Any]] = Field(
        description="group, index, prompt, response, score, tokens, finish, version, ground_truth; `advantage`: mean "
        "of its tokens; `mismatch`: mean absolute difference of the trainer's and the engine's log-probabilities"
    )


class PromptStep(BaseModel):
    step: int
    samples: list[dict[str, Any]]


class PromptSteps(BaseModel):
    steps: list[PromptStep] = Field(description="At most 20, the newest that have the prompt, oldest first")


class FunctionTimeline(BaseModel):
    """One function's replicas. Either `counts`, or `lives` and `calls`."""

    name: str
    most: int = Field(description="Replicas that it may have")
    lives: list[tuple[int, float, float, float, float, str]] = Field(
        default=[], description="lane, start, ready, draining, stop, replica"
    )
    calls: list[tuple[int, float, float, str]] = Field(default=[], description="lane, start, stop, operation")
    counts: dict[str, list[float]] = Field(
        default={}, description="By state (busy, idle, starting, draining): the mean number of replicas in each bin"
    )


class Timeline(BaseModel):
    """Replicas over a window of time."""

    from_s: float
    to_s: float
    end_s: float = Field(description="The last moment that is known")
    begun_at: float | None = Field(description="When the job's first execution began; Unix seconds")
    alive: bool = Field(description="An orchestrator is at work on it")
    lanes: bool = Field(description="Each replica is told (else counts by state)")
    functions: list[FunctionTimeline]
    steps: list[tuple[int, float, float]] = Field(description="number, start, stop of committed steps")


class Plan(BaseModel):
    """What the planner decided before a step; null where the run has no such step."""

    step: int | None
    time: float | None
    plan: dict[str, Any] | None
    actual: dict[str, float] = Field(description="Of the committed step, its validation left out: step_s, cost_usd")


class EventPage(BaseModel):
    """Events, newest first."""

    events: list[dict[str, Any]]
    total: int = Field(description="How many of the kinds that were asked for")
    next: int | None = Field(description="Pass it as `before` for the next page; null at the end")


class Output(BaseModel):
    """What the orchestrator has printed: its last lines."""

    lines: list[str]
