"""What the loop asks the planner, and what it answers. A planner is pure given what it has observed: same
observations and same request, same plan.

    loop --- StepRequest ----> planner.plan() ---> StepPlan     before the step
    loop --- StepObservation -> planner.observe()               after it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

GENERATE = "generate"
ENVIRONMENT = "environment"
TAIL = "generate-tail"
"""Where there is one: the function of the kind of `generate`, with more GPUs a replica, that a tail may go on with."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of this step. `prompt_id` is its row in the data set, the same in every epoch."""

    group: int
    prompt_id: int
    tokens: tuple[int, ...]
    data_source: str = ""
    environment: str = ""
    """Which of the job's environments answers it."""


@dataclass(frozen=True)
class FunctionLimits:
    """What the platform allows and charges for one function."""

    max_replicas: int
    usd_per_hour: float
    gpus: int = 0
    max_batch: int = 64
    """Samples that one replica of `generate` decodes at a time."""
    min_replicas: int | None = None
    """Of a train function: the fewest ranks that hold its model; None: all of them are one gang."""
    kv_tokens: int | None = None
    """KV capacity of one replica of `generate`, in tokens; None: not the limit."""


@dataclass(frozen=True)
class StepRequest:
    step: int
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    max_response_length: int
    functions: Mapping[str, FunctionLimits]
    """By function name, in the order in which the step first uses them. With TAIL a tail may move to it."""
    streamed: frozenset[str] = frozenset()
    """Train functions whose gradient may begin before all samples are there (TrainParams.streams)."""


@dataclass(frozen=True)
class Waits:
    """What the episodes of one environment did in a step; ascending, quantiles where there are many (episodes.py)."""

    turns: Sequence[float]
    """Of an episode."""
    answer_s: Sequence[float]
    """From a turn's end until the sample goes on."""
    total_s: Sequence[float]
    """Of all answers of an episode."""


@dataclass(frozen=True)
class Resume:
    """What is expected of a sample that goes on in another call: `call_s`, and `token_s` for each token it holds."""

    keep_from: int | None
    """Tokens from which on its keys and values are moved there; None: they are always computed again."""
    call_s: float
    token_s: float


@dataclass(frozen=True)
class PlannedStage:
    """When a function is expected to be at work in this step, in seconds from the step's start."""

    function: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class CurvePoint:
    """One point of T(N), C(N)."""

    replicas: int
    time_s: float
    cost_usd: float
    gpu_s: float


