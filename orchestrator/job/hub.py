"""Repositories of the Hugging Face Hub, named where a job names a directory or a file.

    model.path = "Qwen/Qwen2.5-0.5B-Instruct"           the newest commit of `main`
    model.path = "Qwen/Qwen2.5-0.5B-Instruct@7ae5576"   a revision: branch, tag or commit
    data.train = "openai/gsm8k/main:train"              ORG/NAME/CONFIG:SPLIT@REVISION, see hub_data.py

A local path wins over an id. huggingface_hub brings what comes with it: its cache (HF_HOME), HF_HUB_OFFLINE,
HF_ENDPOINT, the token (HF_TOKEN, or `hf auth login`). It is imported only where a job names an id.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_WORD = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(
    rf"(?P<repository>{_WORD}/{_WORD})(/(?P<config>[\w+-][\w.+-]*))?(:(?P<split>\w[\w.-]*))?(@(?P<revision>{_WORD}(/{_WORD})*))?"
)
_FILES = (".jsonl", ".parquet")
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Of a model's repository, as long as they lie at its top: no other formats of the same weights."""


@dataclass(frozen=True)
class HubId:
    repository: str
    """`ORG/NAME`."""
    config: str | None = None
    """Of a data set."""
    split: str | None = None
    """Of a data set."""
    revision: str | None = None
    """None: `main`."""

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """None for what is no id by its form."""
        found = _ID.fullmatch(text)
        return None if found is None or text.endswith(_FILES) else cls(**found.groupdict())

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        split = f":{self.split}" if self.split else ""
        return f"{self.repository}{config}{split}{f'@{self.revision}' if self.revision else ''}"

    def at(self, commit: str) -> HubId:
        return replace(self, revision=commit)


def snapshot(id: HubId, kind: str, patterns: Sequence[str], *, cached_only: bool = False) -> Path:
    """The directory in the cache with the files of a repository that match; its name is the commit.

    kind: "model" or "dataset"; cached_only: nothing is asked of the Hub. Raises ValueError, one line that says how to
    get what is not there.
    """
    import huggingface_hub

    _hide_bars()
    try:
        found = huggingface_hub.snapshot_download(
            id.repository, repo_type=kind, revision=id.revision, allow_patterns=list(patterns),
            ignore_patterns="*/*" if kind == "model" else None, local_files_only=cached_only,
        )  # fmt: skip
    except Exception as error:  # of huggingface_hub, and of the HTTP client below it
        raise ValueError(refusal(id, kind, error, cached_only=cached_only)) from error
    return Path(found)


def _hide_bars() -> None:
    """No progress bars where nobody looks."""
    if not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # it is documented there

        disable_progress_bars()


def push(directory: Path, repository: str) -> str:
    """Sends the files of a directory to a model's repository, made private where there is none; returns its address.

    Raises ValueError, one line.
    """
    import huggingface_hub

    _hide_bars()
    try:
        api = huggingface_hub.HfApi()
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message="rlhf-orchestrate export")
    except Exception as error:  # of huggingface_hub, and of the HTTP client below it
        said = " ".join(str(error).split())
        raise ValueError(f"{repository}: {said or type(error).__name__} (a push wants HF_TOKEN, with write)") from error
    return str(url)


def refusal(id: HubId, kind: str, error: Exception, *, cached_only: bool = False) -> str:
    """What to do about an error of huggingface_hub, in one line."""
    from huggingface_hub import constants, errors

    what = "data set" if kind == "dataset" else kind
    option = " --repo-type dataset" if kind == "dataset" else ""
    revision = f" --revision {id.revision}" if id.revision else ""
    get = f"hf download {id.repository}{option}{revision}"
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{id.repository}"
    match error:
        case errors.GatedRepoError():
            return f"{id.repository} is gated: accept its terms at {page}, and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return (
                f"{id} is neither a path beside the job file nor a {what} at {constants.ENDPOINT} (a private one wants "
                "HF_TOKEN)"
            )
        case errors.RevisionNotFoundError():
            return f"{id.repository} has no revision {id.revision!r}: see {page}"
    if cached_only:
        return f"{id} is not in the cache here, and nothing is downloaded for a job over HTTP: `{get}` on the server"
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
    return (
        f"{id} is neither a path beside the job file nor in the cache ({constants.HF_HUB_CACHE}), and {reason}: "
        f"`{get}` where it can be reached, or name a directory"
    )
