"""How fast the dashboard is on a job of 1,000 steps x 512 samples: paints, frames while it is moved, the API's answers.

    python bench/dashboard.py [--steps 1000] [--samples 512] [--loads 5] [--keep DIRECTORY]

The run directory is written by the project's own writers, with made-up numbers; the job counts as running. Chromium
runs without a GPU on the same cores as the server, so that frames are drawn by the CPU. Target: first paint under 1 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from orchestrator.api.auth import OWN, read_token
from orchestrator.base.files import write_atomically
from orchestrator.job.config import parse_job
from orchestrator.planner.base import CurvePoint, PlannedStage, StepPlan
from orchestrator.platforms.base import Replica, Usage
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import EventLog
from orchestrator.run.ledger import Books, Cost, StepCost, together
from orchestrator.telemetry.now import Now
from orchestrator.telemetry.plans import Plans
from orchestrator.telemetry.sinks import JsonLines
from orchestrator.telemetry.trace import JOB, Trace, TraceSpan

STEP_S = 60.0
REPLICAS = {"generate": 16, "reward": 2, "reference": 4, "train": 4}
USD_PER_HOUR = {"generate": 2.0, "reward": 0.2, "reference": 2.0, "train": 4.0}
WORK_S = {"generate": (2.0, 34.0), "reward": (12.0, 38.0), "reference": (14.0, 39.0), "train": (39.0, 56.0)}
"""When a function's replicas are at work in a step."""
MORE = 60
"""Metrics beside those that the page shows at first."""


def make_run(root: Path, steps: int, samples: int) -> RunDirectory:
    rng = random.Random(0)
    functions = {
        name: {"replicas": count, "gpus": 1, "usd_per_hour": USD_PER_HOUR[name]} for name, count in REPLICAS.items()
    }
    table = {"name": "long", "steps": 2 * steps, "model": {"path": "m"}, "data": {"train": "t"}, "functions": functions}
    job = parse_job(table | {"telemetry": {"samples": samples}}, base=root)
    directory = RunDirectory.create(root / "runs" / "long", job)
    path = directory.path
    (path / "samples").mkdir()
    began_at = time.time() - steps * STEP_S
    log, sink, plans = EventLog(path), JsonLines(path / "metrics.jsonl", []), Plans(path)
    trace = Trace(path / "trace.json", now_s=0.0, unix_s=began_at)
    log.append("started", {"execution": 1, "step": -1, "steps": 2 * steps})
    costs: list[StepCost] = []
    for step in range(steps):
        begin_s = step * STEP_S
        usage, spans = replicas_of(step, begin_s, rng)
        trace.write(
            [TraceSpan(JOB, "step", f"step {step}", begin_s, begin_s + STEP_S), *spans], usage, begin_s + STEP_S
        )
        metrics = metrics_of(step, steps, rng)
        sink.write(step, metrics)
        for k in range(6):
            log.append("stage", {"step": step, "stages": ["generate"], "replicas": {"generate": k, "train": 0}})
        versions = {"actor": {"model": "actor", "number": step, "call": "0123456789ab"}}
        followed = {name: metrics[name] for name in ("critic/score/mean", "timing_s/step", "perf/throughput")}
        log.tell("step", step, {"metrics": followed, "cost_usd": 0.4 * step, "versions": versions})
        if step % 20 == 0:
            log.tell("validation", step, {"metrics": {k: v for k, v in metrics.items() if k.startswith("val-core/")}})
        plans.write(step, plan_of(samples))
        costs.append(cost_of(step, usage))
        (path / "samples" / f"{step:06d}.jsonl").write_text(texts_of(step, samples, rng))
    wall_s = steps * STEP_S
    books = Books(costs, together(costs), StepCost(steps), 1)
    write_atomically(path / "cost.json", json.dumps(books.to_json(), indent=1).encode())
    now = Now(path, trace.job_s)
    now.look([Replica("generate", f"generate-open-{k}", "busy", wall_s + 1.0) for k in range(16)], wall_s + 2.0)
    now.write(steps, books, wall_s + 2.0)
    sink.close(failed=False)
    for file in (log, plans, trace):
        file.close()
    return directory


