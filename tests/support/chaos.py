"""Chaos (scripts/chaos): what is planned for a job, how it is carried out, what is counted."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import environment_job
from tests.support.chaos_execution import LIMITS, WHO, Ended, Execution, marked, shared_memory, signalled
from tests.support.chaos_stores import STORES, Stores
from tests.support.tiny_job import ENV, Job, history, make_job, metrics, model

VARIANTS: Mapping[str, Sequence[str]] = {
    "fp32": [],
    "bf16": ["model.dtype=bfloat16"],
    "lora": ["model.lora_rank=4"],
    "ppo": ["recipe=ppo"],
    "kl": ["algorithm.kl.coef=0.01", "train.epochs=2"],
    "adaptive": ["planner.policy=adaptive", "planner.objective=speed"],
    "fresh": ["platform.warm_parent=false"],
    "zero": ["platform.parked_gb=0"],
    "held": ["checkpoints.state_every=3"],
    "streamed": ["deterministic=false", "planner.policy=adaptive", "planner.objective=speed",
                 "functions.generate.replicas=1"],
    "gang": ["deterministic=false", "functions.train.replicas=2"],
    "tools": [*environment_job.SETTINGS, "functions.environment.replicas=2"],
}  # fmt: skip
STEPS = 6
SETTINGS = (f"steps={STEPS}", "limits.attempts=30")
HANGS_S = 300.0
"""An execution that is left alone ends before this; many times what it takes alone."""
REFUSED_S = 120.0
MARK = "RLHF_CHAOS"


@dataclass(frozen=True)
class Planned:
    """One execution: what is done before it, what it lacks, and what happens to it (when, as a part of its length)."""

    before: str | None
    limit: str | None
    disturbed: tuple[tuple[float, str, float], ...]
    pick: float


def plan(dice: random.Random, store: str) -> list[Planned]:
    """Every choice is drawn here, so that it does not depend on what happens."""
    befores = ["truncate", "flip", "delete", "two", *(["flush"] if store == "redis" else [])]
    kinds = ["function"] * 8 + ["keeper"] * 2 + ["parent", "stop"]
    kinds += {"s3": ["away"], "tiered": ["away", "flush", "restart"]}.get(store, [])
    executions = []
    for _ in range(dice.randint(2, 4)):
        happens = [(dice.random(), dice.choice(kinds), dice.random()) for _ in range(dice.randint(4, 24))]
        happens.append((0.3 + dice.random(), "orchestrator", dice.random()))
        executions.append(
            Planned(
                before=dice.choice(befores) if dice.random() < 0.4 else None,
                limit=dice.choice(list(LIMITS)) if dice.random() < 0.1 else None,
                disturbed=tuple(sorted(happens)),
                pick=dice.random(),
            )
        )
    return executions


@dataclass
class Counts:
    jobs: int = 0
    executions: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """What should not be: different, traceback, hang, refusal, processes, files, shared_memory, directories."""

    def add(self, other: Counts) -> None:
        self.jobs += other.jobs
        self.executions += other.executions
        for mine, its in zip(
            (self.kills, self.faults, self.wrong), (other.kills, other.faults, other.wrong), strict=True
        ):
            mine.update(its)


class Attempt:
    """One job and its end."""

    def __init__(self, chaos: Chaos, name: str, variant: str, store: str) -> None:
        self.chaos, self.name, self.variant, self.store = chaos, name, variant, store
        self.run, self.counts = chaos.folder / "runs" / name, Counts(jobs=1)
        url = chaos.stores.url(store)
        self.overrides = [*VARIANTS[variant], *SETTINGS, f"name={name}"]
        self.overrides += [f"exchange.url={url}"] if url else []

    @property
    def words(self) -> list[object]:
        if (self.run / "run.json").exists():
            return ["resume", self.run]
        return ["run", self.chaos.job.file, "--run-dir", self.run, *self.overrides]

    def carry_out(self, planned: Sequence[Planned], length_s: float) -> None:
        for one in planned:
            if (self.run / "run.json").exists() and one.before is not None:
                self.before(one.before, one.pick)
            self.disturbed(one, length_s)
            if (self.run / "model").exists():
                break
        ended = self.execute().end(HANGS_S)
        self.judge(ended, "its last execution", good=ended.code == 0)
        if ended.code == 0:
            self.compare()

    def execute(self, limit: tuple[str, float] | None = None) -> Execution:
        self.counts.executions += 1
        log = self.chaos.folder / f"{self.name}-{self.counts.executions}.log"
        return Execution(self.words, log, self.chaos.env, limit)

    def disturbed(self, one: Planned, length_s: float) -> None:
        execution = self.execute((one.limit, one.pick) if one.limit else None)
        if one.limit:
            self.counts.faults[one.limit] += 1
        for part, kind, pick in one.disturbed:
            if not execution.sleep_until(part * length_s):
                break
            if kind not in WHO:
                self.counts.faults[kind] += 1
            self.happens(execution, kind, pick)
        ended = execution.end(HANGS_S)
        self.counts.kills.update(execution.kills)
        self.judge(ended, f"{one}")

    def happens(self, execution: Execution, kind: str, pick: float) -> None:
        stores = self.chaos.stores
        if kind == "away":
            with stores.away():
                time.sleep(4 * pick)
        elif kind in ("flush", "restart"):
            stores.flush() if kind == "flush" else stores.restart()
        else:
            execution.disturb(kind, pick)

    def before(self, how: str, pick: float) -> None:
        """What has to be refused in one line, and then is as it was."""
        if how == "two":
            self.counts.faults[how] += 1
            both = [execution.end(HANGS_S) for execution in [self.execute() for _ in range(2)]]
            losers = [end for end in both if end.code != 0 and "another orchestrator" in end.output]
            winners = [end for end in both if end.code == 0]  # two, where one had ended before the other began
            for end in both:
                self.judge(end, "two resumes at once", good=end in losers or end in winners)
            self.judge(both[0], "two resumes at once", good=len(winners) >= 1)
            return
        records, told = len(list((self.run / "journal").glob("*.json"))), self.told()
        if how in ("delete", "flush") and (told < 1 or told < records - 1):
            return  # killed between a commit and its telling: the run knows of no loss, and makes the step again
        with self.chaos.stores.spoilt(self.store, self.run, self.name, how, pick) as anything:
            if anything:
                self.counts.faults[how] += 1
                ended = self.execute().end(REFUSED_S)
                said = [line for line in ended.output.splitlines() if line and not line.startswith("{")]  # no log line
                self.judge(ended, f"{how} at {pick}", good=ended.code not in (0, None) and len(said) == 1)

    def told(self) -> int:
        """The last step that the run's events tell as committed; -1 for none."""
        with contextlib.suppress(FileNotFoundError), (self.run / "events.jsonl").open() as lines:
            events = [json.loads(line) for line in lines if line.endswith("}\n")]
            return max((event["data"]["step"] for event in events if event["type"] == "step"), default=-1)
        return -1

    def judge(self, ended: Ended, what: str, *, good: bool = True) -> None:
        found = []
        if ended.code is None:
            found.append("hang")
        elif not good:
            found.append("refusal")
        if "Traceback" in ended.output:
            found.append("traceback")
        for kind in found:
            self.wrong(kind, f"{what}: {ended.code}: {ended.output[-2000:]}")

    def compare(self) -> None:
        undisturbed = self.chaos.undisturbed(self.variant)[0]
        if "deterministic=false" in VARIANTS[self.variant]:
            if [record["step"] for record in history(self.run)] != list(range(STEPS + 1)) or not model(self.run):
                self.wrong("different", "a step is missing, twice, or without a model")
            return
        for what in (history, metrics, model):
            if what(self.run) != what(undisturbed):
                self.wrong("different", what.__name__)

    def wrong(self, kind: str, what: str) -> None:
        self.counts.wrong[kind] += 1
        print(f"  {kind.upper()} {self.name} {self.variant} {self.store}: {what}", flush=True)


