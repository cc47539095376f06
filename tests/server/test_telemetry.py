"""What a replica tells of a call: spans, bytes, log lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from functions.base.logs import LogLine
from functions.base.wire import Call, Event
from functions.call.meter import Meter, Told

if TYPE_CHECKING:
    from tests.server.conftest import Serve, Served

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def speak(served: Served, operation: str = "speak") -> list[Event]:
    ref = served.exchange.put("in", b"0123456789")
    trace = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    call = Call(f"c-{operation}", operation, {"samples": [ref]}, step=7, trace=trace)
    with served.stream(call) as events:
        return list(events)


def log_lines(served: Served) -> list[dict[str, Any]]:
    return [json.loads(line) for line in served.log.read_text().splitlines()]


def test_spans_are_a_tree_under_the_callers_and_the_bytes_are_those_that_moved(serve: Serve) -> None:
    events = speak(serve("Speaks"))
    assert [event.kind for event in events][-2:] == ["progress", "done"], "told just before the last line"
    told = Told.from_json(events[-2].data["meter"])
    by_name = {span.name: span for span in told.spans}
    assert list(by_name) == ["speak", "start", "read", "work", "publish"]
    parents = {name: next((o.name for o in told.spans if o.id == s.parent), s.parent) for name, s in by_name.items()}
    assert parents == {"speak": CALLER, "start": "speak", "read": "speak", "work": "speak", "publish": "work"}
    assert len({span.id for span in told.spans}) == 5
    whole, work, publish = by_name["speak"], by_name["work"], by_name["publish"]
    assert whole.stop_s is not None
    for span in told.spans:
        assert span.stop_s is not None
        assert 0 <= span.start_s <= span.stop_s <= whole.stop_s
    assert work.start_s <= publish.start_s
    assert (told.bytes_in, told.bytes_out) == (10, 20)


def test_log_lines_say_where_they_come_from(serve: Serve) -> None:
    served = serve("Speaks", "--function", "critic")
    told = Told.from_json(speak(served)[-2].data["meter"])
    speak(served, "fail")
    lines = log_lines(served)
    context = {"job": "job", "function": "critic", "replica": "replica", "step": 7, "trace": TRACE}
    of_call = [line for line in lines if line.get("call") == "c-speak"]
    work = next(span.id for span in told.spans if span.name == "work")
    assert [line["message"] for line in of_call[:-1]] == [
        "speak begins", "half", f"00-{TRACE}-{work}-01", "of a line",
    ]  # fmt: skip
    assert of_call[-1]["message"].startswith("speak ends: done after ")
    for line in of_call:
        assert context.items() <= line.items()
        assert line["level"] == "info"
    [failure] = [line for line in lines if line["level"] == "error"]
    assert failure["call"] == "c-fail"
    assert failure["message"].startswith("ValueError: no more")
    assert failure["exception"].splitlines()[-1] == "ValueError: no more"


@pytest.mark.parametrize("given", ["", "00-zz", f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE}-{'0' * 16}-01", f"{TRACE}"])
def test_a_call_without_a_valid_trace_context_is_part_of_none(given: str) -> None:
    meter = Meter("x", {"traceparent": given} if given else {})
    assert meter.trace_id == ""
    assert meter.traceparent is None
    assert meter.spans[0].parent == ""


def test_what_is_no_json_is_a_message() -> None:
    assert LogLine.parse("Segmentation fault").message == "Segmentation fault"
    assert LogLine.parse('{"a": 1}').message == '{"a": 1}'
    assert LogLine.parse('{"time": "t", "level": "error", "message": "m", "step": 3, "call": "c"}') == LogLine(
        "m", "error", "t", 3, "c"
    )
