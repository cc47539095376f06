"""The Kubernetes API, by path: JSON in, JSON out, blocking. The one module here that imports `kubernetes`.

Connection and credentials are the official client's: KUBECONFIG, ~/.kube/config, or a pod's service account.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client, config

from orchestrator.platforms.base import PlatformError

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML."""
REQUEST_S = 30.0


class ApiError(Exception):
    """An answer other than 2xx; `status` 0: none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def away(self) -> bool:
        """The API, or a webhook behind it, does not answer or is overrun: another try may do. A refusal is 4xx."""
        return self.status in (0, 429) or self.status >= 500


class KubeApi:
    """`context` names a context of the kubeconfig; None is its current one, or the pod's own cluster."""

    def __init__(self, context: str | None = None) -> None:
        configuration = client.Configuration()
        try:
            try:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    os.environ.get("KUBECONFIG"), context=context, client_configuration=configuration
                )
            except config.ConfigException:
                if context is not None:
                    raise
                config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise PlatformError(f"no Kubernetes cluster: {error} (set KUBECONFIG, or run in a pod)") from error
        configuration.retries = False
        configuration.connection_pool_maxsize = 32
        self._configuration = configuration
        self._pool: urllib3.PoolManager = client.ApiClient(configuration).rest_client.pool_manager
        self.host: str = configuration.host.rstrip("/")

    def get(self, path: str, **query: str) -> Json:
        return self._json("GET", path, query=query)

    def create(self, path: str, body: Json) -> Json:
        return self._json("POST", path, body)

    def merge(self, path: str, patch: Json, *, strategic: bool = False) -> Json:
        """`strategic`: lists as Kubernetes' own kinds have them, by their keys; else they are replaced."""
        return self._json("PATCH", path, patch, content_type=STRATEGIC if strategic else MERGE)

    def apply(self, path: str, body: Json, manager: str) -> Json:
        """Creates the object, or brings it in line with `body`."""
        return self._json("PATCH", path, body, {"fieldManager": manager, "force": "true"}, APPLY)

    def delete(self, path: str, *, grace_s: int | None = None, uid: str | None = None) -> None:
        """Also when it is gone already; with `uid` that very object alone (409 for another of its name)."""
        options: Json = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", path, options)
        except ApiError as error:
            if error.status != 404:
                raise

    def watch(self, path: str, query: Mapping[str, str], wait_s: float) -> Iterator[Json]:
        """Events of a collection until the server ends the watch, at most `wait_s` from now. Raises ApiError."""
        query = dict(query) | {"watch": "true", "timeoutSeconds": str(max(1, round(wait_s)))}
        timeout = urllib3.Timeout(connect=REQUEST_S, read=wait_s + REQUEST_S)
        response = self._send("GET", path, None, query, None, timeout=timeout)
        try:
            rest = b""
            for block in response.stream(decode_content=False):
                *lines, rest = (rest + block).split(b"\n")
                yield from (json.loads(line) for line in lines if line)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, f"watch of {path} broke: {error}") from error
        finally:
            response.close()

    def _json(
        self, method: str, path: str, body: Json | None = None, query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:  # fmt: skip
        response = self._send(method, path, body, query or {}, content_type, timeout=urllib3.Timeout(total=REQUEST_S))
        value: Json = json.loads(response.data)
        return value

    def _send(
        self, method: str, path: str, body: Json | None, query: Mapping[str, str], content_type: str | None,
        *, timeout: urllib3.Timeout,
    ) -> urllib3.BaseHTTPResponse:  # fmt: skip
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if content_type else {})
        settings: dict[str, Any] = dict(self._configuration.auth_settings())
        headers |= {setting["key"]: setting["value"] for setting in settings.values()}
        data = None if body is None else json.dumps(body).encode()
        try:
            response = self._pool.request(
                method, f"{self.host}{path}?{urlencode(query)}", body=data, headers=headers,
                preload_content=False, timeout=timeout,
            )  # fmt: skip
            if 200 <= response.status < 300:
                return response
            raise ApiError(response.status, _message(response.data) or f"{response.status} {response.reason}")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, f"the Kubernetes API at {self.host} does not answer: {error}") from error


def _message(body: bytes) -> str:
    """Of a Status object."""
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return ""


def core(namespace: str, kind: str, name: str = "") -> str:
    return _path("/api/v1", namespace, kind, name)


def apps(namespace: str, kind: str, name: str = "") -> str:
    return _path("/apis/apps/v1", namespace, kind, name)


def batch(namespace: str, kind: str, name: str = "") -> str:
    return _path("/apis/batch/v1", namespace, kind, name)


def coordination(namespace: str, kind: str, name: str = "") -> str:
    return _path("/apis/coordination.k8s.io/v1", namespace, kind, name)


def serving(namespace: str, kind: str, name: str = "") -> str:
    return _path("/apis/serving.knative.dev/v1", namespace, kind, name)


def autoscaling(namespace: str, kind: str, name: str = "") -> str:
    return _path("/apis/autoscaling.internal.knative.dev/v1alpha1", namespace, kind, name)


def _path(group: str, namespace: str, kind: str, name: str) -> str:
    return f"{group}/namespaces/{quote(namespace)}/{kind}" + (f"/{quote(name)}" if name else "")