class Chaos:
    """The servers, the job and the undisturbed runs, all in one folder."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        self.stores = Stores(folder)
        self.mark = f"{MARK}={folder}"
        self.env = {**env, **self.stores.moto.environment, "TMPDIR": str(folder / "tmp"), MARK: str(folder)}
        self.job: Job = make_job(folder / "job")
        environment_job.add_environment(self.job)
        self._undisturbed: dict[str, tuple[Path, float]] = {}
        self.kept = set[str]()
        """Run directories of jobs that went wrong."""

    def undisturbed(self, variant: str) -> tuple[Path, float]:
        """The variant's run directory and how long it took, s. Raises where it does not end well."""
        if variant not in self._undisturbed:
            run = self.folder / "undisturbed" / variant
            words = ["run", self.job.file, "--run-dir", run, *VARIANTS[variant], *SETTINGS, "name=undisturbed"]
            execution = Execution(words, self.folder / f"{variant}.log", self.env)
            ended = execution.end(HANGS_S)
            if ended.code != 0:
                raise RuntimeError(f"{variant} does not end well undisturbed: {ended.output}")
            self._undisturbed[variant] = run, time.monotonic() - execution.begun_s
        return self._undisturbed[variant]

    def attempt(self, name: str, variant: str, store: str, dice: random.Random) -> Counts:
        """One job, from its start to what it left."""
        length_s = self.undisturbed(variant)[1]
        before = shared_memory() | set(os.listdir(self.folder / "tmp"))  # torch keeps an empty cache directory there
        attempt = Attempt(self, name, variant, store)
        attempt.carry_out(plan(dice, store), length_s)
        self.leftovers(attempt, before)
        if attempt.counts.wrong:
            self.kept.add(name)
        else:
            shutil.rmtree(attempt.run, ignore_errors=True)
        return attempt.counts

    def leftovers(self, attempt: Attempt, before: set[str]) -> None:
        until_s = time.monotonic() + 60
        while marked(self.mark) and time.monotonic() < until_s:
            time.sleep(0.1)
        left: dict[str, list[Any]] = {
            "processes": marked(self.mark),
            "files": sorted(set(os.listdir(self.folder / "tmp")) - before),
            "shared_memory": sorted(shared_memory() - before),
            "directories": sorted(
                {path.name for path in (self.folder / "runs").iterdir()} - self.kept - {attempt.name}
            ),
        }
        for kind, things in left.items():
            if things:
                attempt.wrong(kind, str(things))


