"""`rlhf-orchestrate` with a planner that cuts every step as soon as one sample is finished, and moves what is left to
one replica of generate-tail, or (`streaming`) that streams training: its words are `run RUN-DIR job.toml
key.path=value ...` or `resume RUN-DIR`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.job.config import load_job
from orchestrator.planner.base import GENERATE, TAIL, StepPlan, StepRequest
from orchestrator.planner.static import StaticPlanner
from orchestrator.run.directory import RunDirectory
from orchestrator.session.session import Run, prepare, train
from orchestrator.session.view import View


class CutsAtOnce(StaticPlanner):
    """The tail's replica is started with the step."""

    cuts = True

    def plan(self, request: StepRequest) -> StepPlan:
        plan = super().plan(request)
        left = len(request.prompts) * request.samples_per_prompt - 1
        if left < 0:  # a step that only validates
            return plan
        return replace(
            plan, cut_below=left if self.cuts else 0, migrate_to=1, tail=TAIL, chunk=1, prewarm_s={TAIL: 0.0}
        )


class NeverCuts(CutsAtOnce):
    """Expects a tail that does not come, and has generate stay for the next step."""

    cuts = False

    def plan(self, request: StepRequest) -> StepPlan:
        return replace(super().plan(request), prewarm_next_s={GENERATE: 0.0})


class Streams(StaticPlanner):
    """Training begins with the first group, whatever was predicted."""

    def plan(self, request: StepRequest) -> StepPlan:
        streams = dict.fromkeys(request.streamed, 0.0)
        return replace(super().plan(request), stream_s=streams, chunk=1)


def streaming(words: Sequence[str]) -> int:
    return main(words, Streams)


def main(words: Sequence[str], planner: Callable[[], StaticPlanner] = CutsAtOnce) -> int:
    command, path, *more = words
    if command == "run":
        job = load_job(Path(more[0]), more[1:])
        directory = RunDirectory.create(Path(path), job)
    else:
        directory = RunDirectory.open(Path(path))
        job = directory.job
    prepared = prepare(job)
    train(Run(prepared, directory, planner()), View())
    return 0
