"""A vLLM whose compiled part does not load, as in an image without libnuma: a package that fails as that one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import ForkedCommand, run_program
from tests.support.tiny_job import ENV

VLLM = """
class ModelRegistry:
    models = {}
class EngineArgs:
    def __init__(self, **given):
        raise AttributeError("'_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'")
"""
PLATFORMS = """
class current_platform:
    is_cpu = staticmethod(lambda: False)
"""
START = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from functions.generate.vllm.start import VllmSettings, start, unloaded
print(unloaded())
try:
    start(Path(sys.argv[1]), VllmSettings())
except Exception as error:
    print(type(error).__name__, error)
"""


def begin(tmp_path: Path, compiled: str) -> list[str]:
    files = {"__init__": VLLM, "_C": compiled, "platforms": PLATFORMS, "v1/__init__": "", "v1/engine/__init__": "",
             "v1/engine/llm_engine": "LLMEngine = None", "v1/executor": "Executor = None"}  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "config.json").write_text("{}")
    started = ForkedCommand(run_program, [START, str(tmp_path)], ENV)
    output, errors = started.communicate()
    assert started.returncode == 0, errors
    return output.splitlines()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("libnuma.so.1: cannot open shared object file: No such file or directory", "libnuma.so.1 is missing"),
        ("undefined symbol: _ZN3c10", "undefined symbol: _ZN3c10"),
    ],
)
def test_it_is_one_line_and_for_good(tmp_path: Path, error: str, why: str) -> None:
    """A ValueError of `start` is fatal (test_start.py of tests/vllm); an AttributeError was tried four times."""
    line = f"vLLM's compiled part does not load: {why}"
    assert begin(tmp_path, f"raise ImportError({error!r})") == [line, f"ValueError {line}"]


def test_the_driver_is_the_nodes(tmp_path: Path) -> None:
    missing = "libcuda.so.1: cannot open shared object file: No such file or directory"
    assert begin(tmp_path, f"raise ImportError({missing!r})")[0] == "None"
    assert begin(tmp_path, "")[0] == "None"
