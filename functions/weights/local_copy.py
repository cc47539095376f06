"""A replica's copy of the weights: a Hugging Face directory that stays, and follows its model by deltas. No torch here.

    held v3 --delta--> v4 --delta--> v5        what changed is fetched and written over the old bytes of the files
    anything else ---------------------> v5    whole (materialize.py)

By deltas where the copy is of an ancestor, each version on the way names its delta, all of them are still there, and
together they are smaller than delta.LARGEST_SHARE of the whole. Afterwards every tensor must have the hash that the new
version's manifest gives it, the same check that bytes fetched whole go through: a delta that is wrong, or is applied to
another base, is Corrupt and never weights.
"""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from functions.base.wire import Version
from functions.exchange.base import Corrupt, Exchange, NotFound
from functions.weights.delta import LARGEST_SHARE, decode, unsigned
from functions.weights.files import decode_header, weight_files
from functions.weights.manifest import ITEM_BYTES, Manifest, label, read_manifest, tensor_hash
from functions.weights.materialize import materialize

SOURCE = "source.json"
"""In a directory whose weights are holes: where they lie."""
Phase = Callable[[str], AbstractContextManager[None]]
"""Context.phase: `fetch`, and within it `fetch delta` where the version comes so."""


@dataclass(frozen=True)
class Changes:
    """What was overwritten in version `since`: the parts (delta.py) of each version after it, in their order."""

    since: Version
    deltas: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True)
class Arrival:
    directory: Path
    changes: Changes | None
    """None where it was fetched whole."""


class LocalCopy:
    """Of one version at a time, below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: Manifest | None = None
        self._directory = root
        self.altered = False
        """Whether the latest `bring` failed while it wrote into files that had been handed out."""

    def bring(
        self, exchange: Exchange, version: Version, phase: Phase, opened: tuple[str, str] | None = None
    ) -> Arrival:
        """The directory of `version`, loadable by transformers and vLLM, and the deltas that it came by.

        `opened`, (URL, job) of the exchange: its readers read the weights from there, and check them; those of the
        directory are holes, but of adapters that are to be merged.

        Who still maps files of a directory handed out before sees them change. Raises NotFound for a version that was
        not published, and Corrupt, naming version and tensor, for altered bytes and for a delta that does not lead to
        the version: no copy is left then, and the next attempt fetches the version whole.
        """
        held, self._held, self.altered = self._held, None, False
        directory = self._root / directory_name(version)
        with phase("fetch"):
            manifest = read_manifest(exchange, version)
            holes = opened is not None and manifest.adapter is None
            way = None if held is None else _way(exchange, held, manifest)
            deltas = None if way is None else self._by_deltas(exchange, way, manifest, phase, apply=not holes)
            if deltas is None:
                self.drop()
                materialize(exchange, version, directory, holes=holes)
            elif self._directory != directory:
                self._directory.rename(directory)
            if opened is not None and holes:
                where = {"exchange": opened[0], "job": opened[1], "version": version.to_json()}
                (directory / SOURCE).write_text(json.dumps(where))
        self._held, self._directory = manifest, directory
        return Arrival(directory, None if held is None or deltas is None else Changes(held.version, deltas))

    @property
    def directory(self) -> Path | None:
        """Where the version lies that is held; None: none is."""
        return None if self._held is None else self._directory

    def settle(self) -> None:
        """After the weights were loaded: deletes a copy that no delta will lead on from."""
        if self._held is not None and not followed(self._held):
            self.drop()

    def drop(self) -> None:
        self._held = None
        shutil.rmtree(self._root, ignore_errors=True)

    def _by_deltas(
        self, exchange: Exchange, way: Sequence[Manifest], to: Manifest, phase: Phase, *, apply: bool
    ) -> tuple[tuple[bytes, ...], ...] | None:
        """The deltas that were applied; None where one of them is gone, or the files are (somebody tidied up).

        Nothing is touched before all are there.
        """
        with phase("fetch delta"):
            try:
                deltas = tuple(tuple(exchange.durable.get(ref) for ref in step.delta) for step in way)
                tensors = _mapped(self._directory)
            except (NotFound, OSError, ValueError):
                return None
            if not apply:
                return deltas
            self.altered = True
            for step, parts in zip(way, deltas, strict=True):
                for part in parts:
                    _apply(part, step, tensors)
            for entry in to.tensors:
                if tensor_hash(tensors[entry.name].data) != entry.hash:
                    who = f"weights {label(to.version)}, tensor {entry.name!r}"
                    raise Corrupt(f"{who}: its delta does not lead to the bytes published")
            self.altered = False
        return deltas


def directory_name(version: Version) -> str:
    """Of a version's directory."""
    return f"{version.model}.{version.number:06d}.{version.call}"


def followed(manifest: Manifest) -> bool:
    """Whether versions after this one may come as deltas: whole models with weights of two bytes. A step changes
    most of those of four."""
    return manifest.adapter is None and any(ITEM_BYTES[entry.dtype] == 2 for entry in manifest.tensors)


def _way(exchange: Exchange, held: Manifest, to: Manifest) -> list[Manifest] | None:
    """The versions after `held` up to `to`, each with its delta; None where the whole is to be fetched."""
    if _layout(held) != _layout(to):
        return None
    way, size = list[Manifest](), 0
    step = to
    while step.version != held.version:
        size += sum(ref.size_bytes for ref in step.delta)
        if not step.delta or step.parent is None or size > LARGEST_SHARE * to.size_bytes:
            return None
        if step.parent.number < held.version.number:
            return None
        way.insert(0, step)
        try:
            step = held if step.parent == held.version else read_manifest(exchange, step.parent)
        except NotFound:
            return None
    return way


def _layout(manifest: Manifest) -> object:
    return manifest.files, {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}, manifest.adapter


def _apply(part: bytes, step: Manifest, tensors: Mapping[str, _Mapped]) -> None:
    try:
        for section in decode(part):
            tensor = tensors.get(section.tensor)
            if tensor is None or tensor.dtype != section.dtype:
                raise ValueError(f"tensor {section.tensor!r}: the version before has none of {section.dtype}")
            elements = unsigned(tensor.data, tensor.dtype)
            if len(section.positions) and int(section.positions[-1]) >= len(elements):
                raise ValueError(f"tensor {section.tensor!r}: it has no element {int(section.positions[-1])}")
            elements[section.positions] = section.values
    except ValueError as error:
        raise Corrupt(f"weights {label(step.version)}: its delta: {error}") from error


@dataclass(frozen=True)
class _Mapped:
    dtype: str
    data: memoryview


def _mapped(directory: Path) -> dict[str, _Mapped]:
    """The tensors of a directory by name: what is written into them is written into its files."""
    found = {}
    for path in weight_files(directory):
        with path.open("r+b") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0))
        for tensor in decode_header(path):
            found[tensor.name] = _Mapped(tensor.dtype, content[tensor.start : tensor.start + tensor.length])
    return found
