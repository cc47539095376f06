"""From a job to its platform: the one place that knows them all. `kubernetes` loads only for a job on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.job.config import JobConfig
from orchestrator.platforms.base import FunctionSpec, Platform
from orchestrator.platforms.local import LocalPlatform


def check_platform(job: JobConfig, specs: Sequence[FunctionSpec]) -> None:
    """Raises ConfigError for a job that its platform could not hold."""
    if job.platform.kind == "knative":
        from orchestrator.platforms.knative.manifests import check_names

        check_names(job.name, [spec.name for spec in specs])


def open_platform(job: JobConfig, exchange: str, root: str, *, log_dir: Path) -> Platform:
    """The platform of a job whose exchange is at `exchange`, under `root`. Raises PlatformError."""
    if job.platform.kind == "local" or job.platform.knative is None:
        return LocalPlatform(exchange, root, log_dir=log_dir, warm_parent=job.platform.warm_parent)
    from orchestrator.platforms.knative.manifests import JobContext
    from orchestrator.platforms.knative.platform import KnativePlatform

    limits = job.limits
    return KnativePlatform(
        JobContext(job.name, exchange, root, limits.call_s, job.platform.knative, capacity_s=limits.outage_s)
    )
