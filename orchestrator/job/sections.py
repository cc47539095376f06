"""The sections of a job that are its own: what each key is, may be, and is by default (docs/configuration.md)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from functions.base.names import Engine
from functions.call.parallel import Parallel
from functions.call.train_params import LoraParams, OptimizerParams, Schedule, TrainParams
from functions.reward.rules import CODE_RULES, name_of
from orchestrator.base.section import Section
from orchestrator.planner.devices import device


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
    score: str | Annotated[tuple[str, ...], Strict(False)] = "rule:exact"
    """`rule:<name>`, `<file.py>:<function>`, `model`, the URL of a remote scorer, or `environment`: it scores its own
    episodes. Several: a list of them, each a metric by its name, which is what follows the `:`."""
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
    def _sandboxed(self) -> Self:
        if isinstance(self.sandbox, str) and not self.sandbox.startswith(("http://", "https://")):
            raise ValueError(f"sandbox: got {self.sandbox!r}, wants true or the URL of a service (http://, https://)")
        for scorer in self.scorers.values():
            if scorer.removeprefix("rule:") in CODE_RULES and not self.sandbox:
                raise ValueError(f"{scorer} runs code that a model wrote: set reward.sandbox = true, or to a URL")
        if isinstance(self.score, str):
            return self
        names = [name_of(scorer) for scorer in self.score]
        if "environment" in names or not names:
            raise ValueError(f"score: got {list(self.score)}, wants scorers; an environment scores alone")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"score: two scorers are called {twice[0]!r}; their numbers would be one")
        if unknown := [name for name in self.weights if name not in names]:
            raise ValueError(f"weights.{unknown[0]}: there is no such scorer; there are {', '.join(names)}")
        return self

    @property
    def scorers(self) -> Mapping[str, str]:
        """By the name of its numbers."""
        return {name_of(scorer): scorer for scorer in ((self.score,) if isinstance(self.score, str) else self.score)}

    @property
    def weighting(self) -> Mapping[str, float]:
        """What the score is the weighted sum of, by name; nothing: one scorer gives it itself."""
        if isinstance(self.score, str):
            return self.weights
        return {name: self.weights.get(name, 1.0) for name in self.scorers}

    weights: Mapping[str, float] = {}
    """Of several scorers, or of several numbers that one gives: the score is their weighted sum. Scorers that are not
    named weigh 1; without weights one scorer gives "score" itself."""


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
    """The names are torch.optim.AdamW's, and verl's where torch has none."""

    optimizer: Literal["adamw", "muon"] = OptimizerParams.optimizer
    """muon: for the matrices of the layers, with AdamW's lr and weight_decay; betas and eps are for the rest, which
    stays AdamW's."""
    optimizer_offload: bool = OptimizerParams.optimizer_offload
    """The optimizer's state stays in the host's memory, on the GPU is one parameter's at a time."""
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
    router_replay: Literal["disabled", "R3"] = "disabled"
    """R3: of a mixture of experts, each token goes in training through the experts that the rollout's routers chose."""


class CriticConfig(OptimConfig):
    path: str | None = None
    """A Hugging Face directory; None: starts from the policy's."""
    lr: float = Field(1e-5, gt=0)


class ReferenceConfig(Section):
    path: str | None = None
    """A Hugging Face directory; None: the policy that the job started from."""


class ParallelConfig(Section):
    """How the ranks of a gang share a model (docs/train.md), what is left of `replicas` is dp; with tp alone, how the
    ranks of one replica that scores do."""

    tp: int = Field(Parallel.tp, ge=1)
    """Ranks that share each layer: heads, columns of the MLP, experts."""
    pp: int = Field(Parallel.pp, ge=1)
    """Stages that the layers are divided into."""
    cp: int = Field(Parallel.cp, ge=1)
    """Ranks that share each pack's tokens, and in attention its heads; alone, or with dp."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        assert self.mesh
        return self

    @property
    def mesh(self) -> Parallel:
        return Parallel(**self.model_dump())


class FunctionConfig(Section):
    """How one function is deployed; `[functions.generate]`, `[functions.train]`, ... (roles.py)."""

    replicas: int = Field(1, ge=1)
    """At most so many at a time."""
    parallel: ParallelConfig = ParallelConfig()
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
    def _has_effect(self) -> Self:
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
    state_every: int = Field(1, ge=1)
    """The optimizer's state goes to the store every so many steps, and with the last one; in between the node that has
    trained keeps it (with S3 and a node agent). With the node the steps since then are lost, and are made again."""
    best: str | None = None
    """A metric of validation, for example `val-core/gsm8k/acc/mean@1`: the version that is highest in it is kept, and
    is the job's model at its end. None: the last version is."""
