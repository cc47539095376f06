"""Versions as tests make and read them: whole, from tensors, optimizer state included."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from functions.base.wire import Json, Version
from functions.exchange.base import Exchange
from functions.weights.base import put_files
from functions.weights.blobs import Blob, publish_blobs
from functions.weights.manifest import Adapter, Manifest, read_manifest
from functions.weights.store import blobs, fetch_rows


def publish(
    exchange: Exchange,
    version: Version,
    *,
    tensors: Mapping[str, Tensor] | Mapping[str, Blob],
    state: Mapping[str, Tensor],
    trainer: Json,
    model_files: Mapping[str, bytes] | None,
    parent: Version | None,
    adapter: Adapter | None = None,
    delta: Sequence[bytes] = (),
) -> Manifest:
    """`model_files` None takes over the parent's."""
    if model_files is None:
        assert parent is not None
        files = dict(read_manifest(exchange, parent).files)
    else:
        files = put_files(exchange, version, model_files)
    return publish_blobs(
        exchange, version, tensors=blobs(tensors), state=blobs(state), trainer=trainer, files=files, parent=parent,
        adapter=adapter, delta=delta,
    )  # fmt: skip


def fetch_state(exchange: Exchange, version: Version, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The optimizer's state: of `names`, else all of it."""
    manifest = read_manifest(exchange, version)
    wanted = [entry for entry in manifest.state if names is None or entry.name in names]
    return dict(fetch_rows(exchange, manifest, [(entry, 0, entry.rows) for entry in wanted]))
