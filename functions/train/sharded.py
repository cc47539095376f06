"""A gang's model without the whole of it on any rank: parameters on the meta device, sharded, then each rank's rows
read into its shards.

    config.json -> model without weights -> fully_shard -> empty shards on the device -> own rows of each tensor
For the SHARED_ARCHITECTURES of functions/models/forward.py, whose output head is known (of others it is checked, on
whole weights), where the checkpoint holds each tensor as the model does, under its name. Others are loaded whole.
"""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from functions.call.function import Context
from functions.models.forward import SHARED_ARCHITECTURES, head_form
from functions.models.pretrained import empty_causal_lm, empty_critic, own_tensors
from functions.train.gang import Ranks
from functions.train.parallel import Forward, placed, shard
from functions.train.parts import fetch_own
from functions.train.pipeline import cut
from functions.weights.manifest import Manifest, TensorEntry
from functions.weights.materialize import write_files


@dataclass(frozen=True)
class Weights:
    """What a model is loaded from, and as what."""

    manifest: Manifest
    policy: bool
    """Else a critic, whose `score` is zero where there is none."""
    dtype: torch.dtype
    masters: Collection[str]
    """Parameters that are not read here: their float32 masters are, with the optimizer's state."""


def sharded_model(
    weights: Weights, adapt: Callable[[PreTrainedModel], None], context: Context, directory: Path, device: torch.device,
    ranks: Ranks, kept: Mapping[str, Tensor],
) -> Forward | None:  # fmt: skip
    """The rank's shards of the model, on `device`; None where it has to be loaded whole. `adapt` adds adapters to it.
    What is `kept` (kept.py) is not read.

    `directory` is for configuration files. Raises ValueError for a configuration that transformers cannot read.
    """
    assert ranks.mesh is not None, "of a gang"
    shutil.rmtree(directory, ignore_errors=True)
    write_files(context.exchange, weights.manifest, directory)
    if json.loads((directory / "config.json").read_bytes()).get("model_type") not in SHARED_ARCHITECTURES:
        return None
    model = (empty_causal_lm if weights.policy else empty_critic)(directory, dtype=weights.dtype)
    forward = Forward(model, head_form(model) if weights.policy else None)
    forward.stage = cut(model, ranks.mesh)
    sources = _sources(model, weights)
    if sources is None:
        return None
    modules = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in sources}
    adapt(model)  # layers get other names, but stay the same modules
    shard(forward, ranks.mesh)
    forward._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
    parameters = {name: module.get_parameter(leaf) for name, (module, leaf) in modules.items()}
    wanted = [
        (entry, parameters[name])
        for name, entry in sources.items()
        if entry is not None and name not in weights.masters
    ]
    with torch.no_grad():
        for name, entry in sources.items():
            if entry is None:
                parameters[name].zero_()
        with context.phase("fetch"):
            for name, rows in fetch_own(context.exchange, weights.manifest, wanted, ranks, kept):
                parameters[name].copy_(placed(rows.to(parameters[name].dtype), parameters[name]))
    return forward


def _sources(model: PreTrainedModel, weights: Weights) -> dict[str, TensorEntry | None] | None:
    """What each parameter is read from; None for a critic's new `score`. None instead of all where the model's tensors
    are not those of its checkpoint one by one."""
    if weights.manifest.adapter is not None:  # to be merged first
        return None
    own: dict[str, Tensor] = own_tensors(model)
    if own.keys() - dict(model.named_parameters()).keys():  # buffers that are stored
        return None
    entries = {entry.name: entry for entry in weights.manifest.tensors}
    found: dict[str, TensorEntry | None] = {}
    for name, tensor in own.items():
        entry = entries.get(name)
        if entry is None and (weights.policy or not name.startswith("score.")):
            return None
        if entry is not None and entry.shape != tuple(tensor.shape):
            return None
        found[name] = entry
    return found
