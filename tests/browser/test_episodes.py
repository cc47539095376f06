"""A run with episodes: whose tools failed, and a turn token by token; in each width and theme."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.api.conftest import Served, serving, write_run
from tests.browser.conftest import Open
from tests.browser.test_page import violations
from tests.support.tiny_job import make_model

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
PIECES, OFF = ["Let ", "me ", "look", "<|im_end|>"], [0.002, -0.25, None, 1.5]


def told(name: str, content: str) -> dict[str, object]:
    return {"role": "tool", "name": name, "content": content, "seconds": 0.2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One run of two episodes; no job runs."""
    root = tmp_path_factory.mktemp("episodes")
    make_model(root / "data" / "model")
    (root / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    write_run(root / "runs" / "tools", root / "data", finished=True, steps=1)
    said = {"role": "assistant", "content": "Let me look", "tokens": 4, "begin": 0, "reward": None, "pieces": PIECES}
    said |= {"difference": OFF, "errors": {"wrong_arguments": 1}}
    answers = [
        told("price", "3"), told("search", "Error: no such page"), told("price", "4"), told("price", "no Error: 5"),
        told("search", f"Error: TimeoutError: {'late ' * 40}"), told("", "Error: the tool call is not JSON"),
    ]  # fmt: skip
    file = root / "runs" / "tools" / "samples" / "000001.jsonl"
    first, second = map(json.loads, file.read_text().splitlines())
    first["conversation"], second["conversation"] = [said, *answers[:3], said], [said, *answers[3:], said]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in (first, second)))
    with serving(root / "runs", root / "data") as found:
        yield found


def test_failures_are_told_of_the_tool_that_failed_and_a_turn_token_by_token(served: Served, visit: Open) -> None:
    for width, theme in itertools.product((390, 1024, 1440), ("light", "dark")):
        seen = visit(f"{served.url}/jobs/tools#samples", width=width, theme=theme)
        page = seen.page
        tools = page.get_by_role("table", name="Tools").locator("tbody tr")
        expect(tools).to_have_count(3)
        shown = [" ".join(row.split()) for row in tools.all_inner_texts()]
        assert shown == ["search 2 2", "(no call that can be read) 1 1", "price 3 0"]
        page.locator(".samples .fold").first.click()
        turn = page.locator(".samples .whole pre").nth(1)
        tokens = turn.locator("span")
        assert tokens.all_inner_texts() == PIECES
        marks = [(tokens.nth(k).get_attribute("class"), tokens.nth(k).get_attribute("title")) for k in range(4)]
        assert marks == [
            ("off0", "trainer +0.002"), ("off2", "trainer \u22120.25"), (None, "not trained on"),
            ("off3", "trainer +1.5"),
        ]  # fmt: skip
        expect(page.get_by_text("mismatch 0.58, at most 1.5").first).to_be_visible()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.shot(f"episodes-{width}-{theme}")
        assert seen.troubles == []