@contextlib.contextmanager
def started() -> Iterator[Chaos]:
    """In a folder that goes unless something in it went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    chaos = Chaos(folder, ENV)
    try:
        chaos.stores.start()
        yield chaos
    finally:
        for pid in marked(chaos.mark):  # of a run that is cut off
            signalled(pid, signal.SIGKILL)
        chaos.stores.stop()


def table(counts: Mapping[tuple[str, str], Counts]) -> str:
    lines = ["| variant | store | jobs | executions | kills | other faults | wrong |", "|---|---|---|---|---|---|---|"]
    for (variant, store), found in sorted(counts.items()):
        kills, faults, wrong = (sum(c.values()) for c in (found.kills, found.faults, found.wrong))
        lines.append(f"| {variant} | {store} | {found.jobs} | {found.executions} | {kills} | {faults} | {wrong} |")
    return "\n".join(lines)


def main(doc: str) -> int:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="NAMES")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    if unknown := set(names) - {*VARIANTS, *STORES}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: none of {', '.join([*VARIANTS, *STORES])}")
    variants, stores = ([n for n in all_ if n in names] or list(all_) for all_ in (VARIANTS, STORES))
    pairs = [(variant, store) for variant in variants for store in stores]
    random.Random(given.seed).shuffle(pairs)
    counts: dict[tuple[str, str], Counts] = {}
    end_s = time.monotonic() + 60 * given.minutes
    with started() as chaos:
        (chaos.folder / "runs").mkdir()
        with contextlib.suppress(KeyboardInterrupt):  # what was done until then is told
            for number in itertools.takewhile(lambda _: time.monotonic() < end_s, itertools.count()):
                pair = pairs[number % len(pairs)]
                found = chaos.attempt(f"chaos-{number}", *pair, random.Random(f"{given.seed}/{number}"))
                counts.setdefault(pair, Counts()).add(found)
                said = {"kills": dict(found.kills), "faults": dict(found.faults), "wrong": dict(found.wrong)}
                print(f"{number} {' '.join(pair)}: {found.executions} executions, {json.dumps(said)}", flush=True)
    total = Counts()
    for found in counts.values():
        total.add(found)
    print(table(counts))
    if total.wrong:
        print(f"kept: {chaos.folder}")
    else:
        shutil.rmtree(chaos.folder)
    print(json.dumps({"seed": given.seed, "cores": os.cpu_count(), "jobs": total.jobs, "pairs": len(counts),
                      "executions": total.executions, "kills": sum(total.kills.values()), "by": dict(total.kills),
                      "faults": dict(total.faults), "wrong": dict(total.wrong)}))  # fmt: skip
    return 1 if total.wrong else 0