@dataclass(frozen=True)
class StepPlan:
    """What the loop does in this step. A sample is numbered prompt row * samples_per_prompt + index.

    `replicas` are those wanted while the function's stage runs. `shards` says which samples each generate replica
    gets, in the order it should start them; every sample is in exactly one shard. When no more than `cut_below` samples
    of the step are unfinished (0: never), the open shards are cut and their samples go on, from the tokens they have,
    on `migrate_to` replicas of `tail`; the others are released (RLHFuse's migration: no unfinished sample ever waits).
    `micro_batch` is how many finished samples are handed to reward and reference at a time; without `overlap` they wait
    until generation has ended. `keep` names the
    functions whose replicas stay up between this step and the next; all others go to zero the moment they are idle.
    `prewarm_s` says, for a function, how many seconds after the step's start its replicas are to be started (absent:
    when its first call comes).
    """

    replicas: Mapping[str, int]
    shards: Sequence[Sequence[int]]
    micro_batch: int
    cut_below: int = 0
    migrate_to: int = 1
    tail: str = GENERATE
    """`generate`, or the function of its kind on whose larger replicas (more GPUs each) a cut's samples go on."""
    keep: frozenset[str] = frozenset()
    turns: int = 0
    """GPUs of the pool that are held for functions to take turns on (simulations); 0: they do not."""
    prewarm_s: Mapping[str, float] = field(default_factory=dict)
    prewarm_next_s: Mapping[str, float] = field(default_factory=dict)
    """The same for the first call of the step that follows."""
    generated_s: float | None = None
    """When the last sample is expected. Times above that are before it come early if it does, others move with it
    (orchestrator/step/plan_clock.py)."""
    overlap: bool = True
    stream_s: Mapping[str, float] = field(default_factory=dict)
    """Train functions that start before all samples are there, and how many seconds after the step's start: they load,
    and take prompt groups as they are whole, `stream_part` samples at least at a time."""
    stream_groups: Mapping[str, int] = field(default_factory=dict)
    """Of these, how many groups have to be whole besides: as many as are expected to be when the function has to be
    started (none of `prewarm_s`)."""
    stream_part: int = 1
    chunk: int = 16
    """Finished samples that a generate replica hands over at a time."""
    waits: Mapping[str, Waits] = field(default_factory=dict)
    """What the episodes of each environment are expected to do; absent: nothing was seen of it."""
    catch_up_s: float = 0.0
    """What training takes that streams, where all samples are there when it is asked for."""
    resume: Resume | None = None
    """None: nothing is known; calls are not cut for samples that wait beside them."""
    predicted_step_s: float | None = None
    predicted_cost_usd: float | None = None
    stages: Sequence[PlannedStage] = ()
    curve: Sequence[CurvePoint] = ()
    """The points that were worked out in full; first estimates of others are not among them."""
    chosen: int | None = None
    """Number of generate replicas chosen on the curve."""


@dataclass(frozen=True)
class CallObservation:
    """One call that was made: what was asked, and how long it took.

    `start_s` is from request to `started` (cold start included when `cold`), `work_s` from `started` to the end.
    """

    function: str
    replica: str
    operation: str
    cold: bool
    start_s: float
    work_s: float
    prompt_tokens: int
    response_tokens: int
    samples: int
    stop_s: float = 0.0
    """Event-loop time of its end."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """The function's own counts: of generate EngineStats; of the others `samples` and `tokens` (prompts included), of
    train `ranks` besides, the size of its gang."""
    phases: Sequence[tuple[str, float, float]] = ()
    """What it was spent on, as the replica told: (name, start, stop) in event-loop seconds; one may lie in another."""
    profile: Mapping[str, Any] | None = None
    """The Ref of its torch profile, as JSON, where it has one."""


@dataclass(frozen=True)
class StepObservation:
    step: int
    step_s: float
    cost_usd: float
    lengths: Mapping[int, Sequence[int]]
    """Response lengths by prompt_id."""
    calls: Sequence[CallObservation]
    waits: Mapping[str, Waits] = field(default_factory=dict)
    """By environment."""


@dataclass(frozen=True)
class PastStep:
    """A step that was made before this planner was: by an execution that ended, or in another run."""

    step: int
    prompts: Sequence[Prompt]
    lengths: Sequence[Sequence[int]]
    """Response lengths of each prompt's samples. [P][n]"""
    calls: Sequence[CallObservation]
    prewarmed: frozenset[str]
    """Functions that were started ahead: their calls tell nothing of a cold start."""
    step_s: float
    waits: Mapping[str, Waits] = field(default_factory=dict)

    @property
    def by_prompt(self) -> dict[int, Sequence[int]]:
        """Response lengths by prompt_id."""
        return {prompt.prompt_id: lengths for prompt, lengths in zip(self.prompts, self.lengths, strict=True)}


class Planner(Protocol):
    def plan(self, request: StepRequest) -> StepPlan:
        """The plan of a step. Raises ValueError for a request that cannot be met, saying by how much."""

    def observe(self, observation: StepObservation) -> dict[str, float]:
        """Learns from a finished step; returns `planner/*` metrics (prediction errors of the plan before it)."""

    def recall(self, past: PastStep, cap: int) -> None:
        """Learns what it would have learned had it planned that step; `cap`: max_response_length."""
