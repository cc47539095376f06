"""The plan of a step, beside what the step came to."""

from collections.abc import Mapping, Sequence
from typing import Any

from functions.base.wire import Json

ACTUAL = {"step_s": "planner/step_s", "cost_usd": "planner/cost_usd"}
"""What was planned is the step without its validation: so are the metrics."""


def plan_of(lines: Sequence[Json], rows: Sequence[Mapping[str, Any]], step: int | None) -> Json:
    """The Plan of models.py: of `step` (None: of the last that was planned), from the lines of plans.jsonl and of
    metrics.jsonl."""
    found = next((line for line in reversed(lines) if step is None or line["step"] == step), None)
    if found is None:
        return {"step": None, "time": None, "plan": None, "actual": {}}
    plan = {key: value for key, value in found.items() if key not in ("step", "time")}
    done: Mapping[str, Any] = next((row for row in reversed(rows) if row["step"] == found["step"]), {})
    actual = {key: done[name] for key, name in ACTUAL.items() if name in done}
    return {"step": found["step"], "time": found["time"], "plan": plan, "actual": actual}
