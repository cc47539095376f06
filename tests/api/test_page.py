"""The page as it is served: nothing from outside, every module known, vendored files as they were published."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from pathlib import Path

import httpx

from functions.reward.rules import RULES
from orchestrator.api.page import VENDORED, WEB, assets, index, modules, report_page
from orchestrator.job.config import parse_job
from orchestrator.recipes import RECIPES
from orchestrator.telemetry.headline import HEADLINES

OUTSIDE = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}""")
NAMED = {"http://www.w3.org", "https://html.spec.whatwg.org", "https://github.com"}
"""XML namespaces, and comments that say where something is from."""
IMPORT = re.compile(r"""^(?:import|export)\b[^"';]*?from\s*["']([^"']+)["']|^import\s*["']([^"']+)["']""", re.MULTILINE)


def test_vendored_files_are_those_that_were_published() -> None:
    rows = re.findall(
        r"^\| (\S+) \| \S+ \| [\d.]+ \| \S+ \| ([0-9a-f]{64}) \|$", (WEB / "vendor/README.md").read_text(), re.M
    )
    assert {name for name, _ in rows} == {
        p.name for p in (WEB / "vendor").iterdir() if p.suffix in (".mjs", ".js", ".css")
    }
    for name, digest in rows:
        assert hashlib.sha256((WEB / "vendor" / name).read_bytes()).hexdigest() == digest, name


def test_every_import_is_in_the_import_map() -> None:
    known = modules()
    for name in known:
        if name in VENDORED:
            continue
        for one, two in IMPORT.findall(assets()[known[name]].data.decode()):
            assert (one or two) in known, f"{name} imports {one or two}"


def test_own_modules_are_small() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (WEB / "app").iterdir()}
    assert {name: lines for name, lines in lengths.items() if lines >= 250} == {}


def test_what_new_job_begins_with_is_a_job() -> None:
    text = re.search(r"const FIRST = `(.*?)`;", (WEB / "app" / "submit.js").read_text(), re.DOTALL)
    assert text is not None
    job = parse_job(tomllib.loads(text[1]), base=Path())
    assert (str(job.reward.score).removeprefix("rule:"), job.recipe in RECIPES) == ("gsm8k", True)
    assert "gsm8k" in RULES


def test_what_a_job_is_followed_by_is_the_same_on_page_and_terminal() -> None:
    said = re.search(r"export function headline.*?\[(.*?)\]", (WEB / "app" / "format.js").read_text(), re.DOTALL)
    assert said is not None
    assert json.loads(f"[{said[1]}]") == list(HEADLINES)


def test_nothing_is_asked_of_other_servers() -> None:
    for path, asset in assets().items():
        if path.endswith((".js", ".mjs", ".css")):
            found = {url for url in OUTSIDE.findall(asset.data.decode()) if url.startswith("http")}
            assert found <= NAMED, path
    assert OUTSIDE.findall(index()[0].replace("http://www.w3.org", "")) == []


def test_the_policy_allows_the_import_map_alone() -> None:
    text, policy = index()
    import_map = re.search(r'<script type="importmap">(.*?)</script>', text, re.DOTALL)
    assert import_map is not None
    digest = base64.b64encode(hashlib.sha256(import_map[1].encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    assert set(json.loads(import_map[1])["imports"]) == set(modules())


def test_a_reports_data_cannot_end_its_script() -> None:
    text = report_page("<b>", {"job": {"id": "</script><script>alert(1)</script>"}})
    assert "alert(1)</script>" not in text
    assert "<title>&lt;b&gt;</title>" in text
    inlined = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert inlined is not None
    assert json.loads(inlined[1])["job"]["id"].startswith("</script>")


def test_pages_and_assets_over_http(api: httpx.Client) -> None:
    anonymous = httpx.Client(base_url=api.base_url)
    for path in ("/", "/jobs/any-job"):
        page = anonymous.get(path)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
    script = anonymous.get("/assets/app/main.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    again = anonymous.get("/assets/app/main.js", headers={"If-None-Match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/assets/app/none.js", "/assets/../page.py", "/assets/%2e%2e/page.py"):
        assert anonymous.get(path).status_code == 404, path
    assert not any(path.startswith(("/assets", "/jobs")) for path in api.get("/openapi.json").json()["paths"])
    assert Path(WEB / "index.html").exists()
    anonymous.close()
