"""Services through `kn` where it is on the PATH; a program with its interface stands in for it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from orchestrator.platforms.base import PlatformError
from orchestrator.platforms.knative.platform import KnativePlatform
from tests.knative.conftest import Start
from tests.knative.test_platform import FAST, answer, context, count, knative, run, waits_and_answers

KN = """#!{python}
import argparse, json, os, sys, urllib.request
parser = argparse.ArgumentParser(prog="kn")
for word in ("service", "apply"):
    parser.add_argument(word, choices=[word])
parser.add_argument("-f", "--filename", required=True)
parser.add_argument("--namespace", required=True)
parser.add_argument("--no-wait", action="store_true", required=True)
given = parser.parse_args()
manifest = json.load(open(given.filename))
if os.environ.get("KN_REFUSES"):
    sys.exit("Error: admission webhook denied the request: " + os.environ["KN_REFUSES"])
path = f"/apis/serving.knative.dev/v1/namespaces/{{given.namespace}}/services/{{manifest['metadata']['name']}}"
headers = {{"authorization": "Bearer t", "content-type": "application/apply-patch+yaml"}}
body = json.dumps(manifest).encode()
url = {api!r} + path + "?fieldManager=kn"
urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PATCH")).read()
"""


@pytest.fixture
def with_kn(control_plane: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def start() -> object:
        plane = control_plane()
        program = tmp_path / "bin" / "kn"
        program.parent.mkdir()
        program.write_text(KN.format(python=sys.executable, api=plane.api_url))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return plane

    return start  # type: ignore[return-value]  # as Start, without limits


def test_services_are_created_by_kn(with_kn: Start) -> None:
    plane = with_kn()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 1)
            assert (await answer(platform, count("a")))[-1].kind == "done"
            owners = plane.ask(lambda c: c.objects["services", "job-count"]["metadata"]["ownerReferences"])
            assert [owner["kind"] for owner in owners] == ["Job"], "or nothing would end it when we die"

    run(test())


def test_what_kn_refuses_is_told(with_kn: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = with_kn()
    monkeypatch.setenv("KN_REFUSES", "must not set the field(s): spec.template.spec.nodeSelector")

    async def test() -> None:
        with pytest.raises(PlatformError, match=r"kn service apply job-count: .*nodeSelector -> run .*doctor"):
            async with knative(plane):
                pass
        await asyncio.sleep(0)

    run(test())


def test_a_webhook_that_is_away_is_waited_for(with_kn: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = with_kn()
    away = 'Internal error occurred: failed calling webhook "webhook.serving.knative.dev": connection refused'
    monkeypatch.setenv("KN_REFUSES", away)
    notes: list[str] = []

    async def test() -> None:
        platform = KnativePlatform(context(plane), timing=FAST)
        try:
            await waits_and_answers(platform, notes, lambda: monkeypatch.delenv("KN_REFUSES"))
        finally:
            await platform.close()

    run(test())
    assert "failed calling webhook" in notes[0]
