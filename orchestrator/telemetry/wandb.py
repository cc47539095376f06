"""Weights & Biases: one run for a job, over all of its executions (`resume`), under the run directory's own id.

`wandb-step` in the run directory is the last step that was handed over: the next execution goes on behind it. Offline,
each execution leaves a directory `wandb/offline-run-*`; `wandb sync` puts them together under the id.
"""

from pathlib import Path

import wandb

from orchestrator.base.files import write_atomically
from orchestrator.job.config import JobConfig
from orchestrator.telemetry.sinks import Committed, Metrics, hyperparameters, run_id

LAST = "wandb-step"


class Wandb:
    def __init__(self, job: JobConfig, directory: Path, committed: Committed) -> None:
        config = job.telemetry.wandb
        assert config is not None
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
        )
        self._last = directory / LAST
        self._run = wandb.init(
            project=config.project, entity=config.entity, name=job.name, id=run_id(directory), resume="allow",
            mode=config.mode, dir=directory, config=hyperparameters(job), settings=settings, reinit="create_new",
        )  # fmt: skip
        done = int(self._last.read_text()) if self._last.exists() else -1
        for step, metrics in committed:
            if step > done:
                self.write(step, metrics)

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)
        write_atomically(self._last, f"{step}\n".encode())

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
