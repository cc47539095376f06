"""The GPUs of this machine, counted without loading CUDA."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from orchestrator.base.errors import ConfigError
from orchestrator.platforms.base import FunctionSpec

DRIVER = Path("/proc/driver/nvidia/gpus")
LOOK_S = 30.0


def gpus_here() -> int:
    """As many as CUDA would show to a process that starts now: CUDA_VISIBLE_DEVICES hides others, up to the first
    entry that is none."""
    there = _installed()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    shown = 0
    for name in visible.split(","):
        named = name.strip().startswith(("GPU-", "MIG-"))
        if not named and not (name.strip().isdecimal() and int(name) < there):
            break
        shown += 1
    return min(shown, there)


def _installed() -> int:
    """What nvidia-smi lists; without it, what the driver does."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LOOK_S, check=True)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        return len(list(DRIVER.glob("*")))


def check_gpus(specs: Sequence[FunctionSpec]) -> None:
    """Raises ConfigError for a function with more GPUs than this machine has: it would run on the CPU, at the price of
    a GPU."""
    wanted = [spec for spec in specs if spec.gpus]
    there = gpus_here() if wanted else 0
    for spec in wanted:
        if spec.gpus > there:
            raise ConfigError(
                f"functions.{spec.name}.gpus: got {spec.gpus}, this machine has {there}; "
                'set 0, or platform.kind = "knative"'
            )
