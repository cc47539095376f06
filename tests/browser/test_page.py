"""A job that has run: its parts, by keyboard, for screen readers, in both themes; and its report as a file."""

from __future__ import annotations

import gzip
import importlib.resources
import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.api.conftest import wait_for
from tests.browser.conftest import Open, Ran, state_of
from tests.support.tiny_job import command

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
TABS = ("overview", "cost", "plan", "samples", "events", "settings")
AXE = (importlib.resources.files("axe_playwright_python") / "axe.min.js").read_text()


def violations(page: Page) -> list[str]:
    """Serious and critical findings of axe-core."""
    page.evaluate(AXE)  # not a script of the page: its policy would forbid that
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{finding['id']}: {node['target']} {node['failureSummary']}"
        for finding in found
        if finding["impact"] in ("serious", "critical")
        for node in finding["nodes"]
    ]


def loaded(page: Page) -> None:
    """Everything that was asked for is on the page."""
    expect(page.locator(".tile").first).to_be_visible()
    page.wait_for_load_state("networkidle")
    expect(page.get_by_text(re.compile("^Reading "))).to_have_count(0)


def drawn(page: Page, selector: str, colours: int) -> None:
    """Waits until a canvas shows at least so many colours."""
    page.wait_for_function(
        """([selector, colours]) => {
            const canvas = document.querySelector(selector)
            const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
            return new Set(new Uint32Array(data.buffer)).size >= colours
        }""",
        arg=[selector, colours],
    )


