"""Orchestrators as Kubernetes Jobs: one Job object per launch, from a template (the chart's, in a ConfigMap).

The template is a whole `batch/v1` Job whose first container has the orchestrator's image and may write where this
server has its directory of runs: there it has a copy of its own run, which is kept in the release's exchange
(orchestrator/run/stored.py). Name, labels and arguments are put in here. The runner's service account needs nothing of
Jobs; this server's needs create, list and deletecollection of `jobs` in its namespace, and for --stores-secret create
and patch of `secrets` (stores.py). What an orchestrator prints it keeps in its run directory itself: a pod's log goes
with the pod. Launches belong to this server's service account: where that goes with its release, so do they, and do not
wait for stores and rights that are gone.
"""

import base64
import copy
import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import kubernetes
import yaml
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from orchestrator.api.leader import Leader
from orchestrator.api.stores import JobStores
from orchestrator.base.errors import ConfigError, RunError
from orchestrator.platforms.knative.api import KubeApi
from orchestrator.platforms.knative.manifests import OWN, STORES, STORES_PATH, stores_secret

RUNNER_LABEL = "rlhf-orchestrate/runner"
"""Its value is the job; other objects of a job (its functions, its lease) carry labels of their own."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NAMESPACE_FILE, TOKEN_FILE = ACCOUNT / "namespace", ACCOUNT / "token"
ANSWER_S = 10.0


def job_manifest(
    template: dict[str, Any], job: str, launch: int, runs: Path, place: str, stores: str = ""
) -> dict[str, Any]:
    """The Job object of a job's launch, its run kept at `place`. Its name is the same whenever it is asked for. For the
    Secret `stores`, of the release's credentials, it has the job's own."""
    manifest = copy.deepcopy(template)
    metadata = manifest.setdefault("metadata", {})
    metadata["name"] = f"{job}-{launch}"
    metadata.setdefault("labels", {})[RUNNER_LABEL] = job
    pod = manifest["spec"]["template"]
    pod.setdefault("metadata", {}).setdefault("labels", {})[RUNNER_LABEL] = job
    container = pod["spec"]["containers"][0]
    container["args"] = ["resume", str(runs / job), "--keep-output", f"--store={place}"]
    mounts = container.setdefault("volumeMounts", [])
    for source in container.get("envFrom", []):
        if stores and source.get("secretRef", {}).get("name") == stores:
            source["secretRef"]["name"] = stores_secret(job)
            container.setdefault("env", []).append({"name": STORES, "value": f"{stores}={stores_secret(job)}"})
            mounts.append({"name": OWN, "mountPath": STORES_PATH, "readOnly": True})
            volume = {"name": OWN, "secret": {"secretName": stores_secret(job)}}
            pod["spec"].setdefault("volumes", []).append(volume)
    return manifest


def job_alive(job: dict[str, Any]) -> bool:
    """The Job has neither completed nor failed; one that is being deleted is alive until its pods are gone."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return not any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)


def owners(token: str) -> list[dict[str, str]]:
    """`ownerReferences` to the service account that a pod's token (a JWT) names; none where it is no such token."""
    try:
        payload = base64.urlsafe_b64decode(token.split(".")[1] + "==")
        account = json.loads(payload)["kubernetes.io"]["serviceaccount"]
        return [{"apiVersion": "v1", "kind": "ServiceAccount", "name": account["name"], "uid": account["uid"]}]
    except (IndexError, ValueError, KeyError, TypeError):
        return []


