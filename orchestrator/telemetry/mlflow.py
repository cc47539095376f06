"""MLflow: one run for a job, over all of its executions, found again by the tag `rlhf.run`, the run directory's own id.

Names have no `@` there: `val-core/sums/acc/mean@1` is `val-core/sums/acc/mean_at_1`, as verl writes it.
"""

import time
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from orchestrator.job.config import JobConfig
from orchestrator.telemetry.sinks import Committed, Metrics, hyperparameters, run_id

TAG = "rlhf.run"
STEP = "training/global_step"
LONGEST = 6000
"""Characters of a param's value (mlflow/utils/validation.py)."""
BATCH = 1000
"""Metrics, and a tenth as many params, of one request."""


class Mlflow:
    def __init__(self, job: JobConfig, directory: Path, committed: Committed) -> None:
        config = job.telemetry.mlflow
        assert config is not None
        self._client = MlflowClient(config.tracking_uri)
        found = self._client.get_experiment_by_name(config.experiment)
        experiment = self._client.create_experiment(config.experiment) if found is None else found.experiment_id
        id = run_id(directory)
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{id}'", max_results=1)
        done = -1
        if runs:
            self._run = str(runs[0].info.run_id)
            self._client.update_run(self._run, status="RUNNING")
            done = max((point.step for point in self._client.get_metric_history(self._run, STEP)), default=-1)
        else:
            self._run = str(self._client.create_run(experiment, tags={TAG: id}, run_name=job.name).info.run_id)
            params = [Param(key, value[:LONGEST]) for key, value in _flat(hyperparameters(job)).items()]
            for start in range(0, len(params), BATCH // 10):
                self._client.log_batch(self._run, params=params[start : start + BATCH // 10])
        for step, metrics in committed:
            if step > done:
                self.write(step, metrics)

    def write(self, step: int, metrics: Metrics) -> None:
        now_ms = int(time.time() * 1000)
        points = [Metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in sorted(metrics.items())]
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self._run, metrics=points[start : start + BATCH])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _flat(values: object, prefix: str = "") -> dict[str, str]:
    """`train.lr`: "1e-06"."""
    if not isinstance(values, dict):
        return {prefix: str(values)}
    inner = (_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items())
    return {name: value for found in inner for name, value in found.items()}
