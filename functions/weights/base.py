"""Version 0: a user's Hugging Face directory published as it is, byte by byte. No torch here."""

import mmap
from collections.abc import Mapping
from pathlib import Path

from functions.base.wire import Ref, Version
from functions.exchange.base import Exchange, NotFound
from functions.weights.blobs import Blob, publish_blobs
from functions.weights.files import decode_header, side_files, weight_files
from functions.weights.manifest import read_manifest


def import_model(exchange: Exchange, model: str, directory: Path) -> Version:
    """Publishes the model of `directory` as version 0 of `model`. Does nothing when there is one already.

    Raises ValueError, in one line, for a directory that holds no model.
    """
    version = Version(model, 0)
    files = weight_files(directory)
    try:
        read_manifest(exchange, version)
        return version
    except NotFound:
        pass
    tensors: dict[str, Blob] = {}
    for path in files:
        content = _mapped(path)
        for tensor in decode_header(path):
            data = content[tensor.start : tensor.start + tensor.length]
            if tensor.name in tensors:
                raise ValueError(f"model {directory}: tensor {tensor.name!r} stands in two files")
            tensors[tensor.name] = Blob(tensor.dtype, tensor.shape, data)
    if not tensors:
        raise ValueError(f"model {directory}: its weights hold no tensor")
    side = put_files(exchange, version, side_files(directory))
    publish_blobs(exchange, version, tensors=tensors, state={}, trainer={}, files=side, parent=None)
    return version


def put_files(exchange: Exchange, version: Version, files: Mapping[str, bytes]) -> dict[str, Ref]:
    return {name: exchange.durable.put(f"{version.prefix}files/{name}", data) for name, data in files.items()}


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
