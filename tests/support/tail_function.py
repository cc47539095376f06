"""`rlhf-orchestrate` with a planner that cuts every step as soon as one sample is finished, and moves what is left to
one replica of generate-tail:   python -m tests.support.tail_function run job.toml ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.commands import main as cli
from orchestrator.job.config import JobConfig
from orchestrator.planner.base import TAIL, Planner, StepPlan, StepRequest
from orchestrator.planner.static import StaticPlanner
from orchestrator.platforms.base import FunctionSpec
from orchestrator.session import session


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
    """Expects a tail that does not come."""

    cuts = False


def planner(_job: JobConfig, _specs: Sequence[FunctionSpec]) -> Planner:
    return CutsAtOnce()


if __name__ == "__main__":
    vars(session)["job_planner"] = planner
    sys.exit(cli.main())
