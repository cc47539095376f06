"""What web pages of other sites try on a server of this machine, and the token that it makes for itself."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from orchestrator.api.auth import OWN, read_token
from orchestrator.api.client import token_headers
from orchestrator.api.same_origin import refused
from tests.api.conftest import Served, serving
from tests.support.tiny_job import ENV, arguments


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Served]:
    """As `rlhf-orchestrate serve` starts without options: no token file was given."""
    with serving(tmp_path_factory.mktemp("alone") / "runs", root, own_token=True) as server:
        yield server


def test_it_makes_a_token_that_its_owner_finds(alone: Served) -> None:
    file = alone.runs / OWN
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert httpx.get(f"{alone.url}/v1/jobs").status_code == 401, "no one without it"
    with alone.client(read_token(file)) as client:
        assert client.get("/v1/jobs").json()["jobs"] == []
    assert f"dashboard: {alone.url}/#token={read_token(file)}\n" in alone.log.read_text()
    environment = {name: value for name, value in ENV.items() if name != "RLHF_TOKEN"}
    words = arguments("top", "--url", alone.url)
    found = subprocess.run(words, cwd=alone.runs.parent, env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_token_outlives_the_server(tmp_path: Path, root: Path) -> None:
    tokens = []
    for _ in range(2):
        with (
            serving(tmp_path / "runs", root, own_token=True) as server,
            server.client(read_token(server.runs / OWN)) as api,
        ):
            assert api.get("/v1/jobs").status_code == 200
            tokens.append(read_token(server.runs / OWN))
            (server.runs / OWN).chmod(0o644)
    assert tokens[0] == tokens[1]
    with serving(tmp_path / "runs", root, own_token=True):
        assert stat.S_IMODE((tmp_path / "runs" / OWN).stat().st_mode) == 0o600, "closed again"


def test_the_own_token_is_for_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_TOKEN", raising=False)
    assert token_headers(None, "http://127.0.0.1:8080") == {}
    Path("runs").mkdir()
    Path("runs", OWN).write_text("local write 0123456789abcdef\n")
    for url in ("http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:8080"):
        assert token_headers(None, url) == {"Authorization": "Bearer 0123456789abcdef"}
    for url in ("http://10.0.0.1:8080", "http://localhost.example.com", "https://api.example.com"):
        assert token_headers(None, url) == {}
    monkeypatch.setenv("RLHF_TOKEN", "of-the-environment")
    assert token_headers(None, "http://127.0.0.1:8080") == {"Authorization": "Bearer of-the-environment"}
    Path("mine").write_text("of-the-file\n")
    assert token_headers(Path("mine"), "http://10.0.0.1") == {"Authorization": "Bearer of-the-file"}


def test_a_name_that_another_site_made_resolve_here_is_refused(alone: Served) -> None:
    """DNS rebinding: the page's own site, evil.example, suddenly has the address 127.0.0.1."""
    with alone.client(read_token(alone.runs / OWN)) as client:
        for path in ("/", "/v1/jobs", "/healthz", "/openapi.json", "/assets/app/main.js"):
            answer = client.get(path, headers={"Host": f"evil.example:{alone.url.rpartition(':')[2]}"})
            assert answer.status_code == 403, path
            assert answer.headers["content-type"] == "application/problem+json"
        port = alone.url.rpartition(":")[2]
        for name in ("localhost", "127.0.0.1", "[::1]"):
            assert client.get("/v1/jobs", headers={"Host": f"{name}:{port}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/done/cancel", "/v1/jobs/done/resume"])
def test_another_site_changes_nothing_even_with_the_token(
    api: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    answer = api.post(path, headers=headers)
    assert answer.status_code == 403
    assert "another site" in answer.json()["detail"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_forms_send_is_no_request(api: httpx.Client, kind: str) -> None:
    for path in ("/v1/jobs", "/v1/jobs/done/cancel", "/v1/jobs/done/resume"):
        assert api.post(path, content=b"{}", headers={"Content-Type": kind}).status_code == 415


def test_what_the_dashboard_and_commands_send_may_pass(api: httpx.Client) -> None:
    own = str(api.base_url).rstrip("/")
    for headers in ({}, {"Sec-Fetch-Site": "same-origin", "Origin": own}, {"Origin": own}, {"Sec-Fetch-Site": "none"}):
        assert api.post("/v1/jobs/done/cancel", headers=headers).status_code == 409, "done has succeeded"
    assert api.get("/v1/jobs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200, "reading needs the token"


def test_a_server_for_others_has_any_name() -> None:
    """Behind a Service, an Ingress or a load balancer; who calls, the token tells."""
    named = Headers({"host": "rlhf.example.com", "origin": "https://rlhf.example.com"})
    assert refused("POST", named, loopback=False) is None
    assert refused("GET", named, loopback=True) == (
        403,
        "Host 'rlhf.example.com' is not a name of this machine (localhost, 127.0.0.1); a proxy has to send one",
    )
    for host in ("", "[", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0:8080"):
        assert refused("GET", Headers({"host": host}), loopback=True) is not None
