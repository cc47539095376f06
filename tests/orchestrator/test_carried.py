"""Functions of one's own, as a job names them: of a file, of a notebook's cell, and what can be neither."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from functions.call.userfile import load
from orchestrator.base.errors import ConfigError
from orchestrator.session.carried import place_of
from orchestrator.session.python import run

CELLS = (
    "import math\nimport os.path as where\nfrom collections import Counter\nLIMIT, NAMES = 3, {'a': (1, 2.5, None)}\n",
    "import re\nPATTERN = re.compile('a')\n"
    "def least(value):\n    return min(value, LIMIT) + (least(value - 1) if value > LIMIT else 0)\n",
    "def score(completions, **columns):\n"
    "    def inner(text):\n        LIMIT = 7\n        return LIMIT + least(len(Counter(text))) + NAMES['a'][0]\n"
    "    return [inner(text) + math.floor(1.5) + len(where.sep) for text in completions]\n",
    "def unlucky(completions):\n    return PATTERN.findall(completions)\n",
    "lucky = lambda completions: completions\n",
)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What CELLS have made in `__main__`."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for number, text in enumerate(CELLS):
        name = f"/tmp/ipykernel_1/{number}.py"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        exec(compile(text, name, "exec"), vars(main))
    return vars(main)


def test_a_function_of_a_cell_takes_with_it_what_it_uses(notebook: dict[str, Any], tmp_path: Path) -> None:
    place = place_of("reward.score", notebook["score"], tmp_path)
    texts = ["abca", "", "aaaaaaa", "abcde"]
    assert load(place)(texts) == notebook["score"](texts)
    assert "PATTERN" not in Path(place.rpartition(":")[0]).read_text(), "it does not use this one"
    assert place_of("reward.score", notebook["score"], tmp_path) == place


def test_a_function_of_a_file_is_where_it_is(tmp_path: Path) -> None:
    assert place_of("reward.score", place_of, tmp_path) == f"{Path(place_of.__code__.co_filename)}:place_of"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (lambda text: text, "<lambda>"),
        (partial(min, 1), "functools.partial"),
        (min, "min"),
        (re.compile("a").match, "match"),
    ],
)
def test_what_cannot_be_imported_is_refused(code: Callable[..., Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^reward.score: .*wants what has its name at the top of a file") as error:
        run({"name": "x", "steps": 1, "reward": {"score": code}}, run_dir=tmp_path / "run")
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert not any(tmp_path.iterdir()), "nothing was made"


def test_what_a_cell_cannot_take_with_it_is_named(notebook: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.score: unlucky uses 'PATTERN', a Pattern of the notebook: make it"):
        place_of("reward.score", notebook["unlucky"], tmp_path)
    with pytest.raises(ConfigError, match="lambda"):
        place_of("reward.score", notebook["lucky"], tmp_path)