class KubernetesLauncher:
    """Launcher over a cluster's API. `runs` is the directory of runs as the template's container sees it; they are kept
    at `place`, `URL#RELEASE`."""

    def __init__(
        self, runs: Path, template: dict[str, Any], namespace: str, api: Any, place: str, secret: str = "",
        stores: JobStores | None = None,
    ) -> None:  # fmt: skip
        """`api` is a kubernetes.client.BatchV1Api, whose types know models only where this sends and reads JSON; for
        the release's `secret` each job gets one of its own from `stores`."""
        self._runs, self._template, self._namespace, self._api = runs, template, namespace, api
        self._place = place
        self._secret, self._stores = secret, stores

    @classmethod
    def connect(cls, runs: Path, template: Path, place: str, secret: str = "", role: str = "") -> Self:
        """By the pod's service account, else by KUBECONFIG. Raises ConfigError."""
        try:
            manifest = yaml.safe_load(template.read_text())
            if manifest["kind"] != "Job" or not manifest["spec"]["template"]["spec"]["containers"]:
                raise ConfigError(f"{template}: want a Job manifest with a container")
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(f"{template}: not a Job manifest ({error})") from error
        try:
            if NAMESPACE_FILE.exists():
                kubernetes.config.load_incluster_config()  # type: ignore[no-untyped-call]
                namespace = NAMESPACE_FILE.read_text().strip()
                if manifest["metadata"].get("namespace", namespace) == namespace:
                    manifest["metadata"]["ownerReferences"] = owners(TOKEN_FILE.read_text())
            else:
                kubernetes.config.load_kube_config()  # type: ignore[no-untyped-call]
                _, context = kubernetes.config.list_kube_config_contexts()  # type: ignore[no-untyped-call]
                namespace = context["context"].get("namespace", "default")
        except kubernetes.config.ConfigException as error:
            raise ConfigError(f"no cluster to run jobs on: {error}") from error
        namespace = manifest["metadata"].get("namespace", namespace)
        release = next((owner["uid"] for owner in manifest["metadata"].get("ownerReferences", [])), namespace)
        stores = JobStores(KubeApi(), namespace, runs, place, release, role) if secret else None
        return cls(runs, manifest, namespace, kubernetes.client.BatchV1Api(), place, secret, stores)

    def election(self, lease: str) -> Leader:
        """Of the servers that name this Lease; a pod is known by its host's name."""
        return Leader(KubeApi(), self._namespace, lease, socket.gethostname())

    def start(self, job: str, launch: int) -> None:
        body = job_manifest(self._template, job, launch, self._runs, self._place, self._secret)
        try:
            self._api.create_namespaced_job(self._namespace, body, _request_timeout=ANSWER_S)
        except ApiException as error:
            if error.status != 409:  # it exists: created by a server that did not live to note it
                raise _failed(f"job {job} cannot be launched", error) from error
        except HTTPError as error:
            raise RunError(f"job {job} cannot be launched: the cluster's API is away: {error}") from error

    def stop(self, job: str) -> None:
        """Deletes the Job objects; they stay listed until their pods have ended in order."""
        try:
            self._api.delete_collection_namespaced_job(
                self._namespace, label_selector=f"{RUNNER_LABEL}={job}", propagation_policy="Foreground",
                _request_timeout=ANSWER_S,
            )  # fmt: skip
        except ApiException as error:
            raise _failed(f"job {job} cannot be stopped", error) from error
        except HTTPError as error:
            raise RunError(f"job {job} cannot be stopped: the cluster's API is away: {error}") from error

    def alive(self, jobs: Iterable[str]) -> frozenset[str]:
        asked = frozenset(jobs)
        return asked & self._launches().keys() if asked else asked

    def keep(self) -> None:
        if self._stores is not None:
            self._stores.keep(self._launches)

    def _launches(self) -> dict[str, dict[str, str]]:
        """The jobs that are alive, each with an ownerReference to its Job."""
        try:
            answer = self._api.list_namespaced_job(
                self._namespace, label_selector=RUNNER_LABEL, _request_timeout=ANSWER_S, _preload_content=False
            )
            items = json.loads(answer.data)["items"]
        except ApiException as error:
            raise _failed("jobs cannot be listed", error) from error
        except HTTPError as error:
            raise RunError(f"jobs cannot be listed: the cluster's API is away: {error}") from error
        found = [item["metadata"] for item in items if job_alive(item)]
        kind = {"apiVersion": "batch/v1", "kind": "Job"}
        return {meta["labels"][RUNNER_LABEL]: kind | {"name": meta["name"], "uid": meta["uid"]} for meta in found}


def _failed(what: str, error: ApiException) -> RunError:
    hint = "; grant the API's service account create, list and deletecollection of jobs" if error.status == 403 else ""
    return RunError(f"{what}: the cluster's API answered {error.status} {error.reason}{hint}")