def replicas_of(step: int, begin_s: float, rng: random.Random) -> tuple[list[Usage], list[TraceSpan]]:
    usage, spans = [], []
    for name, count in REPLICAS.items():
        start_s, stop_s = WORK_S[name]
        for k in range(count):
            replica = f"{name}-{step * count + k}"
            ready_s = begin_s + start_s + rng.uniform(1.0, 3.0)
            end_s = begin_s + (start_s + (stop_s - start_s) * rng.uniform(0.5, 1.0) if name == "generate" else stop_s)
            calls = 1 if name in ("generate", "train") else 8
            edges = [ready_s + 0.5 + (end_s - ready_s - 1.0) * i / calls for i in range(calls + 1)]
            for left_s, right_s in itertools.pairwise(edges):
                spans.append(TraceSpan(name, replica, name, left_s, right_s - 0.1, {"samples": 32}))
            life = Usage(name, replica, ready_s - 1.0, end_s + 0.5, end_s - ready_s - 1.0, ready_s, end_s)
            usage.append(life)
    return usage, spans


def metrics_of(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    learned = 1 / (1 + math.exp(4 - 9 * step / steps))
    metrics = {
        "critic/score/mean": learned + rng.gauss(0, 0.03), "actor/ppo_kl": 0.02 * learned + abs(rng.gauss(0, 0.004)),
        "response_length/mean": 300 + 500 * learned + rng.gauss(0, 20), "actor/entropy": 1.2 - 0.9 * learned,
        "actor/grad_norm": 0.3 + abs(rng.gauss(0, 0.1)), "rollout_corr/abs_diff_mean": 0.004 + abs(rng.gauss(0, 1e-3)),
        "timing_s/step": STEP_S + rng.gauss(0, 2), "perf/throughput": 2600 + rng.gauss(0, 100),
    }  # fmt: skip
    if step % 20 == 0:
        metrics["val-core/gsm8k/acc/mean@1"] = 0.1 + 0.75 * learned
    return metrics | {f"more/metric_{i}": rng.random() for i in range(MORE)}


def plan_of(samples: int) -> StepPlan:
    curve = [CurvePoint(n, 20 + 300 / n, 0.02 * n + 0.3 + 0.5 / n, 20.0 * n + 300) for n in range(1, 17)]
    return StepPlan(
        replicas=REPLICAS, shards=[list(range(samples // 16))] * 16, micro_batch=32, predicted_step_s=58.0,
        predicted_cost_usd=0.4, stages=[PlannedStage(n, *WORK_S[n]) for n in REPLICAS], curve=curve, chosen=9,
    )  # fmt: skip


def cost_of(step: int, usage: list[Usage]) -> StepCost:
    functions: dict[str, Cost] = {}
    for life in usage:
        seconds = (life.stopped_s or 0.0) - life.started_s
        usd = seconds / 3600 * USD_PER_HOUR[life.function]
        own = Cost(seconds, life.busy_s, seconds, usd, 1)
        functions[life.function] = functions.get(life.function, Cost()) + own
    return StepCost(step, STEP_S, functions)


def texts_of(step: int, samples: int, rng: random.Random) -> str:
    words = [
        "so",
        "the",
        "sum",
        "of",
        "the",
        "first",
        "two",
        "terms",
        "is",
        "then",
        "divided",
        "by",
        "the",
        "number",
        "of",
        "rows",
        "that",
        "are",
        "left",
        "over",
    ]
    lines = []
    for i in range(samples):
        text = {
            "group": i // 8, "index": i % 8, "prompt": f"Question {i // 8} of step {step}: how many are there?",
            "response": " ".join(rng.choices(words, k=50)), "score": float(rng.random() < 0.5), "finish": "stop",
            "version": step, "tokens": rng.randrange(40, 900), "mismatch": rng.random() * 1e-2,
        }  # fmt: skip
        lines.append(json.dumps(text) + "\n")
    return "".join(lines)


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, str]]:
    """The server's URL and its token."""
    port = 18653
    words = ["serve", "--runs", str(root / "runs"), "--data-root", str(root), "--port", str(port), "--max-running", "0"]
    server = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.commands", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                httpx.get(f"{url}/healthz")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        yield url, read_token(root / "runs" / OWN)
    finally:
        server.terminate()
        server.wait()


PAINTS = """() => new Promise(done => {
    const look = () => {
        const paint = performance.getEntriesByName('first-contentful-paint')[0]
        const canvas = document.querySelector('.gantt .canvas canvas')
        const ready = paint && canvas?.width > 300 && document.querySelectorAll('.u-over').length >= 8
        ready ? done([paint.startTime, performance.now()]) : requestAnimationFrame(look)
    }
    look()
})"""
FRAMES = """([count, selector]) => new Promise(done => {
    const times = []; let last = performance.now(), i = 0
    const element = document.querySelector(selector)
    const frame = now => {
        times.push(now - last); last = now
        if (selector === 'html') window.scrollTo(0, (i % 60) * 30)
        else {
            const zoom = {deltaY: i % 20 < 10 ? 60 : -60, ctrlKey: true, clientX: 600 + i, clientY: 300}
            const pan = {deltaX: i % 40 < 20 ? 40 : -40}
            const wheel = {...(i % 60 < 30 ? zoom : pan), bubbles: true, cancelable: true}
            element.dispatchEvent(new WheelEvent('wheel', wheel))
        }
        if (++i < count) requestAnimationFrame(frame); else done(times.slice(2))
    }
    requestAnimationFrame(frame)
})"""


def quantiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50_ms": round(ordered[len(ordered) // 2], 1),
        "p95_ms": round(ordered[int(0.95 * len(ordered))], 1),
        "max_ms": round(ordered[-1], 1),
    }


def load(browser: Browser, url: str, token: str) -> tuple[float, float, float, Page]:
    """First paint, everything drawn, CPU time of the page's main thread until then (ms); the page."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(f"{url}/jobs/long#token={token}")
    first, whole = page.evaluate(PAINTS)
    measured = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    return first, whole, 1000 * measured["TaskDuration"], page


def measure(browser: Browser, url: str, token: str, loads: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    firsts, wholes, busy = [], [], []
    for i in range(loads + 1):
        first, whole, cpu, page = load(browser, url, token)
        if i == 0:
            rows["first load of the server: first paint"] = {"p50_ms": round(first, 1)}
            rows["first load of the server: charts drawn"] = {"p50_ms": round(whole, 1)}
        else:
            firsts.append(first)
            wholes.append(whole)
            busy.append(cpu)
        if i < loads:
            page.context.close()
    rows["first contentful paint"], rows["charts and replicas drawn"] = quantiles(firsts), quantiles(wholes)
    rows["CPU time of the page until drawn"] = quantiles(busy)
    rows["frames: zoom and pan, last steps"] = quantiles(page.evaluate(FRAMES, [180, ".gantt .canvas canvas"]))
    page.get_by_role("button", name="All", exact=True).click()
    page.wait_for_timeout(500)
    rows["frames: zoom and pan, whole job"] = quantiles(page.evaluate(FRAMES, [180, ".gantt .canvas canvas"]))
    rows["frames: scroll, overview"] = quantiles(page.evaluate(FRAMES, [120, "html"]))
    page.keyboard.press("4")
    page.wait_for_selector("table.samples tbody tr")
    rows["frames: scroll, samples"] = quantiles(page.evaluate(FRAMES, [120, "html"]))
    rows["heap"] = {"mb": round(page.evaluate("performance.memory.usedJSHeapSize") / 1e6, 1)}
    return rows


def answers(url: str, token: str, steps: int) -> dict[str, Any]:
    paths = {
        "job": "", "metrics, 8 names, 600 points": "/metrics?points=600&name=critic/&name=actor/&name=response_length/",
        "cost without steps": "/cost?steps=false", "cost by step, 400 points": "/cost/steps?points=400",
        "replicas, whole job": "/replicas?bins=600&most=0", "replicas, 8 steps": "/replicas?from_s=59000",
        "plan": "/plan", "samples, filtered and sorted": "/samples?contains=question&sort=-mismatch&limit=50",
        "samples of another step": "/samples?step={i}&limit=50", "events": "/event-log?limit=100",
    }  # fmt: skip
    rows = {}
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
        for name, path in paths.items():
            times = []
            for i in range(40):
                begun_s = time.perf_counter()
                answer = client.get("/v1/jobs/long" + path.replace("{i}", str(i % steps)))
                times.append(1000 * (time.perf_counter() - begun_s))
                assert answer.status_code == 200, answer.text
            rows[f"GET {name}"] = quantiles(times)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="make the run in this directory, and leave it there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = given.keep or Path(folder)
        if not (root / "runs" / "long").exists():
            make_run(root, given.steps, given.samples)
        directory = RunDirectory.open(root / "runs" / "long")
        with directory.lock(), serving(root) as (url, token), sync_playwright() as started:
            path = shutil.which("chromium") or shutil.which("google-chrome")
            browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
            rows = measure(browser, url, token, given.loads) | answers(url, token, given.steps)
            browser.close()
    for name, row in rows.items():
        print(f"{name:42s}" + "".join(f"  {key} {value:8.1f}" for key, value in row.items()))
    print(json.dumps({"steps": given.steps, "samples": given.samples, "rows": rows}))


if __name__ == "__main__":
    main()
