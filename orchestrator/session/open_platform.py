"""From a job to its platform: the one place that knows them all. `kubernetes` loads only for a job on a cluster."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from functions.sandbox.local import check_here
from functions.sandbox.program import SandboxError
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig
from orchestrator.platforms.base import FunctionSpec, Platform
from orchestrator.platforms.gpus import check_gpus
from orchestrator.platforms.local import LocalPlatform


def check_platform(job: JobConfig, specs: Sequence[FunctionSpec]) -> None:
    """Raises ConfigError for a job that its platform could not hold."""
    if job.platform.kind == "knative":
        from orchestrator.platforms.knative.manifests import check_names

        check_names(job.name, [spec.name for spec in specs])


def check_machine(job: JobConfig, specs: Sequence[FunctionSpec]) -> None:
    """Raises ConfigError for a local job that wants what this machine lacks: GPUs, vLLM, a sandbox.

    Apart from `check_platform`: a job that is only planned may be another machine's.
    """
    if job.platform.kind != "local":
        return
    check_gpus(specs)
    if job.reward.sandbox is True:
        try:
            check_here()
        except SandboxError as error:
            raise ConfigError(f"reward.sandbox: {error}; docs/sandbox.md says what it wants") from error
    if job.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError('rollout.engine: got "vllm", which is not installed here (`scripts/setup --vllm`)')


def open_platform(job: JobConfig, exchange: str, root: str, *, run: str, log_dir: Path) -> Platform:
    """The platform of a job whose exchange is at `exchange`, under `root`; `run` is its id. Raises PlatformError."""
    if job.platform.kind == "local" or job.platform.knative is None:
        given = job.platform
        return LocalPlatform(exchange, root, log_dir=log_dir, warm_parent=given.warm_parent, parked_gb=given.parked_gb)
    from orchestrator.platforms.knative.manifests import STORES, JobContext
    from orchestrator.platforms.knative.platform import KnativePlatform

    limits, stores = job.limits, os.environ.get(STORES, "")
    return KnativePlatform(
        JobContext(job.name, exchange, root, limits.call_s, job.platform.knative, run, limits.outage_s, stores)
    )
