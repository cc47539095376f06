"""What each of the release's accounts may do, asked of the cluster itself (charts/rlhf-orchestrate/README.md)."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster.conftest import RELEASE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
RIGHTS: dict[str, dict[str, str]] = {
    "api": {"jobs.batch": "create deletecollection list"},
    "runner": {
        "services.serving.knative.dev": "create delete get patch",
        "revisions.serving.knative.dev": "get patch",
        "podautoscalers.autoscaling.internal.knative.dev": "patch",
        "deployments.apps/scale": "patch",
        "jobs.batch": "create delete patch",
        "pods": "delete get list patch watch",
        "secrets": "create get patch",
        "localqueues.kueue.x-k8s.io": "get",
    },
    "functions": {},
}


@pytest.mark.parametrize("account", RIGHTS)
def test_an_account_may_do_what_is_listed_and_nothing_else(release: Release, account: str) -> None:
    user = f"system:serviceaccount:{release.namespace}:{RELEASE}-rlhf-orchestrate-{account}"
    for namespace, expected in ((release.namespace, RIGHTS[account]), ("kube-system", {})):
        command = ["kubectl", "auth", "can-i", "--list", "-n", namespace, "--as", user, "--no-headers"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        found = {}
        for line in done.stdout.splitlines():
            resource, verbs = line.split()[0], line[line.rindex("[") + 1 : line.rindex("]")]
            if not resource.startswith(("[", "self")):  # what everybody may: paths of the API, questions about oneself
                found[resource] = " ".join(sorted(verbs.split()))
        assert found == expected, namespace
