"""The sinks that a job asks for."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig
from orchestrator.telemetry.background import END_S, Background
from orchestrator.telemetry.sinks import Committed, JsonLines, Sink
from orchestrator.telemetry.tensorboard import TensorBoard


def check_sinks(job: JobConfig) -> None:
    """Raises ConfigError where the job asks for what is not installed."""
    for name in ("wandb", "mlflow"):
        if getattr(job.telemetry, name) is not None and importlib.util.find_spec(name) is None:
            raise ConfigError(f"telemetry.{name}: wants its client: pip install 'rlhf-orchestrate[{name}]'")


def open_sinks(
    job: JobConfig, directory: Path, committed: Committed, note: Callable[[str], None], *, end_s: float = END_S
) -> list[Sink]:
    """Inside an event loop, whose thread calls `note`. Clients load in their sinks' threads: they take seconds; at the
    end each has `end_s` to finish."""
    sinks: list[Sink] = [JsonLines(directory / "metrics.jsonl", committed)]
    if job.telemetry.tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard", committed))

    def wandb() -> Sink:
        from orchestrator.telemetry.wandb import Wandb

        return Wandb(job, directory, committed)

    def mlflow() -> Sink:
        from orchestrator.telemetry.mlflow import Mlflow

        return Mlflow(job, directory, committed)

    if job.telemetry.wandb is not None:
        sinks.append(Background("wandb", wandb, note, end_s=end_s))
    if job.telemetry.mlflow is not None:
        sinks.append(Background("mlflow", mlflow, note, end_s=end_s))
    return sinks
