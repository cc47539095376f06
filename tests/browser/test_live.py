"""A job while it runs: seen as it happens, over a restart of the server, cancelled and resumed, failed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.api.conftest import READ, free_port, serving, wait_for
from tests.browser.conftest import Open, job_text, state_of, submit

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
STEPS = 40
SCORER = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError(f"no answer for {data_source}")
"""


def step_of(page: Page) -> int:
    """What the page says; -1 before the first."""
    text = page.locator(".tile strong").first.inner_text().split("/")[0].strip()
    return int(text) if text.isdigit() else -1


def until_step(page: Page, step: int) -> None:
    """Waits until the page says so, without asking anybody else."""
    condition = "at => parseInt(document.querySelector('.tile strong')?.textContent ?? '-1') >= at"
    page.wait_for_function(condition, arg=step)


def test_from_an_empty_list_over_a_restart_to_the_end(tmp_path: Path, visit: Open) -> None:
    """Nothing is reloaded: the page finds the job, follows it, says when the server is away, and misses no step."""
    body = job_text(tmp_path / "data", steps=STEPS)
    runs, port = tmp_path / "runs", free_port()
    with serving(runs, tmp_path / "data", max_running=1, port=port) as served:
        seen = visit(served.url)
        page = seen.page
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        seen.shot("jobs-empty")
        id = submit(served, body)
        page.get_by_role("link", name=id).click()
        expect(page).to_have_url(f"{served.url}/jobs/{id}")
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        until_step(page, 2)
        seen.shot("job-live")
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
        away = page.get_by_text("The server does not answer. The job goes on without it")
        expect(away).to_be_visible()
        at = step_of(page)
        seen.shot("server-away")
    with serving(runs, tmp_path / "data", max_running=1, port=port) as served:
        expect(away).to_be_hidden()
        until_step(page, at + 1)
        expect(page.locator(".state").first).to_have_text("succeeded", timeout=600_000)
        expect(page.locator(".tile strong").first).to_have_text(f"{STEPS} / {STEPS}")
        page.get_by_role("tab", name="Events").click()
        expect(page.locator(".events li.finished")).to_have_count(1)
        told = page.locator(".events li.step").all_inner_texts()
        steps = [int(re.findall(r"Step (\d+) is committed", text)[0]) for text in told]
        assert steps == list(range(STEPS, -1, -1)), "each step once, newest first"
        seen.shot("events")
        assert [trouble for trouble in seen.troubles if "ERR_" not in trouble and "401" not in trouble] == []


def test_cancel_and_resume_are_asked_about_first(tmp_path: Path, visit: Open) -> None:
    body = job_text(tmp_path / "data", steps=300)
    with serving(tmp_path / "runs", tmp_path / "data", max_running=1) as served:
        id = submit(served, body)
        page = visit(f"{served.url}/jobs/{id}").page
        until_step(page, 1)

        page.get_by_role("button", name="Cancel…").click()
        expect(page.get_by_role("dialog", name=f"Cancel {id}?")).to_be_visible()
        page.get_by_role("button", name="Keep it running").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert state_of(served, id) == "running"

        page.get_by_role("button", name="Cancel…").click()
        page.get_by_role("button", name="Cancel the job").click()
        expect(page.locator(".state").first).to_have_text("cancelled")
        wait_for(lambda: state_of(served, id) == "cancelled", what="cancelled", timeout_s=180)
        at = step_of(page)

        page.get_by_role("button", name="Resume…").click()
        page.get_by_role("button", name="Resume the job").click()
        until_step(page, at + 1)

        reader = visit(f"{served.url}/jobs/{id}", token=READ).page
        reader.get_by_role("button", name="Cancel…").click()
        reader.get_by_role("button", name="Cancel the job").click()
        expect(reader.get_by_role("alert")).to_have_text("the token 'dashboard' may only read")

        # somebody cancels elsewhere, and resumes: the page follows
        with served.client() as api:
            assert api.post(f"/v1/jobs/{id}/cancel").status_code == 202
        expect(page.locator(".state").first).to_have_text("cancelled")
        with served.client() as api:
            wait_for(lambda: api.post(f"/v1/jobs/{id}/resume").status_code == 202, what="resumed")
        expect(page.locator(".state").first).to_have_text("running")
        with served.client() as api:
            api.post(f"/v1/jobs/{id}/cancel")
        wait_for(lambda: state_of(served, id) == "cancelled", what="cancelled", timeout_s=180)


def test_a_failure_says_what_where_and_what_would_be_right(tmp_path: Path, visit: Open) -> None:
    body = job_text(tmp_path / "data", steps=3)
    (tmp_path / "data" / "reward.py").write_text(SCORER)
    with serving(tmp_path / "runs", tmp_path / "data", max_running=1) as served:
        id = submit(served, body)
        seen = visit(f"{served.url}/jobs/{id}")
        trouble = seen.page.get_by_role("alert").filter(has=seen.page.get_by_role("heading"))
        expect(trouble).to_be_visible()
        expect(trouble).to_contain_text("reward.py")
        expect(trouble).to_contain_text("no answer for sums")
        expect(trouble).to_contain_text("Resume goes on from there")
        assert "Traceback" not in trouble.inner_text()
        seen.page.get_by_text("The orchestrator's last lines").click()
        expect(trouble.locator("pre")).to_contain_text("error:")
        seen.shot("failed")
        listed = visit(served.url).page
        expect(listed.get_by_role("row").filter(has_text=id)).to_contain_text("failed")


def test_a_token_is_asked_for_and_kept_for_the_tab(tmp_path: Path, visit: Open) -> None:
    (tmp_path / "data").mkdir()
    with serving(tmp_path / "runs", tmp_path / "data") as served:
        page = visit(served.url, token=None).page
        dialog = page.get_by_role("dialog", name="This server wants a token")
        dialog.get_by_label("Token").fill("not-the-token-0123456789")
        dialog.get_by_role("button", name="Go on").click()
        expect(dialog.get_by_role("alert")).to_have_text("this token is not known")
        dialog.get_by_label("Token").fill(READ)
        dialog.get_by_role("button", name="Go on").click()
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        assert READ not in page.url
        stored = page.evaluate("[Object.values(localStorage), document.cookie]")
        assert stored == [[], ""], "in the tab's session alone"
