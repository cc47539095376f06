"""Documents and docstrings name files: each of them exists, under the name that it has now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = "functions|orchestrator|tests|bench|scripts|examples|charts|deploy|docs"
PATHS = re.compile(rf"(?<![\w/.:-])((?:{FOLDERS})(?:/[\w.-]+)*/[\w.-]*\w)")
"""`functions/base/wire.py`, `docs/decisions`: from the repository's root."""
FILES = re.compile(r"(?<![\w/.*-])((?:\w+/)*\w+\.py)\b")
"""`wire.py`, `base/wire.py`: some file's name, or the end of its path."""
MODULES = re.compile(r"(?<![\w/.-])((?:functions|orchestrator|tests|bench)(?:\.\w+)+)")
"""`functions.base.wire`, with or without a name in it."""
OTHERS = {
    "bench/NAME.py", "functions/exchange/NAME.py", "orchestrator/recipes/NAME.py", "orchestrator/commands/VERB.py",
    "functions/environment/NAME.py", "math.py", "game.py", "gigpo/core_gigpo.py",
    "file.py", "path/to/file.py", "my_recipe.py", "solution.py", "make_data.py", "recipe.py",  # placeholders
    "tests/browser/screenshots",  # made by the tests
    "bench/exchange",  # a bucket
    "tests/abstract", "examples/python/reward_func.py", "tokenization_utils_base.py", "utils/chat_template_utils.py",
    "vllm/entrypoints/serve/disagg/protocol.py",
    "core_algos.py", "math_reward.py", "sandbox/server/sandbox_api.py",  # other projects'
    "config/vllm.py", "layers/attention/kv_transfer_utils.py", "v1/attention/selector.py", "v1/core/sched/scheduler.py",
    "vllm/model_executor/layers/linear.py", "v1/kv_cache_interface.py", "model_loader/checkpoint_weight_patch.py",
}  # fmt: skip
PROJECTS = ("verl/", "trl/", "safe_rlhf/", "openrlhf/", "mlflow/")
HISTORY = "docs/decisions/0016-rooms.md"
"""Names what there was."""


class House:
    """All names of a repository's files: paths, their ends, folders, modules."""

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self.paths = {*files, *(str(parent) for name in files for parent in Path(name).parents)}
        self.ends = {"/".join(parts[k:]) for name in files for parts in [name.split("/")] for k in range(len(parts))}
        self.modules = {name.removesuffix(".py").replace("/", ".") for name in files if name.endswith(".py")}
        self.packages = {str(Path(name).parent).replace("/", ".") for name in files}

    def missing(self, text: str) -> set[str]:
        """What `text` names and is not there."""
        paths = {name.rstrip(".") for name in PATHS.findall(text)} - self.paths
        ours = {name for name in FILES.findall(text) if not name.startswith(PROJECTS)}
        return (paths | ours - self.ends) - OTHERS

    def unknown_modules(self, text: str) -> set[str]:
        """Dotted names whose first parts are no module and no package of ours."""
        unknown = {*MODULES.findall(text)} - self.packages - self.modules
        return {name for name in unknown if name.rpartition(".")[0] not in self.modules}


@pytest.fixture(scope="module")
def house() -> House:
    """The repository's folders and its root."""
    found = [*ROOT.glob("*"), *(path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*"))]
    return House([str(p.relative_to(ROOT)) for p in found if p.is_file() and p.parent.name != "__pycache__"])


def test_it_finds_what_is_missing() -> None:
    house = House(["functions/base/wire.py", "docs/api.md", "orchestrator/commands/run.py"])
    text = (
        "wire.py, base/wire.py, functions/base/ and docs/api.md are there; functions/wire.py, live.py, docs/look not."
    )
    assert house.missing(text) == {"functions/wire.py", "live.py", "docs/look"}
    text = "python -m orchestrator.commands, functions.base.wire.Call; but functions.wire.Call, orchestrator.cli"
    assert house.unknown_modules(text) == {"functions.wire.Call", "orchestrator.cli"}


def test_documents_name_what_is_there(house: House) -> None:
    texts = {name: (ROOT / name).read_text() for name in house.files if name.endswith(".md") and name != HISTORY}
    found = {name: house.missing(text) | house.unknown_modules(text) for name, text in texts.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_source_names_what_is_there(house: House) -> None:
    """Docstrings and comments; tests write files of their own."""
    sources = [name for name in house.files if name.endswith((".py", ".js", ".yaml", ".toml"))]
    sources = [name for name in sources if not name.startswith("tests/") and "/vendor/" not in name]
    found = {name: house.missing((ROOT / name).read_text()) for name in [*sources, ".importlinter"]}
    assert {name: names for name, names in found.items() if names} == {}
