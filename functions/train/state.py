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
from functions.models import checkpoint_tensors, load_causal_lm, load_critic
from functions.train.optimizer import MASTER, Optimizer
from functions.train.params import LoraParams, TrainParams
from functions.weights.manifest import Manifest, label, read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import fetch_state, publish
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
    materialize(context.exchange, version, directory)
    try:
        model = (load_causal_lm if params.objective == "policy" else load_critic)(directory, device=str(device))
        head = output_head(model) if params.objective == "policy" else None
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
    return TrainState(version, Structure.of(params), model, head, optimizer, dict(trainer.get("carry", {})))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def publish_state(
    state: TrainState, version: Version, carry: dict[str, float], result: dict[str, Any], context: Context
) -> Manifest:
    """Weights, optimizer state and `result` (what a repeated call answers) as `version`, under one manifest."""
    tensors = checkpoint_tensors(state.model)
    moments = state.optimizer.state()
    if state.structure.dtype == "bfloat16":
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
    )


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
