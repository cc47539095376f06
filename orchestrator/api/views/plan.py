"""The plan of a step, beside what the step came to."""

from __future__ import annotations

from collections.abc import Sequence

from functions.base.wire import Json
from orchestrator.run.ledger import Books


def plan_of(lines: Sequence[Json], books: Books | None, step: int | None) -> Json:
    """The Plan of models.py: of `step` (None: of the last that was planned), from the lines of plans.jsonl."""
    found = next((line for line in reversed(lines) if step is None or line["step"] == step), None)
    if found is None:
        return {"step": None, "time": None, "plan": None, "actual": {}}
    plan = {key: value for key, value in found.items() if key not in ("step", "time")}
    done = None if books is None else next((s for s in reversed(books.steps) if s.step == found["step"]), None)
    actual = {} if done is None else {"step_s": done.wall_s, "cost_usd": done.usd}
    return {"step": found["step"], "time": found["time"], "plan": plan, "actual": actual}
