"""Scenarios by name, and from a file.

The test-bed of RLHFless (16 L40S) is `<3b|7b>-<grpo|ppo>-<gsm8k|gpqa|livecodebench>`; its cluster is `70b-grpo`.
A file is TOML with the fields of Scenario; `device` and `model` are names of planner/devices.py, lengths a
distribution or a recorded trace:

    device = "L40S"
    model = "Qwen2.5-3B"
    gpus = 8
    prompts_per_step = 64
    samples_per_prompt = 8
    max_response_length = 2048
    lengths = { mean = 600.0, sigma = 0.7 }      # or { trace = "lengths.jsonl" }
    tools = { median_s = 1.0, p99_s = 60.0 }     # samples are episodes of 2 to `turns` = 8; answers take that long
"""

import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from orchestrator.base.errors import ConfigError
from orchestrator.base.section import Section
from orchestrator.planner.devices import device, kv_capacity_tokens, shape
from orchestrator.simulation.lengths import Lengths, LengthTrace, Lognormal, Turns
from orchestrator.simulation.scenario import Scenario

# Mean and sigma of response lengths, seconds of one score, CPU replicas that score. ASSUMED: the paper names the data
# sets and caps only. LiveCodeBench's scoring makes reward a fifth of generation, as in the references (66 / 13 / 21).
DATA: Mapping[str, tuple[float, float, float, int]] = {
    "gsm8k": (300.0, 0.5, 0.002, 8),
    "gpqa": (600.0, 0.7, 0.002, 8),
    "livecodebench": (800.0, 0.86, 0.33, 64),
}
CLUSTER = "70b-grpo"
TOOLS = "7b-grpo-tools"


def rlhfless_testbed(model: str, recipe: str, data: str, *, process_s: float = 2.0) -> Scenario:
    """RLHFless's: 16 L40S, 512 samples a step."""
    mean, sigma, score_s, scorers = DATA[data]
    grpo = recipe == "grpo"
    return Scenario(
        f"{model.removeprefix('Qwen2.5-')} {recipe} {data}", device("L40S"), shape(model), 16, recipe,
        Lognormal.of(mean, sigma), prompts_per_step=128 if grpo else 512, samples_per_prompt=4 if grpo else 1,
        max_response_length=2048, train_gpus=14 if grpo else 7, reward_sample_s=score_s, reward_replicas=scorers,
        process_s=process_s, steps=8, tail_gpus=4,
    )  # fmt: skip


def rlhfless_cluster() -> Scenario:
    """RLHFless's large one: 70B on 160 H100."""
    return Scenario(
        "70B grpo 160 H100", device("H100"), shape("Llama-2-70B"), 160, "grpo", Lognormal.of(400, 0.86),
        prompts_per_step=128, samples_per_prompt=4, max_response_length=4096, generate_gpus=4, tail_gpus=8,
        forward_gpus=4, train_gpus=128, rank_gpus=8, link_gb_s=50.0, steps=100,
    )  # fmt: skip


def agents(seed: int = 0) -> Scenario:
    """256 episodes of two to eight turns, whose tools answer in 1 s at the median and 60 s at the 99th percentile;
    processes park. ASSUMED: 600 tokens of an episode, 100 of each observation, no answer after 300 s."""
    found = rlhfless_testbed("Qwen2.5-7B", "grpo", "gpqa", process_s=25.0)
    written = Lognormal.of(600.0, 0.7, seed=seed)
    turns = Turns(written, 1.0, 60.0, turns=8, observation_tokens=100, timeout_s=300.0, seed=seed)
    return replace(
        found, name="7B grpo tools", lengths=turns, prompts_per_step=64, max_response_length=4096, back_s=2.0,
        leave_s=1.0, tail_gpus=None,
    )  # fmt: skip


def names() -> list[str]:
    return [*(f"{m}-{r}-{d}" for m in ("3b", "7b") for r in ("grpo", "ppo") for d in DATA), TOOLS, CLUSTER]


def find_scenario(name: str) -> Scenario:
    """By name, or from the TOML file of that path. Raises ConfigError, one line per mistake."""
    if name == TOOLS:
        return agents()
    if name == CLUSTER:
        return rlhfless_cluster()
    if name in names():
        model, recipe, data = name.split("-")
        return rlhfless_testbed(f"Qwen2.5-{model.upper()}", recipe, data)
    if not name.endswith(".toml"):
        raise ConfigError(f"scenario {name!r} is not known (wants a TOML file, or one of {', '.join(names())})")
    return _read(Path(name))


