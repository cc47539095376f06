"""events.jsonl over kills: nothing is lost that was committed, nothing is told twice, half lines go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.api.summary import SummaryFile
from orchestrator.base.errors import RunError
from orchestrator.run.events import FILE, EventLog, open_events, read_events


def kinds(directory: Path) -> list[tuple[int, str]]:
    return [(event.id, event.type) for event in read_events(directory / FILE)[0]]


def test_ids_go_on_and_steps_are_told_once(tmp_path: Path) -> None:
    first = EventLog(tmp_path)
    first.append("started", {"execution": first.executions + 1})
    first.tell("step", 0, {})
    first.close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"id": 3, "time": 1.0, "ty')  # killed while it wrote
    assert kinds(tmp_path) == [(1, "started"), (2, "step")]
    again = EventLog(tmp_path)
    assert again.executions == 1
    again.tell("step", 0, {})
    again.tell("validation", 0, {})
    again.tell("step", 1, {})
    again.close()
    assert kinds(tmp_path) == [(1, "started"), (2, "step"), (3, "validation"), (4, "step")]


def test_an_execution_tells_how_it_ended(tmp_path: Path) -> None:
    with open_events(tmp_path):
        pass
    with pytest.raises(RunError), open_events(tmp_path):
        raise RunError("the disk is full")
    with pytest.raises(ExceptionGroup), open_events(tmp_path):
        raise ExceptionGroup("tasks", [ValueError("a bug"), RunError("what a user can read")])
    with pytest.raises(asyncio.CancelledError), open_events(tmp_path):
        raise asyncio.CancelledError
    events = read_events(tmp_path / FILE)[0]
    assert [event.type for event in events] == ["finished", "failed", "failed", "cancelled"]
    assert [event.data.get("message") for event in events[1:3]] == ["the disk is full", "what a user can read"]


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.append("note", {"message": "a"})
    events, end = read_events(tmp_path / FILE)
    assert [event.data for event in events] == [{"message": "a"}]
    log.append("note", {"message": "b"})
    log.close()
    assert [event.data for event in read_events(tmp_path / FILE, start=end)[0]] == [{"message": "b"}]


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"id": 1, "time": 1, "type": "party", "data": {}}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / FILE).write_text(line + "\n")
    with pytest.raises(RunError, match=r"events\.jsonl: not an event"):
        read_events(tmp_path / FILE)


def test_steps_that_were_lost_are_told_again_by_whoever_makes_them_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step in range(4):
        log.tell("step", step, {"metrics": {}, "cost_usd": 1.0 * step})
    log.forget(1, "gone")
    log.close()
    again = EventLog(tmp_path)  # the one that forgot was killed
    assert again.last_step == 1
    again.tell("step", 1, {"metrics": {}, "cost_usd": 9.0})
    again.tell("step", 2, {"metrics": {}, "cost_usd": 4.0})
    again.close()
    assert EventLog(tmp_path).last_step == 2
    summary = SummaryFile(tmp_path / "events.jsonl").read()
    assert [commit.data["cost_usd"] for commit in summary.commits] == [0.0, 1.0, 4.0]
