"""Meshes that cannot be, and models that no rank of theirs could hold: said before anything is paid for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from functions.call.parallel import Parallel
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig
from orchestrator.job.functions import fused, model_directory
from orchestrator.job.roles import BY_NAME
from orchestrator.job.sections import OptimConfig
from orchestrator.planner.devices import device
from orchestrator.planner.model_shape import read_shape, text_config
from orchestrator.platforms.base import FunctionSpec

MOST_RANKS = 4096


def check_meshes(job: JobConfig, specs: Sequence[FunctionSpec]) -> None:
    """Raises ConfigError for a mesh that a function's kind, its replicas or its model do not allow, and for one whose
    ranks have not the memory, with the smallest that would have."""
    for role in (BY_NAME[spec.name] for spec in specs):
        name = "train" if role.objective == "value" and fused(job) else role.name
        mesh, where = job.function(name).parallel.mesh, f"functions.{name}.parallel"
        if mesh.size > 1 and role.kind == "generate":
            raise ConfigError(f"{where}: a replica that generates is split by its `gpus` (vLLM's tensor parallel size)")
        scores = role.kind == "reference" or (role.name == "reward" and job.reward.model is not None)
        if mesh.size > 1 and not scores and role.kind != "train":
            raise ConfigError(f"{where}: is for functions that train, or score by a model")
        if scores and mesh.size != mesh.tp:
            raise ConfigError(f"{where}: a replica that scores is divided by tp alone")
        if scores and mesh.tp > 1 and job.function(name).gpus not in (0, mesh.tp):
            raise ConfigError(f"functions.{name}.gpus: got {job.function(name).gpus}, tp wants {mesh.tp}, one a rank")
        if not scores and role.kind != "train":
            continue
        directory, lora = model_directory(job, role.model)[1], role.objective == "policy" and job.model.lora_rank > 0
        config = text_config(directory)
        try:
            mesh.dp(mesh.tp if scores else job.function(name).replicas)
            mesh.check(config, lora=lora)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if scores:
            continue
        optim = job.critic if role.objective == "value" else job.train
        room = None if lora else _room(job, name)
        try:
            parameters = read_shape(directory).parameters
        except ValueError:  # a shape that is not known here: nobody can say what it needs
            continue
        if room is not None:
            if not job.function(name).gpus:  # the host's memory is the device's
                optim = optim.model_copy(update={"optimizer_offload": False})
            _check_memory(name, job.function(name).replicas, mesh, config, parameters, room, optim)


def rank_bytes(
    parameters: float, config: Mapping[str, Any], ranks: int, mesh: Parallel, optim: OptimConfig | None = None
) -> float:
    """The least that a rank needs: its part of weights, gradients and moments, float32 (AdamW's two, Muon's one of the
    layers); whole, as FSDP2 gathers them, a layer and the embedding (with the output head, where that is another) and
    their gradients. Activations come on top."""
    optim = optim or OptimConfig()
    count, words = config["num_hidden_layers"], config.get("vocab_size", 0) * config["hidden_size"]
    ends = words if config.get("tie_word_embeddings") else 2 * words
    layer = (parameters - ends) / count / mesh.tp
    gathered = 0.0 if ranks == 1 else 8 * (layer * (mesh.dp(ranks) * mesh.cp > 1) + ends / mesh.pp)
    moments = 0.0 if optim.optimizer_offload else 8 * parameters
    if moments and optim.optimizer == "muon":
        moments -= 4 * (parameters - ends)
    return (8 * parameters + moments) / ranks + gathered


def _check_memory(
    name: str, ranks: int, mesh: Parallel, config: Mapping[str, Any], parameters: float, room: float, optim: OptimConfig
) -> None:
    need = rank_bytes(parameters, config, ranks, mesh, optim)
    if need <= room:
        return
    wanted = next(
        (
            f"replicas = {count}" + (f" and parallel.tp = {other.tp}" if other != mesh else "")
            for count, other in _others(mesh, config)
            if rank_bytes(parameters, config, count, other, optim) <= room
        ),
        "a larger device: no mesh divides it so far",
    )
    raise ConfigError(
        f"functions.{name}: each of {ranks} ranks needs {need / 2**30:.1f} GiB for weights, gradients and moments, "
        f"and has {room / 2**30:.1f} (wants {wanted})"
    )


def _others(mesh: Parallel, config: Mapping[str, Any]) -> Iterator[tuple[int, Parallel]]:
    """Meshes by their ranks, fewest first; of as many, those that are most like `mesh`."""
    allowed = [mesh]
    for tp in (2, 4, 8):
        try:
            other = Parallel(tp=tp, pp=mesh.pp)
            other.check(config)
        except ValueError:
            continue
        allowed += [other] if tp != mesh.tp else []
    for count in range(1, MOST_RANKS + 1):
        yield from ((count, other) for other in allowed if count % other.size == 0)


def _room(job: JobConfig, name: str) -> float | None:
    """Bytes of a rank's device, where the job says what that is."""
    config = job.function(name)
    if config.gpus:
        return None if job.planner.gpu is None else device(job.planner.gpu).memory_gib * 2**30 * config.gpus
    return None if config.memory_gb is None else config.memory_gb * 1e9
