"""Many followers of one run that is at work: each gets every event after its own last one, once, in order."""

from __future__ import annotations

import threading
from pathlib import Path

from orchestrator.job.config import parse_job
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import EventLog
from tests.api.conftest import JOB, Served, parse_stream, serving, wait_for


def test_followers_join_break_off_and_take_up(tmp_path: Path, root: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs" / "live", parse_job(JOB | {"name": "live"}, base=root))
    received: dict[int, list[int]] = {}

    def follow(server: Served, number: int, after: int) -> None:
        with server.client() as api:
            answer = api.get("/v1/jobs/live/events", headers={"Last-Event-ID": str(after)}, timeout=200)
            received[number] = [event["id"] for event in parse_stream(answer.text)]

    with serving(tmp_path / "runs", root) as server, server.client() as api:
        with directory.lock():
            log = EventLog(directory.path)
            for i in range(5):
                log.append("note", {"message": str(i)})
            assert api.get("/v1/jobs/live").json()["state"] == "running", "its lock is held"
            followers = [threading.Thread(target=follow, args=(server, n, n % 7)) for n in range(12)]
            for i, follower in enumerate(followers):
                follower.start()
                log.append("note", {"message": f"while follower {i} comes"})
            with api.stream("GET", "/v1/jobs/live/events") as stream:
                next(stream.iter_text())  # and goes: the others stay
            for i in range(20):
                log.append("note", {"message": f"later {i}"})
            log.append("cancelled", {"message": "stopped"})
            log.close()
        # The lock is free: the run is at rest, and what followed has ended.
        wait_for(lambda: len(received) == 12, what="every stream has ended")
        for follower in followers:
            follower.join()
    assert received == {n: list(range(n % 7 + 1, 5 + 12 + 20 + 1 + 1)) for n in range(12)}
