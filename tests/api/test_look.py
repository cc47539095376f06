"""What a page looks at: traces as they grow, replicas by hand-made cases, columns, pages, samples."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functions.base.wire import Version
from orchestrator.api.desired import Desired
from orchestrator.api.jobs import Job
from orchestrator.api.summary import Summary
from orchestrator.api.view_routes import checkpoints_of
from orchestrator.api.views.costs import cost_columns
from orchestrator.api.views.log import event_page, last_lines
from orchestrator.api.views.plan import plan_of
from orchestrator.api.views.tail import Tails
from orchestrator.api.views.texts import Filter, chosen, groups_of, kept_steps, same_prompt, tools_of
from orchestrator.api.views.thin import Names, columns, parts, thinned
from orchestrator.api.views.timeline import Timelines
from orchestrator.api.views.trace import Lane, TraceFile, place
from orchestrator.job.config import parse_job
from orchestrator.planner.base import CurvePoint, StepPlan
from orchestrator.platforms.base import Replica, Usage
from orchestrator.run.events import RunEvent
from orchestrator.run.ledger import Books, Cost, StepCost, together
from orchestrator.telemetry.now import Now
from orchestrator.telemetry.plans import Plans
from orchestrator.telemetry.trace import JOB, Trace, TraceSpan

CONFIG = {"name": "a", "steps": 3, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
NO_BOOKS = Books([], together([]), StepCost(1), 1)


def window(path: Path, **given: Any) -> dict[str, Any]:
    asked = {"from_s": None, "to_s": None, "bins": 10, "most": 100, "alive": False}
    found: dict[str, Any] = Timelines().window(path, lambda _name: 2, **(asked | given))
    return found


def function(timeline: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(f for f in timeline["functions"] if f["name"] == name)
    return found


def written(path: Path) -> Trace:
    """One step of ten seconds: a replica that starts until 2, works from 3 to 6, is asked to go at 8, is gone at 9."""
    trace = Trace(path / "trace.json", now_s=100.0, unix_s=5000.0)
    usage = [Usage("generate", "generate-0", 101.0, 109.0, 3.0, 102.0, 108.0)]
    spans = [
        TraceSpan(JOB, "step", "step 0", 100.0, 110.0),
        TraceSpan("generate", "generate-0", "generate", 103.0, 106.0),
    ]
    trace.write(spans, usage, 110.0)
    return trace


def test_a_replica_in_its_lane(tmp_path: Path) -> None:
    written(tmp_path)
    timeline = window(tmp_path)
    assert (timeline["lanes"], timeline["end_s"], timeline["begun_at"]) == (True, 10.0, 5000.0)
    assert timeline["steps"] == [[0, 0.0, 10.0]]
    assert function(timeline, "generate")["lives"] == [[0, 1.0, 2.0, 8.0, 9.0, "generate-0"]]
    assert function(timeline, "generate")["calls"] == [[0, 3.0, 6.0, "generate"]]
    assert [f["name"] for f in timeline["functions"]] == ["generate", "reward", "train"]
    assert function(window(tmp_path, from_s=9.5, to_s=10.0), "generate")["lives"] == []


def test_counts_are_means_over_bins(tmp_path: Path) -> None:
    written(tmp_path)
    counts = function(window(tmp_path, most=0, bins=5), "generate")["counts"]  # bins of two seconds
    assert counts == {
        "busy": [0.0, 0.5, 1.0, 0.0, 0.0],
        "idle": [0.0, 0.5, 0.0, 1.0, 0.0],
        "starting": [0.5, 0.0, 0.0, 0.0, 0.0],
        "draining": [0.0, 0.0, 0.0, 0.0, 0.5],
    }


def test_a_call_that_outlasts_the_order_to_go_is_draining_from_there(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", now_s=0.0, unix_s=5000.0)
    life = Usage("train", "train-0", 0.0, 10.0, 10.0, 0.0, 6.0)
    steps = [TraceSpan(JOB, "step", "step 0", 0.0, 10.0), TraceSpan("train", "train-0", "train", 0.0, 10.0)]
    trace.write(steps, [life], 10.0)
    assert function(window(tmp_path), "train")["calls"] == [[0, 0.0, 6.0, "train"]]
    counts = function(window(tmp_path, most=0, bins=1), "train")["counts"]
    assert counts == {"busy": [0.6], "idle": [0.0], "starting": [0.0], "draining": [0.4]}


def test_what_the_trace_does_not_have_yet_comes_from_now(tmp_path: Path) -> None:
    trace = written(tmp_path)
    now = Now(tmp_path, trace.job_s)
    now.look([Replica("generate", "generate-1", "starting", 111.0)], 111.2)
    now.look([Replica("generate", "generate-1", "busy", 112.0)], 112.1)
    now.look([Replica("generate", "generate-1", "idle", 113.5), Replica("reward", "reward-0", "busy", 113.0)], 114.0)
    now.look([Replica("generate", "generate-1", "idle", 113.5)], 115.0)
    now.write(1, NO_BOOKS, 115.0)
    timeline = window(tmp_path, alive=True)
    assert timeline["end_s"] == 15.0
    assert function(timeline, "generate")["lives"][1:] == [[0, 11.0, 12.0, 15.0, 15.0, "generate-1"]]
    assert function(timeline, "generate")["calls"][1:] == [[0, 12.0, 13.5, ""]]
    assert function(timeline, "reward")["lives"] == [[0, 13.0, 13.0, 15.0, 15.0, "reward-0"]], "it is gone since"
    now.committed()
    now.look([Replica("generate", "generate-1", "idle", 113.5)], 120.0)
    now.write(1, NO_BOOKS, 120.0)
    timeline = window(tmp_path, alive=True)
    assert function(timeline, "generate")["lives"][1:] == [[0, 11.0, 11.0, 20.0, 20.0, "generate-1"]]
    assert function(timeline, "reward")["lives"] == [], "what had ended by the commit is in the trace"


def test_a_killed_orchestrators_replicas_lived_as_long_as_they_worked(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", now_s=0.0, unix_s=5000.0)
    trace.write(
        [TraceSpan("train", "train-0", "train", 1.0, 2.0), TraceSpan("train", "train-0", "train", 4.0, 5.0)], [], 6.0
    )
    trace.close()
    trace = Trace(tmp_path / "trace.json", now_s=0.0, unix_s=5010.0)  # resumed: names begin anew
    trace.write([TraceSpan("train", "train-0", "train", 2.0, 3.0)], [Usage("train", "train-0", 1.0, 4.0, 1.0)], 5.0)
    train = function(window(tmp_path, to_s=20.0), "train")
    assert sorted(life[1:5] for life in train["lives"]) == [[1.0, 1.0, 5.0, 5.0], [11.0, 11.0, 14.0, 14.0]]
    assert len(train["calls"]) == 3


Spans = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=12)


@given(steps=st.lists(Spans, min_size=1, max_size=5))
def test_a_trace_read_as_it_grows_is_the_trace_read_at_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[int, int, int]]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace, growing, number = Trace(path, now_s=0.0, unix_s=5000.0), TraceFile(path), 0
    for step, spans in enumerate(steps):
        usage, calls = [], []
        for kind, start, length in spans:
            name = f"f{kind}"
            usage.append(Usage(name, f"{name}-{number}", 100.0 * step + start, 100.0 * step + start + length, 0.0))
            calls.append(TraceSpan(name, f"{name}-{number}", "call", 100.0 * step + start, 100.0 * step + start + 0.5))
            number += 1
        trace.write(
            [TraceSpan(JOB, "step", f"step {step}", 100.0 * step, 100.0 * step + 99), *calls], usage, 100.0 * step + 99
        )
        growing.read()
    whole = TraceFile(path).read()
    assert growing.steps == whole.steps
    assert {n: (f.lives, f.rows, f.work, f.row_of) for n, f in growing.functions.items()} == {
        n: (f.lives, f.rows, f.work, f.row_of) for n, f in whole.functions.items()
    }
    for found in whole.functions.values():
        assert -1 not in found.row_of, "every call is in its replica's lane"
        for row in set(found.rows):
            lives = sorted((a.start_s, a.stop_s) for a, on in zip(found.lives, found.rows, strict=True) if on == row)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(lives)), "no two in one place"


def test_a_trace_that_is_being_written_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "trace.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    file = TraceFile(path)
    before = file.read().version
    path.write_bytes(whole)
    assert file.read().version > before
    assert [len(f.work) for f in file.functions.values()] == [1]


def test_the_lowest_free_lane_is_taken() -> None:
    lanes: list[Lane] = []
    assert [place(lanes, *span) for span in ((0, 10), (5, 6), (6, 7), (10, 12), (5, 20))] == [0, 1, 1, 0, 2]


@given(count=st.integers(0, 300), points=st.none() | st.integers(1, 50))
def test_runs_of_steps_are_all_steps_once(count: int, points: int | None) -> None:
    runs = parts(count, points)
    assert [i for run in runs for i in run] == list(range(count))
    assert all(len(run) for run in runs)
    assert len(runs) <= (count if points is None else points)
    if len(runs) > 1:
        assert len(runs[-1]) == 1, "the last step stands for itself"


def test_thinned_columns_keep_what_stands_out() -> None:
    values = [1.0, None, 3.0, 100.0, None, None, 5.0]
    mean, low, high = thinned(values, [range(3), range(3, 4), range(4, 6), range(6, 7)])
    assert (mean, low, high) == ([2.0, 100.0, None, 5.0], [1.0, 100.0, None, 5.0], [3.0, 100.0, None, 5.0])


def test_names_are_those_of_all_rows_and_follow_a_file_that_begins_anew(tmp_path: Path) -> None:
    names, rows = Names(), [{"step": 0, "a/x": 1.0}, {"step": 1, "b": 2.0}]
    assert names.of(tmp_path, rows[:1]) == ["a/x"]
    assert names.of(tmp_path, rows) == ["a/x", "b"]
    assert columns(rows, ["a/x", "b"], names=["a/"], from_step=0, to_step=None) == ([0, 1], {"a/x": [1.0, None]})
    assert columns(rows, ["a/x", "b"], names=[], from_step=1, to_step=None) == ([1], {"b": [2.0]})
    assert names.of(tmp_path, [{"step": 0, "c": 1.0}]) == ["c"]


def test_costs_add_up_however_thin(tmp_path: Path) -> None:
    steps = [StepCost(k, k + 1.0, {"train": Cost(k, k / 2, k, float(k), 1)}) for k in range(7)]
    books = Books(steps, together(steps), StepCost(7), 1)
    for points in (None, 3, 1):
        found = cost_columns(books, points)
        assert sum(found["counts"]) == 7
        assert found["steps"][-1] == 6
        assert sum(found["functions"]["train"]["usd"]) == pytest.approx(21.0)
    assert cost_columns(books, 3)["wall_s"] == [1 + 2 + 3, 4 + 5 + 6, 7]


def test_samples_by_filter_and_order() -> None:
    samples: list[dict[str, Any]] = [
        {"group": 0, "prompt": "One", "response": "a", "score": 0.5, "finish": "stop", "mismatch": None},
        {"group": 0, "prompt": "two", "response": "ONE more", "score": 1.0, "finish": "length", "mismatch": 0.1},
        {"group": 1, "prompt": "three", "response": "c", "finish": "stop", "mismatch": 0.3},
    ]
    assert chosen(samples, Filter(contains="one"), "index") == samples[:2]
    assert chosen(samples, Filter(min_score=0.6), "index") == samples[1:2], "no score is not above any"
    assert chosen(samples, Filter(max_score=0.6, finish="stop"), "index") == samples[:1]
    assert chosen(samples, Filter(group=1), "-score") == samples[2:]
    assert [s.get("mismatch") for s in chosen(samples, Filter(), "-mismatch")] == [0.3, 0.1, None]
    assert [s.get("score") for s in chosen(samples, Filter(), "score")] == [0.5, 1.0, None]


def test_tools_that_failed_most_come_first() -> None:
    def told(name: str, content: str) -> dict[str, str]:
        return {"role": "tool", "name": name, "content": content}

    said = {"role": "assistant", "content": "Error: is what the model wrote itself"}
    samples: list[dict[str, Any]] = [
        {"conversation": [said, told("add", "3"), told("multiply", "Error: no number")]},
        {"prompt": "2+2"},
    ]
    assert tools_of([*samples, {"conversation": [told("add", "4")]}]) == [
        {"tool": "multiply", "calls": 1, "failed": 1},
        {"tool": "add", "calls": 2, "failed": 0},
    ]


def test_the_same_prompt_over_the_steps_and_groups_with_their_deviation(tmp_path: Path) -> None:
    def kept(step: int, *prompts: str, of: str = "") -> None:
        lines = [
            {"group": k, "prompt": text, "response": f"to {text}", "score": step} for k, text in enumerate(prompts)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (tmp_path / f"{of}{step:06d}.jsonl").write_text(text)

    for step in range(1, 31):
        kept(step, "é?", "é? and more") if step % 2 else kept(step, "else")
    kept(4, "é?", of="validation-")
    assert kept_steps(tmp_path) == list(range(1, 31))
    found = same_prompt(tmp_path, "é?", "training")
    assert [(one["step"], len(one["samples"])) for one in found] == [(step, 1) for step in range(1, 30, 2)]
    assert (
        [one["step"] for one in same_prompt(tmp_path, "é?", "validation")] == [4] == kept_steps(tmp_path, "validation")
    )
    assert same_prompt(tmp_path, "never", "training") == []
    scored: list[dict[str, Any]] = [{"group": g, "score": s} for g, s in ((0, 1), (0, 4), (1, 2), (1, None))]
    assert groups_of(scored) == [
        {"group": 0, "count": 2, "mean": 2.5, "deviation": pytest.approx(4.5**0.5)},
        {"group": 1, "count": 1, "mean": 2.0, "deviation": 0.0},
    ]


def test_a_checkpoint_is_listed_once(tmp_path: Path) -> None:
    versions = {"actor": {"model": "actor", "number": 1, "call": "0123456789ab"}}
    summary = Summary()
    for id, step in enumerate((0, 1, 1, 2)):  # a step's event comes once more after a kill
        summary.add(RunEvent(id, 5.0, "step", {"step": step, "cost_usd": 0.0, "metrics": {}, "versions": versions}))
    config = parse_job(CONFIG, base=tmp_path)
    job = Job("a", Desired("a", 0.0), config, summary, False)
    blob = tmp_path / Version.from_json(versions["actor"]).prefix / "tensors" / "0"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(700))
    listed = checkpoints_of(job, tmp_path)["checkpoints"]
    assert [(one["step"], one["bytes"]) for one in listed] == [(0, 700), (1, 700), (2, 700)]
    assert checkpoints_of(job, tmp_path / "elsewhere")["checkpoints"][0]["bytes"] is None
    (tmp_path / "profile" / "000002").mkdir(parents=True)
    (tmp_path / "profile" / "000002" / "train-1.json.gz").write_bytes(bytes(9))
    assert checkpoints_of(job, tmp_path)["profiles"] == [{"step": 2, "name": "train-1.json.gz", "bytes": 9}]


def test_the_last_plan_of_a_step_counts(tmp_path: Path) -> None:
    curve = [CurvePoint(1, 10.0, 0.2, 10.0), CurvePoint(2, 6.0, 0.25, 12.0)]
    for chosen_replicas in (1, 2):
        plans = Plans(tmp_path)
        plans.write(1, StepPlan({"generate": 2}, [[0, 1], [2]], 8, curve=curve, chosen=chosen_replicas))
        plans.close()
        with (tmp_path / "plans.jsonl").open("ab") as file:
            file.write(b'{"step": 2, "half')  # killed while it wrote
    lines = Tails().read(tmp_path / "plans.jsonl")
    assert len(lines) == 2
    rows = [{"step": 1, "planner/step_s": 7.0, "planner/cost_usd": 0.3, "timing_s/step": 9.0}]
    found = plan_of(lines, rows, None)
    assert (found["step"], found["plan"]["chosen"], found["plan"]["shards"]) == (1, 2, [2, 1])
    assert found["plan"]["curve"] == [[1, 10.0, 0.2, 10.0], [2, 6.0, 0.25, 12.0]]
    assert found["actual"] == {"step_s": 7.0, "cost_usd": 0.3}
    assert plan_of(lines, rows, 5)["plan"] is None


@given(limit=st.integers(1, 7), kinds=st.sampled_from([None, ["note"], ["stage", "step"]]))
def test_pages_of_events_have_each_once_newest_first(limit: int, kinds: list[str] | None) -> None:
    events = [{"id": i + 1, "type": ("stage", "step", "note")[i % 3]} for i in range(20)]
    wanted = [e["id"] for e in events if (e["type"] in kinds if kinds else e["type"] != "stage")][::-1]
    seen, before = [], None
    while True:
        page = event_page(events, kinds, before, limit)
        assert page["total"] == len(wanted)
        seen += [event["id"] for event in page["events"]]
        before = page["next"]
        if before is None:
            break
    assert seen == wanted


def test_last_lines_of_a_long_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert last_lines(file, 3) == []
    file.write_text("".join(f"line {i} {'x' * 100}\n" for i in range(10_000)))
    assert [line.split()[1] for line in last_lines(file, 3)] == ["9997", "9998", "9999"]
    (tmp_path / "link").symlink_to(file)
    assert last_lines(tmp_path / "link", 3) == [], "what a recipe has put in its place leads out of its run"


def test_counts_against_looking_at_many_moments(tmp_path: Path) -> None:
    """Random lives: the mean over a bin is what looking often gives."""
    rng = np.random.default_rng(0)
    trace = Trace(tmp_path / "trace.json", now_s=0.0, unix_s=0.0)
    starts, lengths = rng.uniform(0, 90, 40), rng.uniform(1, 10, 40)
    usage = [
        Usage("train", f"train-{i}", a, a + n, 0.0, a, a + n)
        for i, (a, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    trace.write([TraceSpan(JOB, "step", "step 0", 0.0, 100.0)], usage, 100.0)
    idle = function(window(tmp_path, bins=7, most=0), "train")["counts"]["idle"]
    moments = np.linspace(0, 100, 70_001)
    alive = ((moments[:, None] >= starts) & (moments[:, None] < starts + lengths)).sum(1)
    assert idle == pytest.approx([float(alive[k * 10_000 : (k + 1) * 10_000].mean()) for k in range(7)], abs=0.01)
    assert json.dumps(window(tmp_path)), "plain values"