class _Lengths(Section):
    mean: float | None = Field(None, gt=0)
    sigma: float | None = Field(None, gt=0)
    trace: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.mean is None) != (self.sigma is None) or (self.mean is None) == (self.trace is None):
            raise ValueError("wants mean and sigma, or trace")
        return self


class _Tools(Section):
    median_s: float = Field(gt=0)
    p99_s: float = Field(gt=0)
    turns: int = Field(8, ge=2)
    observation_tokens: int = Field(100, ge=1)
    timeout_s: float = Field(300.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.p99_s <= self.median_s:
            raise ValueError(f"p99_s is {self.p99_s:g}, not above median_s = {self.median_s:g}")
        return self


class _File(Section):
    device: str
    model: str
    gpus: int = Field(ge=1)
    recipe: Literal["grpo", "ppo"] = "grpo"
    lengths: _Lengths
    tools: _Tools | None = None
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    max_response_length: int = Field(ge=1)
    prompt_tokens: int = Field(200, ge=1)
    head_tokens: int = Field(50, ge=0)
    epoch_steps: int = Field(5, ge=1)
    steps: int = Field(20, ge=1)
    generate_gpus: int = Field(1, ge=1)
    tail_gpus: int | None = Field(None, ge=1)
    forward_gpus: int = Field(1, ge=1)
    rank_gpus: int = Field(1, ge=1)
    train_gpus: int | None = Field(None, ge=1)
    slots: int = Field(256, ge=1)
    process_s: float = Field(2.0, ge=0)
    link_gb_s: float = Field(6.25, gt=0)
    reward_sample_s: float = Field(0.002, ge=0)
    reward_replicas: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        room = kv_capacity_tokens(device(self.device), shape(self.model), self.generate_gpus)
        if (longest := self.head_tokens + self.prompt_tokens + self.max_response_length) > room:
            raise ValueError(f"a sample may have {longest} tokens, the GPUs of one replica have room for {room}")
        if self.tail_gpus is not None and self.tail_gpus < self.generate_gpus:
            raise ValueError(f"tail_gpus is {self.tail_gpus}, fewer than the {self.generate_gpus} of generate_gpus")
        for name in ("generate_gpus", "tail_gpus", "forward_gpus", "rank_gpus", "train_gpus"):
            if (getattr(self, name) or 0) > self.gpus:
                raise ValueError(f"{name} is {getattr(self, name)}, more than the {self.gpus} of gpus")
        if self.recipe == "ppo" and (self.gpus < 2 or 2 * (self.train_gpus or 1) > self.gpus):
            raise ValueError(f"ppo trains two models beside each other: too few gpus ({self.gpus})")
        return self


def _read(path: Path) -> Scenario:
    try:
        given = _File.model_validate(tomllib.loads(path.read_text()))
        fields = given.model_dump(exclude={"device", "model", "lengths", "tools"})
        lengths = _lengths(given, path.parent)
        lengths = lengths if given.tools is None else Turns(lengths, **given.tools.model_dump())
        return Scenario(path.stem, device(given.device), shape(given.model), lengths=lengths, **fields)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'scenario'}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(f"{path}: {line.replace('Value error, ', '')}" for line in lines)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _lengths(given: _File, base: Path) -> Lengths:
    if given.lengths.mean is not None and given.lengths.sigma is not None:
        return Lognormal.of(given.lengths.mean, given.lengths.sigma)
    assert given.lengths.trace is not None, "validated: one of both"
    path = base / given.lengths.trace
    try:
        trace = LengthTrace.read(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for step, group, index in itertools.product(
        range(1, given.steps + 1), range(given.prompts_per_step), range(given.samples_per_prompt)
    ):
        found, sample = trace.lengths.get((step, group, index)), f"step {step}, group {group}, index {index}"
        if found is None:
            raise ConfigError(f"{path}: has no line for {sample}")
        if found > (most := given.max_response_length):
            raise ConfigError(f"{path}: {sample} has {found} tokens, more than max_response_length = {most}")
    return trace
