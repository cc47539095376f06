"""What a trainer holds of one version: model, optimizer, numbers that go from step to step. Load and publish."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from functions.base.wire import Json, Version
from functions.call.function import Context, FatalError
from functions.call.train_params import LoraParams, TrainParams
from functions.exchange.node import NodeExchange
from functions.models.forward import output_head
from functions.models.lora import ADAPTER, adapter_tensors, add_adapters, load_adapters
from functions.models.parked import tensors_in
from functions.models.pretrained import checkpoint_names, checkpoint_tensors, load_causal_lm, load_critic, own_tensors
from functions.train.gang import ALONE, Ranks, await_value
from functions.train.kept import Kept, kept_for
from functions.train.optimizer import MASTER, Optimizer
from functions.train.parallel import Forward, placed, shard, whole
from functions.train.parts import fetch_own, own_blocks
from functions.train.pipeline import cut
from functions.train.sharded import Weights, sharded_model
from functions.weights.blobs import Blob, Written, commit, write_blobs
from functions.weights.delta import difference
from functions.weights.manifest import Adapter, Manifest, label, manifest_key, read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import blobs, fetch


@dataclass(frozen=True)
class Structure:
    """What must be equal for a held model to serve a call."""

    objective: str
    dtype: str
    lora: LoraParams | None
    optimizer: str
    optimizer_offload: bool

    @classmethod
    def of(cls, params: TrainParams) -> Self:
        own = params.optimizer
        return cls(params.objective, params.dtype, params.lora, own.optimizer, own.optimizer_offload)

    @property
    def deltas(self) -> bool:
        """Whether versions say what they changed: a step changes few weights in bfloat16, but all in float32."""
        return self.dtype == "bfloat16" and self.lora is None


@dataclass(frozen=True)
class TrainState:
    """A version of a model in memory, ready to be improved in place."""

    version: Version
    base: Version
    """The version whose whole weights are in `model`: the adapters' base, else `version` as it was loaded."""
    structure: Structure
    model: PreTrainedModel
    forward: Forward
    optimizer: Optimizer
    carry: dict[str, float]
    ranks: Ranks = ALONE
    published: Mapping[str, Blob] = field(default_factory=dict)
    """The bytes of the weights as `version` has them, where the next version will say what it changed of them."""


