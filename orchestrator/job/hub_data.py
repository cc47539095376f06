"""Data sets of the Hub: which files of a repository are a split of a configuration.

By the `configs` of its README (huggingface.co/docs/hub/datasets-manual-configuration), else by its files' names:

    train.jsonl, data/train-00000-of-00002.parquet           configuration "default"
    main/train-00000-of-00001.parquet, main/train/0000.parquet   configuration "main"

Parquet and JSONL are read. A repository of other files has parquet in the revision that the Hub makes of it:
`ORG/NAME/CONFIG:SPLIT@refs/convert/parquet`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Self

from orchestrator.job.hub import HubId, snapshot

READ = (".parquet", ".jsonl")
SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "test")}
"""By the key under [data]: the splits that are meant where none is named; the first that there is."""
_PART = re.compile(r"(?P<split>[A-Za-z]\w*?)(-\d+-of-(?P<of>\d+))?(-[0-9a-f]{8,})?")


@dataclass(frozen=True)
class DataFiles:
    id: HubId
    """As it was chosen: with configuration, split and commit."""
    paths: Sequence[Path]


def find(id: HubId, key: str, *, cached_only: bool = False) -> DataFiles:
    """Downloads (or finds in the cache) the files that `id` means under [data] `key`. Raises ValueError, one line."""
    head = snapshot(id, "dataset", ["README.md"], cached_only=cached_only)
    pinned = id.at(head.name)
    names = _names(pinned, head, cached_only)
    readme = head / "README.md"
    layout = Layout.of(names, readme.read_text(encoding="utf-8") if readme.is_file() else "")
    config, split, chosen = layout.choose(id, SPLITS[key])
    folder = snapshot(pinned, "dataset", chosen, cached_only=cached_only)
    found = HubId(id.repository, config if id.config or config != "default" else None, split, head.name)
    return DataFiles(found, [folder / name for name in chosen])


def _names(id: HubId, folder: Path, cached_only: bool) -> list[str]:
    """The files of a commit; where the Hub cannot be asked, those of it that are in the cache."""
    import huggingface_hub

    if not cached_only:
        try:
            return huggingface_hub.HfApi().list_repo_files(id.repository, revision=id.revision, repo_type="dataset")
        except Exception:  # offline, in any of the ways that an HTTP client knows; `choose` says what is missing
            pass
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


@dataclass
class Layout:
    """configuration -> split -> files, in the order of their names."""

    configs: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    first: str = "default"
    """The configuration that is meant where none is named, if there is one of this name."""

    @classmethod
    def of(cls, names: Sequence[str], readme: str) -> Self:
        """Raises ValueError for a README whose head is no YAML."""
        layout = cls()
        files = sorted(name for name in names if name.endswith(READ))
        for entry in _configs(readme):
            config = str(entry.get("config_name", "default"))
            layout.first = config if entry.get("default") else layout.first
            for split, pattern in _patterns(entry):
                found = [name for name in files if fnmatch(name, pattern)]
                layout.configs.setdefault(config, {}).setdefault(split, []).extend(found)
        if not layout.configs:
            for name in files:
                place = _place(name)
                if place is not None:
                    layout.configs.setdefault(place[0], {}).setdefault(place[1], []).append(name)
        return layout

    def choose(self, id: HubId, splits: Sequence[str]) -> tuple[str, str, list[str]]:
        """(configuration, split, files). Raises ValueError that lists what there is."""
        configs = {c: s for c, s in self.configs.items() if any(s.values())}
        if not configs:
            raise ValueError(
                f"{id.repository}: no parquet or JSONL here (of most data sets "
                f"{HubId(id.repository, id.config, id.split, 'refs/convert/parquet')} has parquet); offline, "
                "`hf download` it first"
            )
        config = id.config or (self.first if self.first in configs else next(iter(configs)))
        if config not in configs or (id.config is None and len(configs) > 1 and config != self.first):
            raise ValueError(f"{id}: wants one of {', '.join(f'{id.repository}/{name}' for name in configs)}")
        here = configs[config]
        split = id.split or next((name for name in splits if name in here), None)
        if split not in here or not here[split]:
            raise ValueError(f"{id}: wants a split: {', '.join(f'{id.repository}/{config}:{name}' for name in here)}")
        _check_whole(id, here[split])
        return config, split, here[split]


def _check_whole(id: HubId, names: Sequence[str]) -> None:
    """Raises ValueError where a part of a split is missing, as in a cache that was filled by half."""
    for name in names:
        part = _PART.fullmatch(PurePosixPath(name).stem)
        if part is not None and part["of"] is not None and int(part["of"]) != len(names):
            raise ValueError(f"{id}: {len(names)} of {int(part['of'])} files of the split are here; get the others")


def _configs(readme: str) -> list[Mapping[str, Any]]:
    import yaml

    if not readme.startswith("---\n"):
        return []
    try:
        head = yaml.safe_load(readme[4:].partition("\n---")[0])
    except yaml.YAMLError as error:
        raise ValueError(f"README.md: its head is no YAML: {' '.join(str(error).split())}") from error
    found = head.get("configs") if isinstance(head, Mapping) else None
    return [c for c in found if isinstance(c, Mapping) and "data_files" in c] if isinstance(found, list) else []


def _patterns(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(split, pattern) of a configuration: `data_files` is a pattern, a list of them, or a list of {split, path}."""
    files, base = entry["data_files"], entry.get("data_dir")
    for part in files if isinstance(files, list) else [files]:
        split, paths = ("train", part) if isinstance(part, str) else (str(part["split"]), part["path"])
        for path in paths if isinstance(paths, list) else [paths]:
            yield split, f"{base}/{path}" if base else str(path)


def _place(name: str) -> tuple[str, str] | None:
    """The configuration and the split of a file, by its name and folders; None: not to be told."""
    *folders, stem = PurePosixPath(name).with_suffix("").parts
    if stem.isdigit() and folders:  # CONFIG/SPLIT/0000.parquet
        stem = folders.pop()
    part = _PART.fullmatch(stem)
    folders = [folder for folder in folders if folder != "data"]
    return None if part is None or len(folders) > 1 else ("".join(folders) or "default", part["split"])
