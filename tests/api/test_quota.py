"""What a token's jobs may have: those beyond it wait, are refused or are stopped, and nobody else's are."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from orchestrator.api.auth import parse_tokens
from orchestrator.api.jobs import Job, Jobs
from orchestrator.api.problems import ApiError
from orchestrator.api.quota import UNLIMITED, Quota, spent_usd
from orchestrator.api.summary import Summary
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import RunEvent, tell_end
from tests.api.conftest import JOB


class Orchestrators:
    """A launcher whose orchestrators do nothing until they are told to stop."""

    def __init__(self) -> None:
        self.runs = Path()
        self.at_work: list[str] = []

    def start(self, job: str, launch: int) -> None:
        self.at_work.append(job)

    def stop(self, job: str) -> None:
        self.at_work.remove(job)
        tell_end(RunDirectory(self.runs / job), "cancelled", "stopped")

    def alive(self, jobs: Iterable[str]) -> frozenset[str]:
        return frozenset(self.at_work) & frozenset(jobs)

    def keep(self) -> None:
        pass


QUOTAS = {"two": Quota(jobs=2), "gpus": Quota(gpus=4), "poor": Quota(usd_per_day=10.0)}


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    launcher = Orchestrators()
    jobs = Jobs(tmp_path / "runs", launcher, max_running=5, quota=lambda name: QUOTAS.get(name, UNLIMITED))
    launcher.runs = jobs.runs
    return jobs


def job(gpus: int = 0, replicas: int = 1) -> JobConfig:
    return parse_job(JOB | {"functions": {"generate": {"gpus": gpus, "replicas": replicas}}}, base=Path("/"))


def submitted(jobs: Jobs, owner: str, config: JobConfig | None = None) -> str:
    return jobs.submit(config or job(), key=None, body=b"", owner=owner)[0].id


def told(jobs: Jobs, id: str) -> tuple[str, str]:
    found: Job = jobs.get(id)
    return found.state, found.desired.why


def test_more_jobs_than_a_token_may_run_wait_and_nobody_elses_do(jobs: Jobs) -> None:
    own = [submitted(jobs, "two") for _ in range(4)]
    other = submitted(jobs, "other")
    jobs.tick()
    assert [told(jobs, id) for id in (*own, other)] == [
        ("running", ""), ("running", ""), *[("queued", "two: 2 of 2 jobs run")] * 2, ("running", ""),
    ]  # fmt: skip
    jobs.cancel(own[0])
    jobs.tick()
    assert [told(jobs, id)[0] for id in own] == ["cancelled", "running", "running", "queued"]
    assert jobs.get(own[2]).desired.owner == "two"


def test_gpus_are_those_that_its_jobs_could_hold_together(jobs: Jobs) -> None:
    with pytest.raises(ApiError, match=r"may hold 6 GPUs at a time .*, its token 4"):
        submitted(jobs, "gpus", job(gpus=2, replicas=3))
    assert not jobs.all()
    large, small, none = (submitted(jobs, "gpus", job(gpus, replicas)) for gpus, replicas in ((1, 3), (2, 1), (0, 9)))
    jobs.tick()
    assert told(jobs, large) == told(jobs, none) == ("running", "")
    assert told(jobs, small) == ("queued", "gpus: 3 of 4 GPUs are taken, and it may hold 2")
    jobs.cancel(large)
    jobs.tick()
    assert told(jobs, small) == ("running", "")


def spends(jobs: Jobs, id: str, *steps: tuple[float, float]) -> None:
    """Steps committed so many hours ago, when the job had cost so much in all."""
    events = [RunEvent(1, time.time() - 3600 * 99, "started", {"execution": 1, "step": -1, "steps": 3})]
    for number, (hours, usd) in enumerate(steps):
        data = {"step": number, "metrics": {}, "cost_usd": usd, "versions": {}}
        events.append(RunEvent(number + 2, time.time() - 3600 * hours, "step", data))
    (jobs.directory(id) / "events.jsonl").write_bytes(b"".join(event.encode() for event in events))


def test_who_has_spent_a_days_dollars_is_stopped_and_starts_nothing(jobs: Jobs) -> None:
    first, second = submitted(jobs, "poor"), submitted(jobs, "poor")
    jobs.tick()
    spends(jobs, first, (30, 80.0), (25, 88.0), (3, 95.0))
    jobs.tick()
    assert told(jobs, first) == told(jobs, second) == ("running", ""), "7 dollars within 24 hours"
    spends(jobs, second, (1, 4.0))
    jobs.tick()
    jobs.tick()
    why = "poor: $11.00 of $10.00 were spent within 24 hours"
    assert told(jobs, first) == told(jobs, second) == ("cancelled", why)
    jobs.resume(second)
    jobs.tick()
    assert told(jobs, second) == ("queued", why)
    with pytest.raises(ApiError, match=r"has spent \$7.00 within 24 hours, which count until they are over"):
        jobs.delete(first)
    spends(jobs, first, (30, 80.0), (25, 95.0))
    jobs.tick()
    assert told(jobs, second) == ("running", "")
    jobs.delete(first)


def test_a_days_dollars_are_those_after_the_last_step_before_it() -> None:
    summary = Summary()
    for number, (hours, usd) in enumerate([(50.0, 3.0), (24.5, 5.0), (23.5, 9.0)]):
        summary.add(RunEvent(number + 1, -3600 * hours, "step", {"step": number, "metrics": {}, "cost_usd": usd}))
    assert spent_usd(summary, None, 0.0) == 4.0
    assert spent_usd(summary, 12.0, 0.0) == 7.0, "the books are ahead of the last step"
    assert spent_usd(Summary(), None, 0.0) == 0.0


def test_quotas_of_a_file_of_tokens() -> None:
    secret = "0123456789abcdef"
    tokens = parse_tokens(f"a write {secret} jobs=2 usd_per_day=0.5  # c\nb read {secret}\n", "tokens")
    assert [token.quota for token in tokens] == [Quota(jobs=2, usd_per_day=0.5), UNLIMITED]
    for wrong in ("jobs", "jobs=", "jobs=0", "jobs=1.5", "gpus=-1", "usd_per_day=inf", "usd_per_day=nan", "cpus=3"):
        with pytest.raises(ConfigError) as error:
            parse_tokens(f"\na write {secret} {wrong}", "tokens")
        want = "wants jobs=, gpus= or usd_per_day= and a number above 0"
        assert str(error.value) == f"tokens:2: a: got {wrong!r}, {want}"