def load(
    version: Version, params: TrainParams, context: Context, device: torch.device, ranks: Ranks = ALONE,
    kept: Sequence[Kept] = (),
) -> TrainState:  # fmt: skip
    """Everything from the exchange, of a gang the rank's part of every tensor, but what is `kept` of it.

    Weights are float32: a bfloat16 version brings float32 masters in its state.
    """
    manifest = read_manifest(context.exchange, version)
    directory = Path(context.scratch) / "train"
    base = _base(manifest, params)
    dtype = torch.bfloat16 if params.lora is not None and params.dtype == "bfloat16" else torch.float32

    def adapt(model: PreTrainedModel) -> None:
        if params.lora is not None:
            add_adapters(model, rank=params.lora.rank, alpha=params.lora.alpha, targets=params.lora.targets)
            if manifest.adapter is not None:
                own = adapter_tensors(model)
                given = fetch(context.exchange, version)
                load_adapters(model, given if ranks.count("pp") == 1 else {n: given[n] for n in own if n in given})

    forward: Forward | None = None
    rows = kept_for(kept, version, Structure.of(params), ranks)
    try:
        if ranks.mesh is not None:
            masters = {e.name.removeprefix(MASTER) for e in manifest.state if e.name.startswith(MASTER)}
            weights = Weights(read_manifest(context.exchange, base), params.objective == "policy", dtype, masters)
            forward = sharded_model(weights, adapt, context, directory, device, ranks, rows)
        if forward is None:
            forward = _whole_model(base, params, adapt, context, directory, dtype, device, ranks)
    except ValueError as error:
        raise FatalError(f"weights {label(version)}: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    model = forward.model
    named, moments = trainable(model), dict[str, Tensor]()
    with context.phase("fetch"), torch.no_grad():
        owners = ((entry, named.get(entry.name.partition("/")[2])) for entry in manifest.state)
        owned = [(entry, owner) for entry, owner in owners if owner is not None]
        for name, own in fetch_own(context.exchange, manifest, owned, ranks, rows):
            parameter = named.get(name.removeprefix(MASTER))
            if parameter is None:
                moments[name] = own
            else:
                parameter.copy_(placed(own, parameter))
    trainer = manifest.trainer
    try:
        optimizer = Optimizer(named, moments, int(trainer.get("optimizer_steps", 0)), params.optimizer)
    except KeyError as error:
        raise FatalError(
            f"weights {label(version)}: its optimizer state lacks {error}, which {params.optimizer.optimizer!r} wants"
        ) from error
    carry = dict(trainer.get("carry", {}))
    state = TrainState(version, base, Structure.of(params), model, forward, optimizer, carry, ranks)
    return whole_again(state)


def lighter(state: TrainState) -> TrainState:
    """`state` without what can be computed again from its weights."""
    state.optimizer.zero_grad()
    return replace(state, published={})


def whole_again(state: TrainState) -> TrainState:
    """What `lighter` was given."""
    return replace(state, published=_weights(state)) if state.structure.deltas else state


def tensors_of(state: TrainState) -> list[Tensor]:
    return [*tensors_in(state.model), *state.optimizer.rows.values()]


def _whole_model(
    base: Version, params: TrainParams, adapt: Callable[[PreTrainedModel], None], context: Context, directory: Path,
    dtype: torch.dtype, device: torch.device, ranks: Ranks,
) -> Forward:  # fmt: skip
    """The model with all of its weights; of a gang they are sharded afterwards."""
    with context.phase("fetch"):
        shutil.rmtree(directory, ignore_errors=True)
        materialize(context.exchange, base, directory)
    load_model = load_causal_lm if params.objective == "policy" else load_critic
    model = load_model(directory, dtype=dtype, device=str(device) if ranks.mesh is None else "cpu")
    forward = Forward(model, output_head(model) if params.objective == "policy" else None)
    if ranks.mesh is not None:
        forward.stage = cut(model, ranks.mesh)
    adapt(model)
    if ranks.mesh is not None:
        shard(forward, ranks.mesh)
    return forward


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
    """By the names that versions have them under: an adapter is `<layer>.lora_A`."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name.removesuffix(f".{ADAPTER}.weight"): parameter for name, parameter in own.items()}


def publish_state(
    state: TrainState,
    version: Version,
    carry: dict[str, float],
    result: Json,
    context: Context,
    *,
    durable: bool = True,
) -> tuple[Manifest, TrainState | None]:
    """Weights, optimizer state and `result` (what a repeated call answers) as `version`, under one manifest.

    Not `durable`: the optimizer's state is held on this node alone, where it has room.
    Also the state that has become that version; None where another attempt's counts, which may have other bits. Of a
    gang each rank writes its own part, and rank 0 the manifest of all of them.
    """
    exchange, ranks, weights = context.exchange, state.ranks, _weights(state)
    parent = read_manifest(exchange, state.version)
    delta, sizes = _changes(state, parent, weights, context)
    result = result | {"stats": result["stats"] | sizes}
    node = None if durable else _node(context.node, ranks)
    moments = _own(_uncopied(_moments(state), state.forward), ranks)
    written = write_blobs(exchange, version, tensors=weights, state=moments, delta=delta, node=node)
    everyone = [Written.from_json(value) for value in ranks.in_mesh(ranks.gather(written.to_json()))]
    published = weights if state.structure.deltas else {}
    after = replace(state, version=version, carry=carry, published=published)
    if ranks.rank:
        await_value(manifest_key(version), context)
        manifest = read_manifest(exchange, version)
        return manifest, after if manifest.keys().issuperset(written.keys) else None
    trainer = {"optimizer_steps": state.optimizer.steps, "carry": carry, "result": result}
    manifest = commit(
        exchange,
        version,
        everyone,
        trainer=trainer | {"durable": all(writer.durable for writer in everyone)},
        files=parent.files,
        parent=state.version,
        adapter=_adapter(state),
    )
    return manifest, after if manifest.trainer["result"] == result else None


def _node(node: NodeExchange | None, ranks: Ranks) -> NodeExchange | None:
    """`node`, where all ranks have the same."""
    own = "" if node is None else node.identity
    return node if all(value["node"] == own for value in ranks.gather({"node": own})) else None


def _weights(state: TrainState) -> dict[str, Blob]:
    """What this rank writes of the weights."""
    model, structure, ranks = state.model, state.structure, state.ranks
    if structure.lora is not None:
        return _own(adapter_tensors(model).items(), ranks)
    if ranks.mesh is not None:
        return _own(_uncopied(_stored_parts(model, structure, ranks).items(), state.forward), ranks)
    return _own(_rounded(checkpoint_tensors(model, own_tensors(model)), structure).items(), ranks)


def _uncopied(tensors: Iterable[tuple[str, Tensor]], forward: Forward) -> Iterator[tuple[str, Tensor]]:
    """Without what an earlier stage of a pipeline writes."""
    copied = None if forward.stage is None else forward.stage.copied
    return ((name, tensor) for name, tensor in tensors if name.rpartition("/")[2] != copied)


def _own(tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> dict[str, Blob]:
    """This rank's part of the tensors, all of them where it is alone."""
    return blobs(dict(tensors)) if ranks.mesh is None else own_blocks(tensors, ranks)


def _changes(
    state: TrainState, parent: Manifest, weights: Mapping[str, Blob], context: Context
) -> tuple[tuple[bytes, ...], Json]:
    """What this rank adds to the delta, nothing unless all ranks have their part; and the delta's sizes, for stats."""
    if not state.structure.deltas:
        return (), {}
    with context.phase("compare"):
        own = difference(parent, state.published, weights)
    told = None if own is None else [own.changed, own.elements, *map(len, own.parts)]
    found = [value["own"] for value in state.ranks.gather({"own": told})]
    if own is None or None in found:
        return (), {}
    parts = [sizes for _, _, *sizes in found]
    delta = own.parts if all(parts) else ()
    changed, elements = (sum(value[i] for value in found) for i in (0, 1))
    return delta, {"changed_weights": changed / elements, "delta_bytes": sum(map(sum, parts)) if all(parts) else 0}


def _moments(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's state, with float32 masters where the weights are published in bfloat16."""
    yield from state.optimizer.state()
    if state.structure.dtype == "bfloat16" and state.structure.lora is None:
        yield from ((MASTER + name, parameter.detach()) for name, parameter in state.optimizer.named.items())


def _adapter(state: TrainState) -> Adapter | None:
    lora = state.structure.lora
    return None if lora is None else Adapter(state.base, lora.rank, lora.alpha, lora.targets)


def _stored_parts(model: PreTrainedModel, structure: Structure, ranks: Ranks) -> dict[str, Tensor]:
    """The weights of a sharded model as a version has them: what the checkpoint stores as the model has it is sharded,
    what it stores in another form (experts apart, for one) is whole, on the first rank that has it alone.
    """
    own = own_tensors(model)
    names = checkpoint_names(model, own)
    others = whole({name: t for name, t in own.items() if name not in names.values()}, keep=ranks.writes)
    converted = checkpoint_tensors(model, others) if others else {}
    parts = {name: own[source] if source is not None else converted.get(name) for name, source in names.items()}
    return _rounded({name: tensor for name, tensor in parts.items() if tensor is not None}, structure)


def _rounded(tensors: dict[str, Tensor], structure: Structure) -> dict[str, Tensor]:
    """Weights in the dtype that a version has them in."""
    if structure.dtype != "bfloat16":
        return tensors
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
