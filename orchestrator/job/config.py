"""The job: frozen, typed, validated when it is built. TOML in, errors with the key's path out.

    job = load_job(Path("job.toml"), overrides=["rollout.n=16"])

Paths in a job file are relative to the file. The resolved job (all defaults filled in, paths absolute) is written to
the run directory; `resume` reads that one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from functions.base.names import Engine
from functions.base.suggest import did_you_mean
from functions.call.train_params import LoraParams, OptimizerParams, Schedule, TrainParams
from functions.reward.rules import CODE_RULES
from orchestrator.base.errors import ConfigError
from orchestrator.base.section import Section
from orchestrator.base.values import check_values
from orchestrator.job.environment_config import EnvironmentConfig
from orchestrator.job.paths import resolve
from orchestrator.job.roles import BY_NAME
from orchestrator.job.telemetry import TelemetryConfig
from orchestrator.planner.base import TAIL
from orchestrator.planner.devices import device
from orchestrator.platforms.config import PlatformConfig

VALIDATE_EVERY = 10


class ModelConfig(Section):
    """The policy."""

    path: str
    """A causal language model with a `tokenizer.json`: a Hugging Face directory, an id of the Hub (hub.py), or the
    directory of a run: what it has made. The same holds for critic.path, reference.path and reward.model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights; above, only adapters of this rank."""
    lora_alpha: float = Field(LoraParams.alpha, gt=0)


class DataConfig(Section):
    train: str
    """JSONL or parquet with prompts, or an id of the Hub (`openai/gsm8k/main:train`); verl's, TRL's and OpenRLHF's
    columns are read as they are."""
    validation: str | None = None
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of `train` held out where there is no `validation` file."""
    prompts_per_step: int = Field(16, ge=1)
    max_prompt_length: int = Field(1024, ge=1)
    """In tokens, after the chat template."""
    over_long: Literal["error", "drop"] = "error"
    """What to do with prompts over the limit: they are counted and named either way."""
    shuffle: bool = True
    chat_template_kwargs: Mapping[str, Any] = {}
    """What the model's chat template is told besides the messages, for example `enable_thinking`."""
    prompt_key: str | None = None
    """Column of the prompts; None: `prompt`, else `input`."""
    apply_chat_template: bool = False
    """Prompts that are text become a user's message, for a model that was made to chat."""

    @property
    def held_out(self) -> bool:
        """Whether there are prompts to validate on."""
        return self.validation is not None or self.validation_fraction > 0


class RolloutConfig(Section):
    n: int = Field(8, ge=1)
    """Samples per prompt."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)
    """Tokens less probable than this share of the most probable one are not sampled."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of tokens that stand in the prompt or the response so far; 1: none."""
    stop: tuple[str, ...] = Field((), strict=False)
    """Strings that end a response, which keeps them (not with the vLLM engine)."""
    stop_token_ids: tuple[int, ...] = Field((), strict=False)
    """Tokens that do, besides the model's own end."""
    bad_words: tuple[str, ...] = Field((), strict=False)
    """Words that no response may have, with and without a space before them (not with the vLLM engine)."""
    max_response_length: int = Field(512, ge=1)
    engine: Engine = "auto"
    vllm: Mapping[str, Any] = {}
    """Settings of the vLLM engine (docs/vllm.md), for example `kv_cache_mb`."""
    slots: int = Field(64, ge=1)
    """Samples that one replica decodes at a time."""


class RewardConfig(Section):
    score: str = "rule:exact"
    """`rule:<name>`, `<file.py>:<function>`, `model`, the URL of a remote scorer, or `environment`: it scores its own
    episodes."""
    model: str | None = None
    """Directory of a sequence-classification reward model, with score = "model"."""
    on_error: Literal["fail", "drop"] = "fail"
    """What a sample whose scorer failed does: fails the step, or is dropped and counted. It never becomes 0."""
    timeout_s: float = Field(60.0, gt=0)
    """For one sample."""
    sandbox: bool | str = False
    """Where model-written code runs (`rule:code`, `rule:code_fraction`, a scorer with a parameter `sandbox`): true, the
    platform's, or the URL of a service in SandboxFusion's form (docs/sandbox.md)."""
    sandbox_timeout_s: float = Field(10.0, gt=0)
    """For one program: a test of a sample, or all tests of one function."""
    sandbox_memory_mb: int = Field(1024, ge=16)
    """For one program, with all that it starts."""

    @model_validator(mode="after")
    def _sandboxed(self) -> RewardConfig:
        if isinstance(self.sandbox, str) and not self.sandbox.startswith(("http://", "https://")):
            raise ValueError(f"sandbox: got {self.sandbox!r}, wants true or the URL of a service (http://, https://)")
        if self.score.removeprefix("rule:") in CODE_RULES and not self.sandbox:
            raise ValueError(f"{self.score} runs code that a model wrote: set reward.sandbox = true, or to a URL")
        return self

    weights: Mapping[str, float] = {}
    """Of several numbers that the scorer gives: the score is their weighted sum. None: it gives "score" itself."""


