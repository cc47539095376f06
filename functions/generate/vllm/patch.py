"""A delta applied to the weights that vLLM's worker holds, and a look at whether they are then those of the version.

    delta (weights/delta.py) -> CheckpointWeightPatch per tensor -> vLLM: NaN where nothing changed -> load_weights
                                                                         copies what is no NaN
    files of the version     -> SAMPLES values per tensor -> the same way, but compared instead of copied
`load_weights` knows where a checkpoint's tensor lies in the model (fused projections, parts of a tensor-parallel rank),
so both go through it. Whoever keeps its weights in another order, or held other weights than was thought, shows in the
samples: of weights that differ in 1 %, 64 samples from each of 200 tensors miss all with probability 1e-56.

Runs in vLLM's worker process, read against vLLM 0.32 (model_loader/checkpoint_weight_patch.py).
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from functions.generate.vllm.slices import sampled_blocks
from functions.weights.delta import decode, unsigned
from functions.weights.files import decode_header, weight_files
from functions.weights.store import DTYPES

Sample = tuple[str, tuple[int, ...], Tensor, Tensor]
"""Name and shape of a tensor, positions in its flat order, their values."""
SAMPLES = 64
CHUNK_BYTES = 512 * 2**20
"""Of checkpoint tensors that are made at a time, as vLLM does it."""


def apply(model: Any, deltas: Sequence[Sequence[bytes]], directory: Path) -> bool:
    """Whether the model now holds the weights of `directory`, by `deltas` from what it held. Where not, they are
    neither. Raises what vLLM raises where it cannot do this: ValueError for a NaN, TypeError for integers,
    NotImplementedError for a loader that does more than to copy."""
    device = next(model.parameters()).device
    shapes = {tensor.name: tensor.shape for path in weight_files(directory) for tensor in decode_header(path)}
    for parts in deltas:
        load_checkpoint_weight_patches(model, _patches(parts, shapes, device))
    return _agree(model, directory, device)


def _patches(
    parts: Sequence[bytes], shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> list[CheckpointWeightPatch]:
    """One for each tensor, whatever number of sections and parts it lies in."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for part in parts:
        for section in decode(part):
            values = torch.from_numpy(section.values.copy()).view(DTYPES[section.dtype])
            found.setdefault(section.tensor, []).append((torch.from_numpy(section.positions), values))
    return [
        CheckpointWeightPatch(
            name,
            shapes[name],
            sections[0][1].dtype,
            torch.cat([values for _, values in sections]).to(device),
            torch.cat([positions for positions, _ in sections]).to(device),
        )
        for name, sections in found.items()
    ]


def _agree(model: Any, directory: Path, device: torch.device) -> bool:
    """Whether the sampled values of the files are those of the model."""
    differ: list[Tensor] = []
    original = Tensor.copy_

    def compare(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if destination.shape != source.shape:
            raise NotImplementedError("a loader that does more than to copy")
        source = source.to(destination.device, destination.dtype)
        differ.append((~torch.isnan(source) & (source != destination)).any())
        return destination

    for chunk in _chunks(_all_but(sampled_blocks(directory) or _samples(directory), device)):
        Tensor.copy_ = compare  # type: ignore[method-assign,assignment]
        try:
            model.load_weights(chunk)
        finally:
            Tensor.copy_ = original  # type: ignore[method-assign]
    return bool(differ) and not bool(torch.stack(differ).any())


def _chunks(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    chunk, size = list[tuple[str, Tensor]](), 0
    for name, tensor in tensors:
        chunk.append((name, tensor))
        size += tensor.nbytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _all_but(samples: Iterable[Sample], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, NaN but for what was sampled."""
    for name, shape, positions, values in samples:
        sampled = torch.full((math.prod(shape),), float("nan"), dtype=values.dtype, device=device)
        sampled[positions.to(device)] = values.to(device)
        yield name, sampled.view(shape)


def _samples(directory: Path) -> Iterator[Sample]:
    """A few values at random of each tensor of the files."""
    rng = np.random.default_rng()
    for path in weight_files(directory):
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for tensor in decode_header(path):
            dtype = DTYPES[tensor.dtype]
            if not tensor.length or not dtype.is_floating_point:
                continue
            flat = unsigned(content[tensor.start : tensor.start + tensor.length], tensor.dtype)
            positions = rng.integers(0, len(flat), SAMPLES)
            values = torch.from_numpy(flat[positions]).view(dtype)
            yield tensor.name, tensor.shape, torch.from_numpy(positions), values
