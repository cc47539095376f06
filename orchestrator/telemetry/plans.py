"""`plans.jsonl`: what the planner decided before each step, one line a plan.

A step that is begun again has a line for each time; the last one counts.
"""

import json
import time
from pathlib import Path

from functions.base.wire import Json
from orchestrator.base.files import Lines, writing
from orchestrator.planner.base import StepPlan

FILE = "plans.jsonl"


class Plans:
    """Appends to `directory`/plans.jsonl, each line in one write."""

    def __init__(self, directory: Path) -> None:
        path = directory / FILE
        with writing(path):
            whole = path.read_bytes() if path.exists() else b""
        self._lines = Lines(path, whole.rfind(b"\n") + 1)

    def write(self, step: int, plan: StepPlan) -> None:
        """Raises RunError where it cannot be written."""
        line = {"step": step, "time": round(time.time(), 3), **plan_json(plan)}
        self._lines.append(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._lines.close()


def plan_json(plan: StepPlan) -> Json:
    """The plan as a line has it: shards as their sizes, without the predicted lengths."""
    return {
        "replicas": dict(plan.replicas),
        "keep": sorted(plan.keep),
        "micro_batch": plan.micro_batch,
        "cut_below": plan.cut_below,
        "migrate_to": plan.migrate_to,
        "tail": plan.tail,
        "overlap": plan.overlap,
        "shards": [len(shard) for shard in plan.shards],
        "predicted_step_s": plan.predicted_step_s,
        "predicted_cost_usd": plan.predicted_cost_usd,
        "stages": [[stage.function, stage.start_s, stage.stop_s] for stage in plan.stages],
        "curve": [[point.replicas, point.time_s, point.cost_usd, point.gpu_s] for point in plan.curve],
        "chosen": plan.chosen,
    }
