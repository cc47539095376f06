"""GPUs of a machine, as nvidia-smi lists them and CUDA would show them; jobs that want more are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.base.errors import ConfigError
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.gpus import DRIVER, check_gpus, gpus_here

TWO = """GPU 0: NVIDIA A100 (UUID: GPU-5c2a)
  MIG 3g.20gb Device 0: (UUID: MIG-11)
GPU 1: NVIDIA A100 (UUID: GPU-77b1)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose nvidia-smi lists two GPUs."""
    (tmp_path / "list").write_text(TWO)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\n[ "$1" = -L ] && while read line; do echo "$line"; done < {tmp_path / "list"}\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return smi


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("5", 0), ("GPU-77b1", 1), ("MIG-11", 1),
        ("0,1,GPU-77b1", 2),
    ],
)  # fmt: skip
def test_what_cuda_would_show(machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == count


@pytest.mark.parametrize("fault", ["not there", "fails"])
def test_without_the_tool_the_driver_says_it(machine: Path, fault: str) -> None:
    if fault == "not there":
        machine.unlink()
    else:
        machine.write_text("#!/bin/sh\necho 'GPU 0: no'\nexit 9\n")
    assert gpus_here() == len(list(DRIVER.glob("*")))


def test_a_function_with_more_than_there_are(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(name: str, gpus: int) -> FunctionSpec:
        return FunctionSpec(name, name, max_replicas=4, gpus=gpus)

    check_gpus([spec("generate", 2), spec("train", 1), spec("reward", 0)])
    with pytest.raises(ConfigError, match=r"^functions\.generate\.gpus: got 3, this machine has 2; set 0, or "):
        check_gpus([spec("train", 1), spec("generate", 3)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"^functions\.train\.gpus: got 1, this machine has 0"):
        check_gpus([spec("train", 1)])
    machine.unlink()
    check_gpus([spec("train", 0)])