class ValidationConfig(Section):
    every: int | None = Field(None, ge=0)
    """Steps between validations, the last step always among them; 0: never. None: 10 where the job has prompts to
    validate on, else never."""
    at_start: bool = True
    n: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    patience: int | None = Field(None, ge=1)
    """Validations without a better checkpoints.best after which the job ends. None: it makes all its steps."""


class OptimConfig(Section):
    """AdamW; the names are torch.optim.AdamW's, and verl's where torch has none."""

    lr: float = Field(OptimizerParams.lr, gt=0)
    betas: tuple[float, float] = Field(OptimizerParams.betas, strict=False)
    eps: float = Field(OptimizerParams.eps, gt=0)
    weight_decay: float = Field(OptimizerParams.weight_decay, ge=0)
    max_grad_norm: float | None = Field(OptimizerParams.max_grad_norm, gt=0)
    schedule: Schedule = OptimizerParams.schedule
    warmup_steps: int = Field(OptimizerParams.warmup_steps, ge=0)
    min_lr_ratio: float = Field(OptimizerParams.min_lr_ratio, ge=0, le=1)


class TrainConfig(OptimConfig):
    micro_batch_tokens: int | None = Field(TrainParams.micro_batch_tokens, ge=1)
    """Tokens of one forward and backward pass: memory and speed, never the result. None: by device."""
    mini_batches: int = Field(TrainParams.mini_batches, ge=1)
    """Optimizer steps that one pass over a step's samples is divided into."""
    epochs: int = Field(TrainParams.epochs, ge=1)
    gradient_checkpointing: bool = TrainParams.gradient_checkpointing


class CriticConfig(OptimConfig):
    path: str | None = None
    """A Hugging Face directory; None: starts from the policy's."""
    lr: float = Field(1e-5, gt=0)


class ReferenceConfig(Section):
    path: str | None = None
    """A Hugging Face directory; None: the policy that the job started from."""


class FunctionConfig(Section):
    """How one function is deployed; `[functions.generate]`, `[functions.train]`, ... (roles.py)."""

    replicas: int = Field(1, ge=1)
    """At most so many at a time."""
    threads: int = Field(1, ge=1)
    """CPU threads of one replica."""
    gpus: int = Field(0, ge=0)
    memory_gb: float | None = Field(None, gt=0)
    """What one replica may take of the host's memory; None: 2 on Knative, what the machine has locally."""
    usd_per_hour: float = Field(0.0, ge=0)
    """Price of one replica while it exists."""


class ExchangeConfig(Section):
    url: str | None = None
    """`dir:///path`, `redis://host:port/0`, `s3://bucket/prefix`, ...; None: the run directory."""
    lifetime_s: float = Field(86400.0, gt=0)
    """How long results of calls are kept for a resume."""


class PlannerConfig(Section):
    """Who decides on replicas, shards and what stays warm (docs/planner.md)."""

    policy: Literal["static", "adaptive"] = "static"
    """static: replicas as configured, nothing learned. adaptive: learns, and decides by what is asked for below."""
    objective: Literal["cost", "speed", "knee"] | None = None
    """What "adaptive" decides for; None: knee."""
    deadline_s: float | None = Field(None, gt=0)
    """A step may not take longer; the job stops with a line that says by how much it would."""
    budget_usd: float | None = Field(None, gt=0)
    """A step may not cost more."""
    gpu: str | None = None
    """GPU of the functions with `gpus`, as planner/devices.py names it: predictions before anything was observed."""
    keep_warm: bool = False
    """static: hold every function's replicas for the whole job (a reserved cluster) instead of going to zero."""

    @model_validator(mode="after")
    def _has_effect(self) -> PlannerConfig:
        if self.keep_warm and self.policy != "static":
            raise ValueError('keep_warm is for policy = "static": what "adaptive" keeps is its own to say')
        goal = [name for name in ("objective", "deadline_s", "budget_usd") if getattr(self, name) is not None]
        if goal and self.policy == "static":
            raise ValueError(f'{goal[0]} is for policy = "adaptive": "static" does not decide by it')
        return self

    @field_validator("gpu")
    @classmethod
    def _in_the_table(cls, gpu: str | None) -> str | None:
        return None if gpu is None else device(gpu).name


