"""Which engine a generate replica runs. Engines are imported when they are chosen: vLLM takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from functions.function import FatalError
from functions.generate.engine import Engine

ENGINES = ("auto", "torch", "transformers", "vllm")


@dataclass(frozen=True)
class Choice:
    """`why` is for people: it stands in the data of every `done`."""

    name: str
    why: str


@dataclass(frozen=True)
class EngineOptions:
    dtype: torch.dtype
    device: torch.device
    slots: int
    """Samples decoded at a time."""
    deterministic: bool


def choose(engine: str, model_dir: Path, options: EngineOptions) -> Choice:
    """`auto`: the torch engine for a Llama-shaped model, else transformers. Raises FatalError for a name that is no
    engine, and for the torch engine with a model that it cannot compute."""
    if engine not in ENGINES:
        raise FatalError(f"engine {engine!r}: wants one of {', '.join(ENGINES)}")
    if engine == "transformers":
        return Choice(engine, "asked for")
    from transformers import AutoConfig

    from functions.generate.llama import unsupported

    reason = unsupported(AutoConfig.from_pretrained(model_dir))
    if engine == "torch":
        if reason is not None:
            raise FatalError(f"engine 'torch' cannot run {model_dir.name}: {reason}; engine = 'transformers' can")
        return Choice(engine, "asked for")
    if engine == "vllm":
        raise FatalError("engine 'vllm' is not part of this build; engine = 'torch' or 'transformers' is")
    return Choice("transformers", reason) if reason else Choice("torch", "the model is Llama-shaped")


def make_engine(choice: Choice, options: EngineOptions) -> Engine:
    if choice.name == "torch":
        from functions.generate.engine_torch import TorchEngine

        return TorchEngine(
            dtype=options.dtype, device=options.device, slots=options.slots, deterministic=options.deterministic
        )
    from functions.generate.engine_transformers import TransformersEngine

    return TransformersEngine(
        dtype=options.dtype, device=options.device, slots=options.slots, deterministic=options.deterministic
    )
