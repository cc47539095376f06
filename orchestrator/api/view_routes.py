"""The routes of what pages show: metrics, cost, checkpoints, samples, replicas over time, plans, events, output.

Each answers a window or a page, thinned out by the server: a job of any length costs a page the same.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.responses import FileResponse

from functions.base.logs import LogLine
from functions.base.wire import Json, Version
from functions.call.train_params import rollout_bound
from orchestrator.api.jobs import Job, Jobs
from orchestrator.api.launch import OUTPUT
from orchestrator.api.problems import ApiError, responses
from orchestrator.api.redact import redacted
from orchestrator.api.routes import JobId
from orchestrator.api.views import models
from orchestrator.api.views.costs import NO_BOOKS, BookFiles
from orchestrator.api.views.log import event_page, last_lines
from orchestrator.api.views.plan import plan_of
from orchestrator.api.views.reserved import ReservedRuns
from orchestrator.api.views.tail import Tails
from orchestrator.api.views.texts import (
    PREFIX,
    Filter,
    Kind,
    SortKey,
    chosen,
    groups_of,
    kept_steps,
    read_samples,
    same_prompt,
    tools_of,
)
from orchestrator.api.views.thin import Names, columns, parts, thinned
from orchestrator.api.views.timeline import Timelines
from orchestrator.job.config import JobConfig
from orchestrator.recipes.settings import rollout_diff
from orchestrator.run.directory import PROFILE, profiles_of
from orchestrator.run.events import FILE as EVENTS
from orchestrator.run.events import EventType
from orchestrator.run.ledger import Books
from orchestrator.telemetry.health import health
from orchestrator.telemetry.plans import FILE as PLANS
from orchestrator.telemetry.where import advice, parts_of

JSON_TYPE = "application/json"
LARGEST_TIME_S = 1e10
PROFILE_NAME = r"^[a-z-]{1,32}-[0-9]{1,6}\.json\.gz$"
AnyStep = Annotated[int | None, Query(ge=0, le=10**9)]
Points = Annotated[
    int | None, Query(ge=1, le=10_000, description="At most so many points, each of a run of steps; default: all steps")
]
Seconds = Annotated[
    float | None,
    Query(ge=0, le=LARGEST_TIME_S, allow_inf_nan=False, description="Seconds since the job's first execution began"),
]
Score = Annotated[float | None, Query(ge=-1e300, le=1e300, allow_inf_nan=False)]


def view_routes(jobs: Jobs, reads: Callable[..., object]) -> APIRouter:
    """`reads` is the dependency that checks the caller's token."""
    router = APIRouter(
        prefix="/v1/jobs", tags=["views"], dependencies=[Depends(reads)], responses=responses(401, 404, 422)
    )
    metric_rows, event_rows, sample_rows, plan_rows = Tails(), Tails(), Tails(), Tails()
    books, timelines, names, reserved = BookFiles(), Timelines(), Names(), ReservedRuns()

    def directory(id: str) -> FilePath:
        return jobs.directory(jobs.get(id).id)

    @router.get(
        "/{id}/metrics", operation_id="getMetrics", summary="Metrics by step, under verl's names",
        response_model=models.Metrics,
    )  # fmt: skip
    def metrics(
        id: JobId,
        name: Annotated[
            list[str] | None, Query(description="Only these; a name that ends in `/` is a beginning")
        ] = None,
        from_step: Annotated[int, Query(ge=0, le=10**9)] = 0,
        to_step: AnyStep = None,
        points: Points = None,
    ) -> Response:
        path = directory(id) / "metrics.jsonl"
        rows = metric_rows.read(path)
        answer = metrics_of(rows, names.of(path, rows), name or (), from_step, to_step, points)
        return _json(answer)

    @router.get(
        "/{id}/cost", operation_id="getCost", summary="Replica-seconds and dollars, by function and step",
        response_model=models.CostView,
    )  # fmt: skip
    def cost(
        id: JobId,
        steps: Annotated[bool, Query(description="With what each step cost; `/cost/steps` has that as columns")] = True,
    ) -> Response:
        answer = cost_of(books.read(directory(id) / "cost.json"), steps=steps)
        return _json(answer)

    @router.get(
        "/{id}/cost/steps", operation_id="getCostSteps", summary="What committed steps cost, as columns",
        response_model=models.CostSteps,
    )  # fmt: skip
    def cost_steps(id: JobId, points: Points = None) -> Response:
        return Response(books.columns(directory(id) / "cost.json", points), media_type=JSON_TYPE)

    @router.get(
        "/{id}/reserved", operation_id="getReserved", summary="The same steps on reserved machines, simulated",
        response_model=models.Reserved,
    )  # fmt: skip
    def reserved_runs(id: JobId) -> dict[str, Any]:
        job = jobs.get(id)
        return reserved.read(jobs.directory(id), job.summary.step or 0, ended=not job.alive)

    @router.get(
        "/{id}/health", operation_id="getHealth", summary="Whether it learns as it should, with reasons",
        response_model=models.Health,
    )  # fmt: skip
    def health(id: JobId) -> dict[str, Any]:
        return health_of(jobs.get(id).config, metric_rows.read(directory(id) / "metrics.jsonl"))

    @router.get(
        "/{id}/where", operation_id="getWhere", summary="Where steps' time went, and what would make them faster",
        response_model=models.Where,
    )  # fmt: skip
    def where(id: JobId, to_step: AnyStep = None, count: Annotated[int, Query(ge=1, le=1000)] = 8) -> dict[str, Any]:
        rows = metric_rows.read(directory(id) / "metrics.jsonl")
        return where_of(jobs.get(id).config, [r for r in rows if to_step is None or r["step"] <= to_step][-count:])

    @router.get(
        "/{id}/checkpoints", operation_id="listCheckpoints", summary="Versions whose weights are kept",
        response_model=models.Checkpoints,
    )  # fmt: skip
    def checkpoints(id: JobId) -> dict[str, Any]:
        job = jobs.get(id)
        jobs.kept.fetch(id, f"{PROFILE}/")
        return checkpoints_of(job, jobs.directory(id))

    @router.get(
        "/{id}/profiles/{step}/{name}", operation_id="getProfile", summary="A call's Chrome trace, gzipped",
        response_class=FileResponse,
    )  # fmt: skip
    def profile(
        id: JobId, step: Annotated[int, Path(ge=0, le=10**9)], name: Annotated[str, Path(pattern=PROFILE_NAME)]
    ) -> FileResponse:
        file = directory(id) / PROFILE / f"{step:06d}" / name
        jobs.kept.fetch(id, f"{PROFILE}/{step:06d}/{name}")
        if not file.is_file():
            raise ApiError(404, f"step {step} has no profile {name!r}")
        return FileResponse(file, media_type="application/gzip")

    @router.get(
        "/{id}/samples", operation_id="listSamples", summary="Samples of a step: prompt, response, reward",
        response_model=models.Samples,
    )  # fmt: skip
    def samples(
        id: JobId,
        step: Annotated[int | None, Query(ge=0, le=10**9, description="Default: the last that has any")] = None,
        contains: Annotated[
            str | None, Query(max_length=200, description="In the prompt or the response, whatever the case")
        ] = None,
        min_score: Score = None,
        max_score: Score = None,
        group: AnyStep = None,
        finish: Annotated[Literal["stop", "length"] | None, Query(description="How it ended")] = None,
        of: Kind = "training",
        sort: SortKey = "index",
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        folder = directory(id) / "samples"
        kept = kept_steps(folder, of)
        number = kept[-1] if step is None and kept else step
        wanted = Filter(contains, min_score, max_score, group, finish)
        if number is not None and number not in kept:
            raise ApiError(404, f"step {number} has no samples")
        jobs.kept.fetch(id, f"samples/{PREFIX[of]}{number or 0:06d}.")
        known = [] if number is None else read_samples(sample_rows, folder, number, of)
        found = chosen(known, wanted, sort)
        ends = [kept[0], kept[-1]] if kept else []
        page = found[offset : offset + limit]
        answer = samples_of(known) | {"step": number, "steps": ends, "total": len(found), "samples": page}
        return _json(answer)

    @router.get(
        "/{id}/prompt", operation_id="getPrompt", summary="The samples of one prompt over the steps",
        response_model=models.PromptSteps,
    )  # fmt: skip
    def prompt(
        id: JobId,
        step: Annotated[int, Query(ge=0, le=10**9)],
        group: Annotated[int, Query(ge=0, le=10**9, description="The prompt is that of this group of the step")],
        of: Kind = "training",
    ) -> Response:
        folder = directory(id) / "samples"
        jobs.kept.fetch(id, f"samples/{PREFIX[of]}")
        samples = read_samples(sample_rows, folder, step, of)
        text = next((sample["prompt"] for sample in samples if sample["group"] == group), None)
        if text is None:
            raise ApiError(404, f"step {step} has no samples of group {group}")
        return _json({"steps": same_prompt(folder, text, of)})

    @router.get(
        "/{id}/replicas", operation_id="getReplicas", summary="Replicas over time: lanes, or counts by state",
        response_model=models.Timeline, response_model_exclude_defaults=True,
    )  # fmt: skip
    def replicas(
        id: JobId,
        from_s: Seconds = None,
        to_s: Seconds = None,
        bins: Annotated[int, Query(ge=1, le=2000, description="Of the window, where counts are told")] = 400,
        most: Annotated[int, Query(ge=0, le=20_000, description="Lanes while lives and calls are no more")] = 3000,
    ) -> Response:
        job = jobs.get(id)
        window = timelines.window(
            jobs.directory(id), lambda name: job.config.function(name).replicas,
            from_s=from_s, to_s=to_s, bins=bins, most=most, alive=job.alive,
        )  # fmt: skip
        return _json(window)

    @router.get(
        "/{id}/plan", operation_id="getPlan", summary="What the planner decided before a step",
        response_model=models.Plan,
    )  # fmt: skip
    def plan(
        id: JobId, step: Annotated[int | None, Query(ge=0, le=10**9, description="Default: the last planned")] = None
    ) -> dict[str, Any]:
        where = directory(id)
        return plan_of(plan_rows.read(where / PLANS), metric_rows.read(where / "metrics.jsonl"), step)

    @router.get(
        "/{id}/event-log", operation_id="listEvents", summary="Past events, newest first",
        response_model=models.EventPage,
    )  # fmt: skip
    def event_log(
        id: JobId,
        kind: Annotated[list[EventType] | None, Query(description="Default: all but `stage`")] = None,
        before: Annotated[int | None, Query(ge=0, le=2**53, description="Only ids below")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        page = event_page(event_rows.read(directory(id) / EVENTS), kind, before, limit)
        return Response(redacted(json.dumps(page)), media_type=JSON_TYPE)

    @router.get(
        "/{id}/output", operation_id="getOutput", summary="The last lines that the orchestrator has printed",
        response_model=models.Output,
    )  # fmt: skip
    def output(id: JobId, lines: Annotated[int, Query(ge=1, le=1000)] = 50) -> dict[str, Any]:
        return {"lines": [redacted(str(LogLine.parse(line))) for line in last_lines(directory(id) / OUTPUT, lines)]}

    return router


def _json(answer: Json) -> Response:
    """As it is: it was checked when it was written, and a model's second look would cost more than making it."""
    return Response(json.dumps(answer), media_type=JSON_TYPE)


def metrics_of(
    rows: Sequence[dict[str, Any]], known: Sequence[str], names: Sequence[str], from_step: int, to_step: int | None,
    points: int | None,
) -> Json:  # fmt: skip
    """The Metrics of models.py."""
    steps, values = columns(rows, known, names=names, from_step=from_step, to_step=to_step)
    answer: Json = {"steps": steps, "metrics": values, "low": {}, "high": {}, "names": list(known)}
    if points is not None and points < len(steps):
        runs = parts(len(steps), points)
        answer["steps"] = [steps[run[-1]] for run in runs]
        for metric, column in values.items():
            values[metric], answer["low"][metric], answer["high"][metric] = thinned(column, runs)
    return answer


def samples_of(samples: Sequence[dict[str, Any]]) -> Json:
    """What the Samples of models.py say of all of a step's, whichever are asked for."""
    scores = [sample["score"] for sample in samples if sample.get("score") is not None]
    return {"scores": scores, "groups": groups_of(samples), "tools": tools_of(samples)}


def health_of(config: JobConfig, rows: Sequence[dict[str, Any]]) -> Json:
    """The Health of models.py."""
    return {"signs": [asdict(sign) for sign in health(rows, rollout_bound(rollout_diff(config), config.model.dtype))]}


def where_of(config: JobConfig, rows: Sequence[dict[str, Any]]) -> Json:
    """The Where of models.py: of those steps that tell it."""
    planner, told = config.planner, [(row, parts_of(row)) for row in rows]
    return {
        "steps": [
            {"step": row["step"], "parts": parts, "advice": advice(row, policy=planner.policy, warm=planner.keep_warm)}
            for row, parts in told
            if parts
        ]
    }


def cost_of(books: Books | None, *, steps: bool) -> Json:
    """The CostView of models.py."""
    answer = (books or NO_BOOKS).to_json(steps=steps)
    if books is None:
        answer["open"] = None
    del answer["format"]
    return answer


def checkpoints_of(job: Job, directory: FilePath) -> Json:
    """The Checkpoints of models.py."""
    commits = job.summary.commits
    last = {event.data["step"]: event for event in commits}  # a step's event may come once more after a kill
    commits = [last[step] for step in sorted(last)]
    kept = commits[:1] + commits[1:][-job.config.checkpoints.keep :]
    listed = [
        {
            "step": e.data["step"], "created_at": e.time, "versions": e.data["versions"],
            "bytes": held_bytes(directory, e.data["versions"].values()),
        }
        for e in kept
    ]  # fmt: skip
    profiles = [
        {"step": int(file.parent.name), "name": file.name, "bytes": file.stat().st_size}
        for file in profiles_of(directory)
    ]
    model = (directory / "model").is_dir()
    return {"checkpoints": listed, "profiles": profiles, "model": model, "run": str(directory)}


def held_bytes(directory: FilePath, versions: Iterable[Json]) -> int | None:
    """Of the versions' own files; None where the run's directory does not hold them (another exchange)."""
    folders = {directory / Version.from_json(version).prefix for version in versions}
    sizes = [file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sum(sizes) if sizes else None
