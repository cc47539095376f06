"""The call protocol, against real server processes."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from functions.base.wire import Call, Event
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.server.conftest import Serve

COUNT = Call("c1", "count", params={"n": 3})


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def work(log: Path) -> list[int]:
    """The indices that were really worked on."""
    return [int(line.split()[0]) for line in log.read_text().splitlines()]


def test_a_call_streams_its_events_and_a_repeated_one_repeats_them(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    call = Call("c1", "count", params={"n": 3, "log": str(tmp_path / "log")})
    first = served.call(call)
    assert kinds(first) == ["started", "samples", "samples", "samples", "done"]
    assert [served.exchange.get(e.ref) for e in first if e.ref is not None] == [b"value 0", b"value 1", b"value 2"]
    assert first[0].data["calls"] == 0
    again = served.call(call)
    assert again[1:] == first[1:]
    assert again[0].data["calls"] == 1
    assert served.call(Call("c2", "count", params=call.params))[1:] != first[1:]
    assert work(tmp_path / "log") == [0, 1, 2, 0, 1, 2]


def test_another_replica_repeats_the_result_too(serve: Serve) -> None:
    one = serve()
    first = one.call(COUNT)
    one.stop()
    assert serve().call(COUNT)[1:] == first[1:]


def test_a_call_that_was_killed_is_taken_up_where_it_was(serve: Serve, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    call = Call("c1", "count", params={"n": 4, "hold": 2, "until": str(gate), "log": str(tmp_path / "log")})
    one = serve()
    seen: list[Event] = []
    with one.stream(call) as events, suppress(httpx.RemoteProtocolError):
        for event in events:
            seen.append(event)
            if len([e for e in seen if e.kind == "samples"]) == 2:
                one.process.kill()
    assert seen[-1].kind != "done"
    gate.touch()
    two = serve().call(call)
    assert kinds(two) == ["started", "samples", "samples", "samples", "samples", "done"]
    sent = [e for e in seen if e.kind == "samples"]
    assert two[1 : 1 + len(sent)] == sent
    assert [e.data["index"] for e in two[1:-1]] == [[0], [1], [2], [3]]
    assert sorted(set(work(tmp_path / "log"))) == [0, 1, 2, 3]
    assert work(tmp_path / "log").count(0) == work(tmp_path / "log").count(1) == 1


def test_two_attempts_at_one_time_report_one_history(serve: Serve, tmp_path: Path) -> None:
    call = Call("c1", "count", params={"n": 20, "pause_s": 0.02})
    servers = [serve(), serve()]
    answers: list[list[Event]] = [[], []]
    threads = [threading.Thread(target=lambda i=i: answers[i].extend(servers[i].call(call))) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0][1:] == answers[1][1:]
    assert [e.data["index"] for e in answers[0][1:-1]] == [[i] for i in range(20)]
    for i, event in enumerate(answers[0][1:-1]):
        assert event.ref is not None
        assert servers[0].exchange.get(event.ref) == f"value {i}".encode()  # nobody wrote over it


def test_started_and_heartbeats_come_while_the_function_loads_and_works(serve: Serve, tmp_path: Path) -> None:
    loaded, gate = tmp_path / "loaded", tmp_path / "gate"
    served = serve("Count", "--options", json.dumps({"load_until": str(loaded)}))
    with served.stream(Call("c1", "count", params={"n": 1, "hold": 0, "until": str(gate)})) as events:
        assert next(events).kind == "started"
        loading = [next(events), next(events)]
        loaded.touch()
        working = [next(event for event in events if "prior" in event.data), next(events)]  # what the function told
        gate.touch()
        assert kinds([event for event in events if event.kind != "progress"]) == ["samples", "done"]
    beats = [*loading, *working]
    assert {event.kind for event in beats} == {"progress"}
    assert [event.data.get("prior") for event in beats] == [None, None, 0, 0]
    elapsed_s = [event.data["elapsed_s"] for event in beats]
    assert 0 < elapsed_s[0] < elapsed_s[1] < elapsed_s[2] < elapsed_s[3]


def test_cut_by_key_hands_over_the_rest_and_the_repeat_has_the_same(serve: Serve) -> None:
    served = serve()
    call = Call("c1", "count", params={"n": 50, "hold": 2})
    seen: list[Event] = []
    with served.stream(call) as events:
        for event in events:
            if event.kind == "samples":
                served.exchange.put(call.cut_key, b"cut")
            if event.kind != "progress":
                seen.append(event)
    assert kinds(seen)[-2:] == ["cut", "done"]
    indices = [i for e in seen if e.kind in ("samples", "cut") for i in e.data["index"]]
    assert indices == list(range(50))
    assert served.call(call)[1:] == seen[1:]
    fresh = Call("c2", "count", params={"n": 3})
    served.exchange.put(fresh.cut_key, b"cut")
    assert served.call(fresh)[-1].kind == "done"


def test_closing_the_request_cancels_the_call(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    log = tmp_path / "log"
    with served.stream(Call("c1", "count", params={"n": 1000, "hold": 500, "log": str(log)})) as events:
        next(e for e in events if e.kind == "samples")
    for call in ("c2", "c3"):  # they wait for the end of c1
        assert kinds(served.call(Call(call, "count", params={"n": 1})))[-1] == "done"
    assert len(work(log)) <= 501


def test_one_call_at_a_time(serve: Serve) -> None:
    served = serve()
    with served.stream(Call("c1", "count", params={"n": 1, "hold": 0})) as events:
        next(events)
        refused = served.post(Call("c2", "count", params={"n": 1}).to_json())
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["detail"] == "replica replica works on call c1; one call at a time"


def test_errors(serve: Serve) -> None:
    served = serve("Fails")
    for operation, kind, message in [
        ("fatal", "fatal", "the loss is nan at step 3"),
        ("retryable", "retryable", "the device is away"),
        ("odd", "retryable", "ZeroDivisionError: division by zero (*functions_for_tests.py:*)"),
        ("nan", "fatal", "the data of a 'done' event has no JSON form: *"),
        ("no done", "fatal", "Fails ended 'no done' without a `done` event"),
        ("started", "fatal", "a function yields samples, cut and done events, not 'started'"),
    ]:
        events = served.call(Call(f"c-{kind}", operation))
        assert kinds(events) == ["started", "error"]
        assert events[1].data["kind"] == kind
        assert fnmatchcase(events[1].data["message"], message)


def test_a_deadline_ends_a_call_with_a_retryable_error(serve: Serve, tmp_path: Path) -> None:
    served, gate = serve("Fails"), tmp_path / "gate"
    events = served.call(Call("c1", "stubborn", params={"until": str(gate)}, deadline_s=0.3))
    gate.touch()
    assert events[-1].kind == "error"
    assert events[-1].data["kind"] == "retryable"
    assert events[-1].data["message"] == "call c1 went beyond its deadline of 0.3 s"
    assert kinds(served.call(Call("c2", "fatal"))) == ["started", "error"]  # it waits for the stubborn one


def test_a_call_that_goes_on_long_after_its_deadline_ends_the_process(serve: Serve) -> None:
    served = serve("Fails", stuck_s=0.3)
    events = served.call(Call("c1", "stubborn", params={"until": "never"}, deadline_s=0.2))
    assert events[-1].data["kind"] == "retryable"
    assert served.process.wait(100) == 70
    last = json.loads(served.log.read_text().splitlines()[-1])
    assert (last["level"], last["message"]) == ("error", "call c1 goes on 0.3 s after it was cancelled: exit")


def test_a_stale_orchestrator_is_refused(serve: Serve) -> None:
    served = serve()
    assert served.call(Call("c1", "count", params={"n": 1}, epoch=4))[-1].kind == "done"
    stale = served.call(Call("c2", "count", params={"n": 1}, epoch=3))
    assert kinds(stale) == ["error"]
    assert stale[0].data["kind"] == "fatal"
    assert stale[0].data["message"] == "stale orchestrator: its lease has epoch 3, epoch 4 has been seen here"
    assert served.call(Call("c3", "count", params={"n": 1}, epoch=5))[-1].kind == "done"


def test_malformed_calls(serve: Serve) -> None:
    served = serve()
    for body, detail in [
        (b"{", "Expecting property name"),
        (b"\xff\xfe", "Expecting value"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "not a Call: Input should be"),
        ({"operation": "count"}, "not a Call: id: Field required"),
        ({"id": "c", "operation": "count", "prams": {}}, "not a Call: prams: Unexpected keyword"),
        ({"id": "../../c", "operation": "count"}, "not an exchange key"),
        ({"id": "c", "operation": "count", "deadline_s": 0}, "deadline_s is 0.0"),
        (
            {"id": "c", "operation": "count", "inputs": {"samples": [{"key": "k"}]}},
            "inputs: samples: 0: size_bytes: Field required",
        ),
        ({"id": "c", "operation": "count", "epoch": "new"}, "epoch: Input should be a valid integer"),
    ]:
        answer = served.post(body)
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        assert detail in answer.json()["detail"]
        assert "\n" not in answer.json()["detail"]


def test_only_calls_with_the_token_are_answered(serve: Serve) -> None:
    served = serve("Count", RLHF_TOKEN="secret")
    body = COUNT.to_json()
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        assert served.post(body, **headers).status_code == 401
    with served.stream(COUNT, authorization="Bearer secret") as events:
        assert kinds(list(events))[-1] == "done"
    assert served.client.get("/healthz/live").status_code == 200


# --- drain -----------------------------------------------------------------------------------------------------------


def test_sigterm_lets_the_open_call_finish_takes_no_other_and_exits(serve: Serve, tmp_path: Path) -> None:
    served, gate = serve("Count", "--grace-s", "1000"), tmp_path / "gate"
    seen: list[Event] = []
    with served.stream(Call("c1", "count", params={"n": 4, "hold": 1, "until": str(gate)})) as events:
        for event in events:
            if not seen:
                served.process.terminate()
                until(lambda: served.client.get("/healthz/ready").status_code == 503)
                assert served.post(Call("c2", "count", params={"n": 1}).to_json()).status_code == 503
                gate.touch()
            seen.append(event)
    assert [e.data["index"] for e in seen if e.kind == "samples"] == [[0], [1], [2], [3]]
    assert seen[-1].kind == "done"
    assert served.process.wait(100) == 0


def test_a_call_too_long_for_the_grace_is_cut(serve: Serve) -> None:
    served = serve("Count", "--grace-s", "0.6")
    seen: list[Event] = []
    with served.stream(Call("c1", "count", params={"n": 100, "hold": 3})) as events:
        for event in events:
            if not seen:
                served.process.terminate()
            seen.append(event)
    assert kinds(seen)[-2:] == ["cut", "done"]
    assert [i for e in seen if e.kind in ("samples", "cut") for i in e.data["index"]] == list(range(100))
    assert served.process.wait(100) == 0


def test_a_replica_that_is_broken_says_so_and_ends(serve: Serve) -> None:
    served = serve("Fails")
    error = served.call(Call("c1", "broken"))[-1]
    assert error.data == {"kind": "retryable", "message": "half of the weights are new"}
    assert served.process.wait(100) == 0


def test_sigterm_ends_an_idle_server(serve: Serve) -> None:
    served = serve()
    served.process.terminate()
    assert served.process.wait(100) == 0
