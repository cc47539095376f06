"""How fast the job API answers while clients follow events: a run of 1,000 steps that goes on growing.

    python bench/api.py [--steps 1000] [--followers 20] [--requests 200]

Target: 50 ms at the 95th percentile with 20 followers. A request of each route is timed one after the other, from
another process than the server's.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx

from orchestrator.api.auth import OWN
from orchestrator.api.client import token_headers
from orchestrator.job.config import parse_job
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import EventLog

METRICS = 80
STAGES = 6


def write_step(directory: Path, log: EventLog, step: int) -> None:
    for i in range(STAGES):
        log.append("stage", {"step": step, "stages": ["generate"], "replicas": {"generate": i, "train": 0}})
    metrics = {f"group/metric_{i}": step + i / 7 for i in range(METRICS)}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")
    versions = {"actor": {"model": "actor", "number": step, "call": "0123456789ab"}}
    log.tell("step", step, {"metrics": {"critic/score/mean": 0.5}, "cost_usd": step * 0.01, "versions": versions})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--followers", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, closing(socket.socket()) as probe:
        root = Path(folder)
        job = parse_job(
            {"name": "long", "steps": 10 * given.steps, "model": {"path": "m"}, "data": {"train": "t"}}, base=root
        )
        directory = RunDirectory.create(root / "runs" / "long", job)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        with directory.lock():
            log = EventLog(directory.path)
            for step in range(given.steps):
                write_step(directory.path, log, step)
            server = subprocess.Popen(
                [
                    sys.executable, "-m", "orchestrator.commands", "serve", "--runs", str(root / "runs"),
                    "--data-root", str(root), "--port", str(port), "--max-running", "0",
                ],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                measure(f"http://127.0.0.1:{port}", directory.path, log, given)
            finally:
                server.terminate()
                server.wait()


def measure(url: str, directory: Path, log: EventLog, given: argparse.Namespace) -> None:
    with httpx.Client(base_url=url, timeout=30) as client:
        while True:
            try:
                client.get("/healthz")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        headers = token_headers(directory.parent / OWN, url)
        client.headers.update(headers)
        stop = threading.Event()
        received = [0] * given.followers
        threads = [
            threading.Thread(target=follow, args=(url, headers, received, i, stop)) for i in range(given.followers)
        ]
        for thread in threads:
            thread.start()
        while min(received) < given.steps * (STAGES + 1):
            time.sleep(0.05)
        last = given.steps
        routes = {
            "jobs": "/v1/jobs",
            "job": "/v1/jobs/long",
            "checkpoints": "/v1/jobs/long/checkpoints",
            "metrics, all steps, 2 names": "/v1/jobs/long/metrics?name=group/metric_1&name=group/metric_2",
            "metrics, last 10 steps, all names": f"/v1/jobs/long/metrics?from_step={last - 10}",
        }
        rows = {}
        for name, path in routes.items():
            times = []
            for i in range(given.requests):
                if i % 20 == 0:
                    write_step(directory, log, last)
                    last += 1
                begun_s = time.perf_counter()
                answer = client.get(path)
                times.append(1000 * (time.perf_counter() - begun_s))
                assert answer.status_code == 200, answer.text
            times.sort()
            rows[name] = {"p50_ms": times[len(times) // 2], "p95_ms": times[int(0.95 * len(times))]}
            print(f"{name:36s} p50 {rows[name]['p50_ms']:7.2f} ms   p95 {rows[name]['p95_ms']:7.2f} ms")
        stop.set()
        log.append("note", {"message": "the end"})
        for thread in threads:
            thread.join()
    print(json.dumps({"steps": given.steps, "followers": given.followers, "routes": rows}))


def follow(url: str, headers: dict[str, str], received: list[int], number: int, stop: threading.Event) -> None:
    with (
        httpx.Client(base_url=url, headers=headers, timeout=60) as client,
        client.stream("GET", "/v1/jobs/long/events") as stream,
    ):
        for line in stream.iter_lines():
            received[number] += line.startswith("id:")
            if stop.is_set():
                return


if __name__ == "__main__":
    main()
