"""`[telemetry]` of a job: what it tells, and whom."""

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.base.section import Section


class WandbConfig(Section):
    """`[telemetry.wandb]`; wants the extra `wandb`. The key of the account is WANDB_API_KEY's."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    """offline: kept in the run directory, for `wandb sync`."""


class MlflowConfig(Section):
    """`[telemetry.mlflow]`; wants the extra `mlflow`. Credentials are those of MLflow's own variables."""

    tracking_uri: str | None = None
    """None: what MLFLOW_TRACKING_URI says."""
    experiment: str = "rlhf-orchestrate"


class ProfileConfig(Section):
    """Traces of calls by torch.profiler, for Perfetto (docs/telemetry.md)."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = Field((), strict=False)
    """Of which each call of functions that run torch is traced; it is slower meanwhile."""


class TelemetryConfig(Section):
    tensorboard: bool = True
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Base URL of an OpenTelemetry collector (`http://collector:4318`) that gets a trace of each step; None: what
    OTEL_EXPORTER_OTLP_ENDPOINT says."""
    samples: int = Field(64, ge=0)
    """Samples (prompt, response, reward) written per step."""
