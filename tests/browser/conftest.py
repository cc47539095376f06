"""A real Chromium on real servers with real jobs. What they saw is in tests/browser/screenshots."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.api.conftest import WRITE, Served, serving, wait_for
from tests.support.tiny_job import make_job

SCREENSHOTS = Path(__file__).with_name("screenshots")
NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 180_000
"""For what a job on a busy machine does; nothing waits so long where all goes well."""
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH; scripts/setup --browser installs Chromium")
    with sync_playwright() as started:
        # CI's users are root in a container, where Chromium has no sandbox; it sees our own pages only
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield launched
        launched.close()


@dataclass
class Visit:
    """A page, and what went wrong on it."""

    page: Page
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "getImageData" not in text:  # that is these tests' own looking
            self.troubles.append(text)

    def shot(self, name: str) -> None:
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


Open = Callable[..., Visit]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens a URL in a context of its own: visit(url, theme="dark", width=900, token=...)."""
    contexts: list[BrowserContext] = []

    def opened(url: str, *, theme: str = "light", width: int = 1440, token: str | None = WRITE) -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": 1000},
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce",
        )
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        if token is not None:
            context.add_init_script(f"try {{ sessionStorage.setItem('rlhf-token', '{token}') }} catch {{}}")
        page = context.new_page()
        found = Visit(page)
        page.on("pageerror", lambda error: found.troubles.append(str(error)))
        page.on("console", lambda message: found.heard(message.type, message.text))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(url)
        return found

    yield opened
    for context in contexts:
        context.close()


@dataclass
class Ran:
    """A server with a job that has run to its end."""

    served: Served
    id: str

    @property
    def url(self) -> str:
        return f"{self.served.url}/jobs/{self.id}"

    @property
    def run(self) -> Path:
        return self.served.runs / self.id


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Five steps, validated, planned by the policy `adaptive`; the second is profiled."""
    root = tmp_path_factory.mktemp("dashboard")
    body = job_text(root / "data", steps=5) + "[profile]\nsteps = [2]\n"
    with serving(root / "runs", root / "data", max_running=1) as served:
        id = submit(served, body)
        wait_for(lambda: state_of(served, id) not in ("queued", "running"), what="the job's end", timeout_s=400)
        assert state_of(served, id) == "succeeded"
        yield Ran(served, id)


def job_text(directory: Path, *, steps: int) -> str:
    text = make_job(directory).file.read_text()
    prices = "".join(f"[functions.{name}]\nusd_per_hour = {usd}\n" for name, usd in (("reward", 0.2), ("train", 0.5)))
    text = text.replace("replicas = 2", "replicas = 2\nusd_per_hour = 0.5").replace("steps = 3", f"steps = {steps}")
    return f'{text}{prices}[planner]\npolicy = "adaptive"\n'


def submit(served: Served, body: str) -> str:
    with served.client() as api:
        answer = api.post("/v1/jobs", content=body, headers={"Content-Type": "application/toml"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


def state_of(served: Served, id: str) -> str:
    with served.client() as api:
        return str(api.get(f"/v1/jobs/{id}").json()["state"])
