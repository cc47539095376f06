"""Where functions run: the `[platform]` section of a job."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from orchestrator.base.section import Section


class VolumeConfig(Section):
    """A volume that every function mounts: a claim, a directory of the node, or neither: memory."""

    name: str
    mount_path: str
    claim: str | None = None
    host_path: str | None = None
    read_only: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.claim is not None and self.host_path is not None:
            raise ValueError("claim and host_path exclude each other: set one")
        if self.host_path is not None and not self.read_only:
            raise ValueError("Knative mounts a host_path read-only: set read_only = true, or take a claim")
        return self


class TolerationConfig(Section):
    key: str | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class KnativeConfig(Section):
    """Where and how functions run on a cluster; `[platform.knative]`."""

    image: str
    images: Mapping[Literal["generate", "environment", "reward", "reference", "train"], str] = {}
    """Over `image`, by kind of function."""
    namespace: str = "default"
    context: str | None = None
    """A context of the kubeconfig; None: the current one, or the cluster that the orchestrator runs in."""
    ingress: str | None = None
    """URL that calls are sent to, with the function's name as Host; None: cluster-local names."""
    service_account: str | None = None
    image_pull_secret: str | None = None
    node_selector: Mapping[str, str] = {}
    gpu_nodes_only: bool = True
    """`node_selector` is for functions with GPUs; false: for all."""
    tolerations: tuple[TolerationConfig, ...] = Field((), strict=False)
    """Of functions with GPUs."""
    runtime_class: str | None = None
    """Of functions with GPUs."""
    sandbox: str | None = Field(None, pattern="^https?://")
    """URL of the cluster's sandbox, for jobs with reward.sandbox = true; the chart's sets it."""
    gpu_resource: str = "nvidia.com/gpu"
    queue: str | None = Field(None, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=63)
    """Kueue's LocalQueue whose quota replicas take; they wait until it admits them."""
    volumes: tuple[VolumeConfig, ...] = Field((), strict=False)
    command: tuple[str, ...] = Field((), strict=False)
    """Over the image's own."""
    env: Mapping[str, str] = {}
    env_secrets: tuple[str, ...] = Field((), strict=False)
    """Secrets whose keys become environment variables: REDIS_PASSWORD, AWS_ACCESS_KEY_ID, ..."""
    node_agent: str | None = Field(None, pattern="^/.")
    """Directory of every node with the socket of its agent (the chart: nodeAgent.enabled), in whose processes pods run
    their functions; None, and on a node without one: in themselves."""
    cpu_share: float = Field(1.0, gt=0)
    """CPU that a replica requests for each of its threads."""
    run_as_user: int = Field(65532, ge=0)
    start_s: float = Field(600.0, ge=60)
    """How long a replica may take to be scheduled and ready before its function is given up."""


class PlatformConfig(Section):
    kind: Literal["local", "knative"] = "local"
    warm_parent: bool = True
    """Local: fork replicas from one process that has the libraries loaded; false: each replica starts afresh."""
    parked_gb: float | None = Field(None, ge=0)
    """Local: memory for parked processes, which the next start of their function takes; 0: none parks (default: half of
    the machine's)."""
    knative: KnativeConfig | None = None

    @model_validator(mode="after")
    def _settled(self) -> Self:
        if self.kind == "knative" and self.knative is None:
            raise ValueError('kind = "knative" wants its settings, platform.knative.image at least')
        return self
