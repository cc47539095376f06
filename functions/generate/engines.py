"""Which engine a generate replica runs. Engines are imported when they are chosen, vLLM (which takes seconds) not even
to be asked where its answer would change nothing."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from functions.base.names import Engine as EngineName
from functions.call.function import FatalError
from functions.generate.engine.base import Engine

ENGINES = get_args(EngineName)


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
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """VllmSettings that only the vLLM engine has."""


def choose(engine: str, model_dir: Path, options: EngineOptions) -> Choice:
    """`auto`: on a GPU vLLM, where it is installed and knows the model; else the torch engine for a Llama-shaped model
    (on a CPU it samples faster than vLLM and starts sooner: docs/performance.md), vLLM or transformers for any other.
    Raises FatalError for a name that is no engine, and for an engine that cannot do what is asked."""
    if engine not in ENGINES:
        raise FatalError(f"engine {engine!r}: wants one of {', '.join(ENGINES)}")
    if engine == "transformers":
        return Choice(engine, "asked for")
    from transformers import AutoConfig

    from functions.generate.torch.llama import unsupported

    reason = unsupported(AutoConfig.from_pretrained(model_dir))
    if engine == "torch":
        if reason is not None:
            raise FatalError(f"engine 'torch' cannot run {model_dir.name}: {reason}; engine = 'transformers' can")
        return Choice(engine, "asked for")
    on_gpu = options.device.type == "cuda"
    if engine == "auto" and reason is None and not on_gpu:
        return Choice("torch", "the model is Llama-shaped and the device no GPU")  # without a look at vLLM: see above
    without_vllm = _without_vllm(model_dir, options)
    if engine == "vllm":
        if without_vllm is not None:
            other = "torch" if reason is None else "transformers"
            raise FatalError(f"engine 'vllm' cannot run {model_dir.name}: {without_vllm}; engine = {other!r} can")
        return Choice(engine, "asked for")
    if without_vllm is None:
        return Choice("vllm", "vLLM is installed and the device is a GPU" if on_gpu else f"not torch: {reason}")
    if reason is None:
        return Choice("torch", f"the model is Llama-shaped; not vLLM: {without_vllm}")
    return Choice("transformers", f"not torch: {reason}; not vLLM: {without_vllm}")


def _without_vllm(model_dir: Path, options: EngineOptions) -> str | None:
    """Why vLLM cannot run here, None when it can."""
    if options.deterministic:
        return "its log-probabilities depend on the batch in their last bits, which deterministic = true forbids"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    from functions.generate.vllm.start import device_type, knows

    if device_type() != options.device.type:
        return f"the installed vLLM was built for {device_type()}, the device is {options.device.type}"
    if not knows(json.loads((model_dir / "config.json").read_bytes())):
        return "it does not know the model's architecture"
    return None


def make_engine(choice: Choice, options: EngineOptions) -> Engine:
    if choice.name == "torch":
        from functions.generate.torch.engine import TorchEngine

        return TorchEngine(
            dtype=options.dtype, device=options.device, slots=options.slots, deterministic=options.deterministic
        )
    if choice.name == "vllm":
        from functions.generate.vllm.engine import VllmEngine
        from functions.generate.vllm.start import VllmSettings

        dtype = str(options.dtype).removeprefix("torch.")
        return VllmEngine(VllmSettings(**{"dtype": dtype, "slots": options.slots, **options.vllm}))
    from functions.generate.torch.transformers_engine import TransformersEngine

    return TransformersEngine(
        dtype=options.dtype, device=options.device, slots=options.slots, deterministic=options.deterministic
    )