def test_what_the_page_shows_is_what_the_api_says(ran: Ran, visit: Open) -> None:
    seen = visit(ran.url)
    page = seen.page
    loaded(page)
    with ran.served.client() as api:
        job = api.get(f"/v1/jobs/{ran.id}").json()
        cost = api.get(f"/v1/jobs/{ran.id}/cost").json()
        where = api.get(f"/v1/jobs/{ran.id}/where").json()
        signs = api.get(f"/v1/jobs/{ran.id}/health").json()["signs"]
        score = api.get(f"/v1/jobs/{ran.id}/metrics", params={"name": "critic/score/mean"}).json()
    tiles = page.locator(".tiles").inner_text()
    assert "5 / 5" in tiles
    with ran.served.client() as api:  # simulated beside the server, told when it is there
        wait_for(
            lambda: api.get(f"/v1/jobs/{ran.id}/reserved").json()["steps"], what="reserved machines", timeout_s=600
        )
        reserved = api.get(f"/v1/jobs/{ran.id}/reserved").json()
    page.reload()
    loaded(page)
    change = reserved["used"]["usd"] / reserved["dedicated"]["usd"] - 1
    said = f"{abs(100 * change):.0f} % {'under' if change < 0 else 'over'} dedicated"
    expect(page.locator(".tiles")).to_contain_text(said)
    with ran.served.client() as api:
        took = api.get(f"/v1/jobs/{ran.id}/cost/steps").json()["wall_s"]
    step_s = sorted(took[-10:])[len(took[-10:]) // 2]
    assert float(page.locator(".tile small").first.inner_text().split()[0]) == pytest.approx(step_s, rel=5e-3)
    assert f"${sum(c['usd'] for c in cost['functions'].values()):.2g}"[:6] in tiles, tiles
    assert "Validation score" in tiles, "the scorer gives no acc"
    bars = page.locator(".where li")
    expect(bars).to_have_count(len(where["steps"]))
    last = where["steps"][-1]
    seconds = float(bars.last.locator(".took").inner_text().split()[0])
    assert seconds == pytest.approx(sum(last["parts"].values()), rel=5e-3)
    expect(page.locator(".health .sign")).to_have_count(len(signs))
    assert float(page.locator(".tile strong").nth(1).inner_text()) == pytest.approx(
        job["metrics"]["critic/score/mean"], rel=5e-3
    )
    page.get_by_role("button", name="Table of critic/score/mean").click()
    rows = page.get_by_role("table", name="critic/score/mean").locator("tbody tr").all_inner_texts()
    shown = {int(row.split()[0]): row.split()[1] for row in rows}
    for step, value in zip(score["steps"], score["metrics"]["critic/score/mean"], strict=True):
        if value is None:
            assert not shown[step].isdigit()
        else:
            assert float(shown[step]) == pytest.approx(value, rel=5e-3)
    drawn(page, ".gantt .canvas canvas", 6)  # bars of several states
    page.get_by_role("button", name="Table of replicas").click()
    table = page.locator(".gantt table").inner_text()
    assert all(name in table for name in ("generate", "reward", "train", "busy", "starting"))
    seen.shot("overview-tables")
    assert seen.troubles == []
    assert all(url.startswith((ran.served.url, "data:")) for url in seen.requests), "nothing from outside"


def test_samples_are_filtered_sorted_and_paged_by_the_server(ran: Ran, visit: Open) -> None:
    page = visit(f"{ran.url}#samples").page
    rows = page.locator(".samples tbody tr")
    expect(rows).to_have_count(12)
    page.get_by_label("Order").select_option("-mismatch")
    page.wait_for_function("() => document.querySelector('.note[aria-busy]').ariaBusy === 'false'")
    with ran.served.client() as api:
        order = api.get(f"/v1/jobs/{ran.id}/samples", params={"sort": "-mismatch"}).json()["samples"]
    assert order[0]["mismatch"] >= order[-1]["mismatch"] >= 0
    first = f"{order[0]['group']}.{order[0]['index']}"
    expect(rows.first.locator("th")).to_have_text(first)
    rows.first.get_by_role("button").click()
    expect(page.locator(".samples .whole pre").first).to_have_text(order[0]["prompt"])
    page.get_by_label("Contains").fill("no sample has this")
    expect(page.get_by_role("status").filter(has_text="0 samples of step 5 match")).to_be_visible()
    page.get_by_label("Contains").fill("")
    page.get_by_role("button", name="Step before").click()
    expect(page.get_by_role("status").filter(has_text="12 samples of step 4")).to_be_visible()


def test_a_profile_is_downloaded_as_a_trace(ran: Ran, visit: Open, tmp_path: Path) -> None:
    page = visit(f"{ran.url}#settings").page
    row = page.get_by_role("table", name="Traces of calls").get_by_role("row").filter(has_text="train-1.json.gz")
    with page.expect_download() as download:
        row.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == f"{ran.id}-2-train-1.json.gz"
    download.value.save_as(tmp_path / "trace.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert any("backward" in event["name"].lower() for event in trace["traceEvents"]), "for ui.perfetto.dev"


def test_an_axis_says_what_its_ticks_are(ran: Ran, visit: Open) -> None:
    page = visit(ran.url).page
    for values in ([0, 0.25, 0.5, 0.75, 1], [0, 2.5, 5], [0.1, 0.2], [7, 8], [1500, 2000], [1.55e-7, 1.6e-7]):
        told = page.evaluate("async (v) => (await import('app/format.js')).ticks(v)", values)
        assert [float(text.replace(",", "")) for text in told] == pytest.approx(values, abs=0), told


def test_an_episode_is_read_as_a_conversation(ran: Ran, visit: Open) -> None:
    page = visit(f"{ran.url}#samples").page
    said = {"role": "assistant", "content": "<tool_call>", "tokens": 3, "reward": None, "errors": {"not_json": 1}}
    told = {"role": "tool", "name": "price", "content": "Error", "seconds": 0.5}
    sample = {"prompt": "tea?", "response": "...", "conversation": [said, told, {**said, "tokens": 1, "errors": {}}]}
    parts = page.evaluate("async (s) => (await import('app/sample.js')).parts(s)", sample)
    assert [part["role"] for part in parts] == [
        "Prompt", "Assistant · 3 tokens · 1 not json", "tool price · not trained on · 0.5 s", "Assistant · 1 token"
    ]  # fmt: skip
    assert [part["text"] for part in parts] == ["tea?", "<tool_call>", "Error", "<tool_call>"]


def test_a_prompts_samples_side_by_side_and_over_the_steps(ran: Ran, visit: Open) -> None:
    page = visit(f"{ran.url}#samples").page
    with ran.served.client() as api:
        told = api.get(f"/v1/jobs/{ran.id}/samples").json()
    page.locator(".chips button").first.click()
    cards = page.locator(".side-by-side article")
    expect(cards).to_have_count(told["groups"][0]["count"])
    for card, sample in zip(cards.all(), told["samples"], strict=False):
        expect(card.locator("pre")).to_have_text(sample["response"])
    expect(page.locator(".truth code").first).to_have_text(told["samples"][0]["ground_truth"])
    page.get_by_role("button", name="Validation").click()
    expect(page.get_by_role("status").filter(has_text=re.compile(r"\d+ samples of step 5"))).to_be_visible()
    page.locator(".chips button").first.click()
    page.get_by_role("button", name="Over the steps").click()
    rows = page.get_by_role("table", name="The same prompt over the steps").locator("tbody tr")
    expect(rows).to_have_count(4)  # validated at 0, 2, 4, 5


def test_jobs_are_compared_and_made_from_one_another(ran: Ran, visit: Open) -> None:
    seen = visit(ran.url)
    page = seen.page
    page.get_by_role("button", name="Clone…").click()
    text = page.get_by_role("dialog").get_by_role("textbox")
    body = json.loads(text.input_value()) | {"steps": -1}
    text.fill(json.dumps(body))
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("steps")
    text.fill(json.dumps(body | {"steps": 2, "name": "again"}))
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_role("heading", name="again")).to_be_visible()
    id = page.url.rsplit("/", 1)[1]
    wait_for(lambda: state_of(ran.served, id) == "succeeded", what="the clone's end", timeout_s=400)
    page = visit(ran.served.url).page
    for one in (ran.id, id):
        page.get_by_role("checkbox", name=f"compare {one}").check()
    page.get_by_role("button", name="Compare 2").click()
    differences = page.get_by_role("table", name="Settings that differ")
    expect(differences.get_by_role("row").filter(has_text=re.compile("^steps52$"))).to_be_visible()
    for over in ("time", "cost", "tokens"):
        page.get_by_role("combobox", name="Over").select_option(over)
        expect(page.locator(".chart .plot canvas").first).to_be_visible()
    with ran.served.client() as api:
        metrics = api.get(f"/v1/jobs/{ran.id}/metrics", params={"name": "perf/total_num_tokens"}).json()["metrics"]
    page.get_by_role("button", name="Table of critic/score/mean").click()
    rows = page.get_by_role("table", name="critic/score/mean").locator("tbody tr")
    places = [float(row.split()[0].replace(",", "")) for row in rows.all_inner_texts()]
    longest = sum(filter(None, metrics["perf/total_num_tokens"]))
    assert max(places) == pytest.approx(longest, rel=5e-3), "where the longer run's last step stands, in tokens"
    page.get_by_label("Smoothing").select_option("0.9")
    page.get_by_label("Log scale").check()
    loaded_compare = page.locator(".charts .chart")
    assert loaded_compare.count() >= 5
    assert violations(page) == []
    with ran.served.client() as api:
        assert api.delete(f"/v1/jobs/{id}").is_success


def test_by_keyboard_alone(ran: Ran, visit: Open) -> None:
    page = visit(ran.served.url).page
    expect(page.get_by_role("link", name=ran.id)).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    loaded(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    for number, name in enumerate(("Overview", "Cost", "Plan", "Samples", "Events", "Configuration"), start=1):
        page.keyboard.press(str(number))
        expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("1")
    page.get_by_role("tab", name="Overview").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Cost")).to_be_focused()
    page.keyboard.press("ArrowLeft")

    canvas = page.locator(".gantt .canvas canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile("^Replicas from"))
    canvas.focus()
    before = canvas.get_attribute("aria-label")
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    expect(canvas).not_to_have_attribute("aria-label", before or "")
    page.keyboard.press("0")
    expect(canvas).to_have_attribute("aria-label", re.compile("^Replicas from 0 s to"))

    curve = page.locator(".plot").first
    expect(curve.locator("canvas")).to_be_visible()
    curve.focus()
    page.keyboard.press("End")
    expect(page.locator(".chart p[aria-live]").first).to_contain_text("step 5: critic/score/mean")
    theme = page.locator("html").get_attribute("data-theme")
    page.keyboard.press("t")
    expect(page.locator("html")).not_to_have_attribute("data-theme", theme or "")

    # everything that can be clicked can be reached by Tab, and shows that it has the focus
    page.keyboard.press("1")
    wanted = page.locator("main button:visible:not([tabindex='-1']):not(:disabled)").count()
    reached, unseen = set[str](), list[str]()
    page.locator("body").evaluate("body => body.focus()")
    for _ in range(wanted + 60):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
                return [e.tagName, e.textContent, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0] }"""
        )
        if found[0] == "BUTTON":
            reached.add(found[1])
            if not found[2]:
                unseen.append(found[1])
    assert {"Metrics…", "+", "All"} <= reached
    assert len(reached) >= wanted - 2, f"{wanted} buttons, {len(reached)} reached: {sorted(reached)}"
    assert unseen == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(ran: Ran, visit: Open, theme: str) -> None:
    seen = visit(ran.served.url, theme=theme)
    expect(seen.page.get_by_role("link", name=ran.id)).to_be_visible()
    assert violations(seen.page) == []
    seen.shot(f"jobs-{theme}")
    seen = visit(ran.url, theme=theme)
    page = seen.page
    for number, name in enumerate(TABS, start=1):
        page.keyboard.press(str(number))
        loaded(page)
        if name == "samples":
            page.locator(".samples .fold").first.click()
        assert violations(page) == [], name
        seen.shot(f"{name}-{theme}")
    page.keyboard.press("1")
    page.get_by_role("button", name="Metrics…").click()
    assert violations(page) == [], "the choice of metrics"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert violations(page) == [], "the keys"


@pytest.mark.parametrize("width", [1024, 390])
def test_nothing_runs_over_on_a_narrow_screen(ran: Ran, visit: Open, width: int) -> None:
    seen = visit(ran.url, width=width)
    for number, name in enumerate(TABS, start=1):
        seen.page.keyboard.press(str(number))
        loaded(seen.page)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, name
    seen.page.keyboard.press("1")
    loaded(seen.page)
    seen.shot(f"overview-{width}")


def test_the_report_is_one_file_that_asks_for_nothing(ran: Ran, visit: Open, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = command("report", ran.run, "-o", file)
    assert done.returncode == 0, done.stderr
    seen = visit(file.as_uri(), token=None)
    page = seen.page
    for number in range(1, len(TABS) + 1):
        page.keyboard.press(str(number))
        loaded(page)
        assert violations(page) == []
    page.keyboard.press("1")
    assert "5 / 5" in page.locator(".tiles").inner_text()
    drawn(page, ".gantt .canvas canvas", 6)
    drawn(page, "canvas.overview", 4)
    page.keyboard.press("4")
    expect(page.locator(".samples tbody tr")).to_have_count(12)
    seen.shot("report")
    assert [url for url in seen.requests if not url.startswith("data:")] == [file.as_uri()]
    assert seen.troubles == []
    assert json.loads((ran.run / "run.json").read_text())["format"] == 2, "the run is as it was"