class LimitsConfig(Section):
    call_s: float = Field(3600.0, gt=0)
    """A call that takes longer is ended and tried again."""
    heartbeat_s: float = Field(30.0, gt=0)
    """A call that is silent for longer is taken for lost."""
    attempts: int = Field(4, ge=1)
    """Tries of one call before the job stops."""
    outage_s: float = Field(1800.0, ge=0)
    """How long what the job depends on (the exchange, the cluster's API) may be away before the job stops."""


class CheckpointConfig(Section):
    keep: int = Field(2, ge=1)
    """Versions of weights and optimizer state that are kept, the newest among them."""
    best: str | None = None
    """A metric of validation, for example `val-core/gsm8k/acc/mean@1`: the version that is highest in it is kept, and
    is the job's model at its end. None: the last version is."""


class JobConfig(Section):
    """A training job."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$")
    recipe: str = "grpo"
    """The name of a recipe, or `<file.py>:<function>`."""
    steps: int = Field(ge=0)
    """0: the model that the job starts from is validated, nothing is trained (`rlhf-orchestrate eval`)."""
    seed: int = Field(0, ge=0)
    deterministic: bool = False
    """The committed history does not depend on replicas, cuts, crashes or order; costs speed."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    validation: ValidationConfig = ValidationConfig()
    algorithm: Mapping[str, Any] = {}
    """Over the recipe's settings (`rlhf-orchestrate recipes`); the keys are those of functions/call/train_params.py."""
    recipe_options: Mapping[str, Any] = {}
    """Over the recipe's options."""
    train: TrainConfig = TrainConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    functions: Mapping[str, FunctionConfig] = {}
    exchange: ExchangeConfig = ExchangeConfig()
    platform: PlatformConfig = PlatformConfig()
    planner: PlannerConfig = PlannerConfig()
    limits: LimitsConfig = LimitsConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _consistent(self) -> JobConfig:
        if self.data.validation and self.data.validation_fraction:
            raise ValueError("data.validation and data.validation_fraction exclude each other: set one")
        if self.validation.every and not self.data.held_out:
            raise ValueError(
                f"validation.every: got {self.validation.every}, but there is nothing to validate on: set "
                "data.validation or data.validation_fraction, or leave it out"
            )
        if self.checkpoints.best is not None and not self.validate_every:
            raise ValueError("checkpoints.best: wants prompts to validate on (data.validation, or validation_fraction)")
        if self.validation.patience is not None and self.checkpoints.best is None:
            raise ValueError("validation.patience: wants checkpoints.best, the metric that has to get better")
        if not self.steps and not (self.validate_every and self.validation.at_start):
            raise ValueError("steps: 0 steps only validate, which wants data.validation and validation.at_start")
        if (self.reward.score == "model") != (self.reward.model is not None):
            raise ValueError('reward.model is the directory that score = "model" uses: set both or neither')
        if self.reward.score == "environment" and self.environment is None:
            raise ValueError('reward.score = "environment" wants an [environment] that scores its episodes')
        if self.environment is not None and TAIL in self.functions:
            raise ValueError(f"functions.{TAIL}: a job with an [environment] has none: its samples go on turn by turn")
        knative = self.platform.knative if self.platform.kind == "knative" else None
        if self.reward.sandbox is True and knative is not None and knative.sandbox is None:
            raise ValueError("reward.sandbox = true on Knative wants platform.knative.sandbox, the service's URL")
        if self.deterministic and self.rollout.engine not in ("auto", "torch"):
            raise ValueError(f'deterministic = true needs rollout.engine "torch", got "{self.rollout.engine}"')
        for key in ("stop", "bad_words"):
            if self.rollout.engine == "vllm" and getattr(self.rollout, key):
                raise ValueError(
                    f'rollout.{key}: rollout.engine = "vllm" has no text here, "torch" and "transformers" do'
                )
            if "" in getattr(self.rollout, key):
                raise ValueError(f"rollout.{key}: wants no empty text")
        if self.platform.kind == "knative" and self.exchange.url is None:
            raise ValueError("exchange.url is needed on Knative: redis://, s3:// or a directory that every pod mounts")
        if self.planner.budget_usd is not None and not any(f.usd_per_hour for f in self.functions.values()):
            raise ValueError("planner.budget_usd wants prices: set functions.<name>.usd_per_hour")
        if self.planner.gpu is not None and not self.function("generate").gpus:
            raise ValueError("planner.gpu wants functions.generate.gpus >= 1, got 0")
        if self.planner.gpu is not None and self.model.dtype != "bfloat16":
            raise ValueError(f'planner.gpu: its table is of bfloat16, got model.dtype = "{self.model.dtype}"')
        return self

    @model_validator(mode="after")
    def _functions_generate(self) -> JobConfig:
        """What [functions.*] says of generation: names, the tail's function, engines that use one GPU."""
        for name in self.functions:
            if name not in BY_NAME:
                hint = did_you_mean(name, BY_NAME) or f"; a job has {', '.join(BY_NAME)}"
                raise ValueError(f"functions.{name}: no such function{hint}")
        if "gpus" in self.rollout.vllm:
            raise ValueError("rollout.vllm.gpus: set functions.generate.gpus, the GPUs of one replica")
        for name in (role.name for role in BY_NAME.values() if role.kind == "generate"):
            if self.rollout.engine in ("torch", "transformers") and self.function(name).gpus > 1:
                got = f'got {self.function(name).gpus}, rollout.engine = "{self.rollout.engine}" uses one'
                raise ValueError(f'functions.{name}.gpus: {got} ("vllm" splits a model)')
        if TAIL not in self.functions:
            return self
        if self.planner.policy == "static":
            raise ValueError(f'functions.{TAIL}: planner.policy = "static" never moves a tail to it (wants "adaptive")')
        if self.planner.gpu is None:
            raise ValueError(f"functions.{TAIL}: wants planner.gpu, by which its speed is known before it was used")
        gpus, fewest = self.function(TAIL).gpus, self.function("generate").gpus
        if gpus < fewest:
            raise ValueError(
                f"functions.{TAIL}.gpus: got {gpus}, functions.generate has {fewest} (wants more: a tail moves to be "
                "decoded faster)"
            )
        return self

    @property
    def scoring(self) -> dict[str, Any]:
        """`reward` as the reward function's calls say it: the sandbox by its place."""
        where: bool | str = self.reward.sandbox
        if where is True:
            where = (self.platform.knative and self.platform.knative.sandbox) or "local"
        weights = set() if self.reward.weights else {"weights"}
        return self.reward.model_dump(exclude={"model", *weights}) | {"sandbox": where or ""}

    def function(self, name: str) -> FunctionConfig:
        return self.functions.get(name, FunctionConfig())

    @property
    def validate_every(self) -> int:
        """Steps between validations; 0: never."""
        if self.validation.every is not None:
            return self.validation.every
        return VALIDATE_EVERY if self.data.held_out else 0


