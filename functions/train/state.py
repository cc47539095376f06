"""What a trainer holds of one version: model, optimizer, numbers that go from step to step. Load and publish."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from functions.forward import Head, output_head
from functions.function import Context, FatalError
from functions.lora import adapter_tensors, add_adapters, load_adapters
from functions.models import checkpoint_tensors, load_causal_lm, load_critic
from functions.train.optimizer import MASTER, Optimizer
from functions.train.params import LoraParams, TrainParams
from functions.weights.manifest import Adapter, Manifest, label, read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import fetch, fetch_state, publish
from functions.wire import Version


@dataclass(frozen=True)
class Structure:
    """What must be equal for a held model to serve a call."""

    objective: str
    dtype: str
    lora: LoraParams | None

    @classmethod
    def of(cls, params: TrainParams) -> Structure:
        return cls(params.objective, params.dtype, params.lora)


@dataclass(frozen=True)
class TrainState:
    """A version of a model in memory, ready to be improved in place."""

    version: Version
    base: Version
    """The version whose whole weights are in `model`: the adapters' base, else `version` as it was loaded."""
    structure: Structure
    model: PreTrainedModel
    head: Head | None
    """None for a critic."""
    optimizer: Optimizer
    carry: dict[str, float]


def load(version: Version, params: TrainParams, context: Context, device: torch.device) -> TrainState:
    """Everything from the exchange. Weights are float32: a bfloat16 version brings float32 masters in its state."""
    manifest = read_manifest(context.exchange, version)
    directory = Path(context.scratch) / "train"
    shutil.rmtree(directory, ignore_errors=True)
    base = _base(manifest, params)
    materialize(context.exchange, base, directory)
    frozen_dtype = torch.bfloat16 if params.lora is not None and params.dtype == "bfloat16" else torch.float32
    try:
        load_model = load_causal_lm if params.objective == "policy" else load_critic
        model = load_model(directory, dtype=frozen_dtype, device=str(device))
        head = output_head(model) if params.objective == "policy" else None
        if params.lora is not None:
            add_adapters(model, rank=params.lora.rank, alpha=params.lora.alpha, targets=params.lora.targets)
            if manifest.adapter is not None:
                load_adapters(model, fetch(context.exchange, version))
    except ValueError as error:
        raise FatalError(f"weights {label(version)}: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    state = fetch_state(context.exchange, version)
    named = trainable(model)
    with torch.no_grad():
        for name, parameter in named.items():
            if MASTER + name in state:
                parameter.copy_(state[MASTER + name])
    trainer = manifest.trainer
    try:
        optimizer = Optimizer(named, state, int(trainer.get("optimizer_steps", 0)))
    except KeyError as error:
        raise FatalError(f"weights {label(version)}: its optimizer state lacks {error}") from error
    return TrainState(version, base, Structure.of(params), model, head, optimizer, dict(trainer.get("carry", {})))


def _base(manifest: Manifest, params: TrainParams) -> Version:
    """The version whose whole weights are loaded: an adapter's base where adapters are trained on."""
    if manifest.adapter is None or params.lora is None:
        return manifest.version
    have, want = manifest.adapter, params.lora
    if (have.rank, have.alpha, have.targets) != (want.rank, want.alpha, want.targets):
        raise FatalError(
            f"weights {label(manifest.version)}: its adapters have rank {have.rank}, alpha {have.alpha}, targets "
            f"{list(have.targets)}; params.lora wants {want.rank}, {want.alpha}, {list(want.targets)}"
        )
    return have.base


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def publish_state(
    state: TrainState, version: Version, carry: dict[str, float], result: dict[str, Any], context: Context
) -> Manifest:
    """Weights, optimizer state and `result` (what a repeated call answers) as `version`, under one manifest."""
    lora, moments = state.structure.lora, state.optimizer.state()
    tensors = checkpoint_tensors(state.model) if lora is None else adapter_tensors(state.model)
    if state.structure.dtype == "bfloat16" and lora is None:
        moments |= {MASTER + name: parameter.detach() for name, parameter in state.optimizer.named.items()}
        tensors = {name: _rounded(tensor) for name, tensor in tensors.items()}
    return publish(
        context.exchange,
        version,
        tensors=tensors,
        state=moments,
        trainer={"optimizer_steps": state.optimizer.steps, "carry": carry} | result,
        model_files=None,
        parent=state.version,
        adapter=None if lora is None else Adapter(state.base, lora.rank, lora.alpha, lora.targets),
    )


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
