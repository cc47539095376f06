"""The job: frozen, typed, validated when it is built. TOML in, errors with the key's path out.

    job = load_job(Path("job.toml"), overrides=["rollout.n=16"])

Paths in a job file are relative to the file. The resolved job (all defaults filled in, paths absolute) is written to
the run directory; `resume` reads that one.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

import tomli_w
from pydantic import BaseModel, Field, ValidationError, model_validator

from functions.base.suggest import did_you_mean
from functions.call.train_params import OWN, TrainParams
from orchestrator.base.errors import ConfigError
from orchestrator.base.section import Section
from orchestrator.base.values import check_values
from orchestrator.job.environment_config import EnvironmentConfig
from orchestrator.job.paths import resolve
from orchestrator.job.roles import BY_NAME
from orchestrator.job.sections import (
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    ExchangeConfig,
    FunctionConfig,
    LimitsConfig,
    ModelConfig,
    PlannerConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    ValidationConfig,
)
from orchestrator.job.telemetry import ProfileConfig, TelemetryConfig
from orchestrator.planner.base import TAIL
from orchestrator.platforms.config import PlatformConfig

VALIDATE_EVERY = 10


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
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
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
        if beyond := [step for step in self.profile.steps if step > self.steps]:
            raise ValueError(f"profile.steps: got {beyond[0]}, the job has {self.steps}")
        if ("model" in self.reward.scorers.values()) != (self.reward.model is not None):
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
    def _functions_generate(self) -> Self:
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
        said = self.reward.model_dump(exclude={"model", "score", "weights"}) | {"sandbox": where or ""}
        said |= {"weights": dict(weights)} if (weights := self.reward.weighting) else {}
        if isinstance(self.reward.score, str):
            return said | {"score": self.reward.score}
        return said | {"scorers": dict(self.reward.scorers)}

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


TRLS = {
    "learning_rate": "train.lr", "num_generations": "rollout.n", "max_completion_length": "rollout.max_response_length",
    "beta": "algorithm.kl.coef", "num_iterations": "train.epochs", "max_steps": "steps", "lora_r": "model.lora_rank",
    "use_vllm": "rollout.engine", "reward_funcs": "reward.score", "train_dataset": "data.train",
}  # fmt: skip
"""Names of TRL's that are none of ours (docs/tutorial.md)."""


def elsewhere(name: str) -> str:
    """ "; did you mean 'train.lr'?" for the name of a key of another section, `kl_coef` for `algorithm.kl.coef` too."""
    if name in TRLS:
        return f"; did you mean {TRLS[name]!r}?"
    keys = [key for key in _keys(JobConfig) if any("_".join(key.split(".")[n:]) == name for n in range(1, 4))]
    nearest = min(keys, key=lambda key: key.count("."), default=None)
    return "" if nearest is None else f"; did you mean {nearest!r}?"


def _keys(kind: Any, within: str = "") -> Iterator[str]:
    """The dotted keys of a section, or of params of train calls; those of its own tables after them."""
    section = isinstance(kind, type) and issubclass(kind, BaseModel)
    types = {n: f.annotation for n, f in kind.model_fields.items()} if section else get_type_hints(kind)
    if kind is TrainParams:
        types = {name: type for name, type in types.items() if name not in OWN}
    tables = []
    for name, annotation in types.items():
        yield f"{within}{name}"
        inner = TrainParams if f"{within}{name}" == "algorithm" else annotation
        for found in (inner, *get_args(inner)):
            if isinstance(found, type) and (issubclass(found, BaseModel) or is_dataclass(found)):
                tables.append((found, f"{within}{name}.{'generate.' if name == 'functions' else ''}"))
    for table, place in tables:
        yield from _keys(table, place)


def _explain(error: Any) -> str:
    path = [p for p in error["loc"] if p != "[key]"]
    key = ".".join(map(str, path)) or "job"
    got = error.get("input")
    if error["type"] == "extra_forbidden":
        within = "".join(f"{p}." for p in path[:-1])
        near = elsewhere(str(path[-1])) or did_you_mean(str(path[-1]), _fields_at(path), within=within)
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


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A job file with `key.path=value` overrides (TOML values, or words), as it is. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for override in overrides:
        apply_override(table, override)
    return table


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The job of a file. Raises ConfigError with one line per mistake."""
    return parse_job(read_table(path, overrides), base=path.resolve().parent, where=str(path))


def dump_job(job: JobConfig) -> str:
    """The resolved job as TOML; `load_job` of it gives the same job."""
    return tomli_w.dumps(job.model_dump(mode="python", exclude_none=True))