def apply_override(table: dict[str, Any], override: str) -> None:
    """Sets one `key.path=value` (a TOML value; a bare word is a string) in a job's table. Raises ConfigError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: want key.path=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string, as a shell user expects
    *parents, last = key.split(".")
    for part in parents:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    table[last] = value


def _fields_at(path: Sequence[str | int]) -> list[str]:
    """The keys that would be right in the section that holds `path`."""
    model: Any = JobConfig
    for part in path[:-1]:
        if isinstance(model, type) and issubclass(model, BaseModel):
            info = model.model_fields.get(str(part))
            model = None if info is None else info.annotation
        else:  # Mapping[str, Section]: `part` is one of its keys
            model = next((a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _explain(error: Any) -> str:
    path = [p for p in error["loc"] if p != "[key]"]
    key = ".".join(map(str, path)) or "job"
    got = error.get("input")
    if error["type"] == "extra_forbidden":
        near = did_you_mean(str(path[-1]), _fields_at(path), within="".join(f"{p}." for p in path[:-1]))
        return f"{key}: unknown key" + (near or f"; the keys here are {', '.join(_fields_at(path))}")
    if error["type"] == "missing":
        return f"{key}: is required and was not set"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message if key == "job" else f"{key}: {message}"
    message = message[0].lower() + message[1:].replace("Input should", "should")
    return f"{key}: {message.replace('input should', 'should')}, got {got!r}"


def parse_job(table: Mapping[str, Any], *, base: Path, where: str = "job") -> JobConfig:
    """Builds the job from a parsed TOML or JSON table. Raises ConfigError with one line per mistake."""
    resolved = {k: dict(v) if isinstance(v, dict) else v for k, v in table.items()}
    check_values(table, where)
    resolve(resolved, base)
    try:
        return JobConfig.model_validate(resolved)
    except ValidationError as error:
        lines = [_explain(e) for e in error.errors()]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job file and applies `key.path=value` overrides (TOML values; bare words are strings)."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    for override in overrides:
        apply_override(table, override)
    return parse_job(table, base=path.resolve().parent, where=str(path))


def dump_job(job: JobConfig) -> str:
    """The resolved job as TOML; `load_job` of it gives the same job."""
    return tomli_w.dumps(job.model_dump(mode="python", exclude_none=True))
