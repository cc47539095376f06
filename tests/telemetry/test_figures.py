"""Every figure that pages and commands show, a second way: from the journal, the trace and the samples of a real job.

The page's own answers come from `report_data`, which has all that the server says of a run.
"""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from functions.base.wire import Version
from functions.weights.manifest import read_manifest
from orchestrator.api.report import report_data
from orchestrator.commands.cost import books_of, cost_json, cost_table
from orchestrator.commands.status import print_status, status
from orchestrator.run.directory import RunDirectory
from orchestrator.simulation.reserved import update_reserved
from orchestrator.telemetry.trace import read_events
from tests.support.tiny_job import command, make_job

PRICES = {"generate": 0.5, "reward": 0.2, "train": 0.7}
STEPS = 4


@dataclass
class Seen:
    """A run: what is shown of it, and what it is derived from."""

    run: RunDirectory
    page: dict[str, Any]
    journal: list[dict[str, Any]]
    spans: list[dict[str, Any]]
    """Complete events of the trace, with the names of their process and lane: `group`, `lane`, `start`, `stop`."""
    phases: dict[str, list[tuple[str, float, float]]]
    """By replica: (phase, start, stop)."""
    samples: dict[int, list[dict[str, Any]]]
    held_out: dict[int, list[dict[str, Any]]]

    def of(self, step: int, group: str) -> list[dict[str, Any]]:
        """Calls of a function that began in a step."""
        start_s, stop_s = self.window(step)
        return [
            s for s in self.spans if s["group"] == group and s["name"] != "replica" and start_s <= s["start"] < stop_s
        ]

    def window(self, step: int) -> tuple[float, float]:
        return next((s["start"], s["stop"]) for s in self.spans if s["lane"] == "step" and s["name"] == f"step {step}")

    def lives(self, group: str) -> list[dict[str, Any]]:
        return [s for s in self.spans if s["group"] == group and s["name"] == "replica"]

    def metric(self, name: str) -> dict[int, float]:
        table = self.page["metrics"]
        return {s: v for s, v in zip(table["steps"], table["metrics"][name], strict=True) if v is not None}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    root = tmp_path_factory.mktemp("figures")
    job = make_job(root, steps=STEPS)
    prices = [f"functions.{name}.usd_per_hour={usd}" for name, usd in PRICES.items()]
    done = command(
        "run", job.file, "--run-dir", root / "run", "deterministic=false", "planner.policy=adaptive", *prices
    )
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(root / "run")
    update_reserved(run)
    whole = json.JSONDecoder().raw_decode  # the exchange's own line stands behind a record
    journal = [whole(path.read_text())[0] for path in sorted((run.path / "journal").glob("*.json"))]
    events = read_events(run.path / "trace.json")
    group = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lane = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans, phases = list[dict[str, Any]](), dict[str, list[tuple[str, float, float]]]()
    opened: dict[tuple[int, int, str], float] = {}
    for e in events:
        key, at = (e["pid"], e["tid"]), e["ts"] / 1e6
        if e["ph"] == "X":
            spans.append({**e, "group": group[e["pid"]], "lane": lane[key], "start": at, "stop": at + e["dur"] / 1e6})
        elif e["ph"] == "B":
            opened[*key, e["name"]] = at
        elif e["ph"] == "E":
            phases.setdefault(lane[key], []).append((e["name"], opened.pop((*key, e["name"])), at))
    read = {
        kind: {
            int(path.stem.removeprefix(kind)): [json.loads(line) for line in path.read_text().splitlines()]
            for path in (run.path / "samples").glob(f"{kind}[0-9]*.jsonl")
        }
        for kind in ("", "validation-")
    }
    return Seen(run, report_data(run), journal, spans, phases, read[""], read["validation-"])


def usd(seen: Seen, within: tuple[float, float] | None = None) -> dict[str, float]:
    """What each function's replicas cost, from their lives in the trace."""
    begin, end = within or (0.0, 1e9)
    return {
        name: sum(max(0.0, min(s["stop"], end) - max(s["start"], begin)) for s in seen.lives(name)) / 3600 * price
        for name, price in PRICES.items()
    }


def test_the_tiles(seen: Seen) -> None:
    job, cost = seen.page["job"], seen.page["cost"]
    assert (job["step"], job["steps"]) == (len(seen.journal) - 1, STEPS) == (STEPS, STEPS)
    last = [sample["score"] for sample in seen.samples[STEPS]]
    assert job["metrics"]["critic/score/mean"] == pytest.approx(statistics.fmean(last))
    assert job["trend"] == pytest.approx(
        [statistics.fmean(s["score"] for s in seen.samples[k]) for k in range(1, STEPS + 1)]
    )
    name, value = next((n, v) for n, v in job["metrics"].items() if n.startswith("val-core/"))
    assert name == "val-core/sums/reward/mean@1", "the scorer gives no acc: it is a score, no pass rate"
    assert value == pytest.approx(statistics.fmean(sample["score"] for sample in seen.held_out[STEPS]))
    assert job["spent_usd"] == cost["usd"] == pytest.approx(sum(usd(seen).values()), rel=1e-4)
    assert job["spent_replica_s"] == pytest.approx(sum(s["dur"] for n in PRICES for s in seen.lives(n)) / 1e6, rel=1e-4)
    assert job["wall_s"] >= seen.window(STEPS)[1], "from its beginning to its end"
    before_tests = next(s["start"] for s in seen.spans if s["lane"] == "testing" and s["name"] == f"step {STEPS}")
    calls = [call for call in seen.of(STEPS, "generate") if call["start"] < before_tests]
    made = sum(call["args"]["decode_tokens"] for call in calls) / sum(call["stop"] - call["start"] for call in calls)
    assert job["metrics"]["rollout/tokens_per_s"] == pytest.approx(made, rel=1e-3)


def test_the_curves_are_the_journals_and_the_traces_numbers(seen: Seen) -> None:
    for record in seen.journal:
        for name, value in {**record["history"]["metrics"], **record["observed"]["metrics"]}.items():
            if "/acc/" not in name and not name.startswith("val-aux/"):
                assert seen.metric(name)[record["step"]] == value, name
    assert not any("/acc/" in name for name in seen.page["metrics"]["names"])
    for step in range(1, STEPS + 1):
        start_s, stop_s = seen.window(step)
        assert seen.metric("timing_s/step")[step] == pytest.approx(stop_s - start_s, abs=1e-4)
        texts, lengths = seen.samples[step], [sample["tokens"] for sample in seen.samples[step]]
        assert seen.metric("response_length/mean")[step] == pytest.approx(statistics.fmean(lengths))
        assert seen.metric("response_length/clip_ratio")[step] == pytest.approx(
            statistics.fmean(sample["finish"] == "length" for sample in texts)
        )
        tokens = sum(len(sample["prompt"]) + sample["tokens"] for sample in texts)  # a character is a token here
        assert seen.metric("perf/total_num_tokens")[step] == tokens
        spread = {sample["group"]: {s["score"] for s in texts if s["group"] == sample["group"]} for sample in texts}
        assert seen.metric("critic/groups_zero_variance")[step] == sum(len(scores) == 1 for scores in spread.values())
        for stage, lane in (("gen", "gen"), ("update_actor", "update_actor"), ("reward", "reward")):
            took = sum(s["dur"] for s in seen.spans if s["lane"] == lane and s["name"] == f"step {step}") / 1e6
            assert seen.metric(f"timing_s/{stage}")[step] == pytest.approx(took, abs=1e-4)


def test_where_the_time_went(seen: Seen) -> None:
    """Each moment of a fine grid, from the phases in the trace; tails are told apart in test_where.py."""
    meant = {"load": "loading", "fetch": "loading", "fetch delta": "loading", "start engine": "loading",
             "start": "starting", "read": "reading",
             "publish": "publishing", "compare": "publishing", "score": "scoring", "forward": "scoring",
             "train": "training", "generate": "generating"}  # fmt: skip
    first = ["generating", "training", "scoring", "publishing", "reading", "loading", "starting"]
    usual = {"generate": "generating", "reward": "scoring", "train": "training"}
    for told in seen.page["where"]["steps"]:
        begin, end = seen.window(told["step"])
        calls = [call for name in PRICES for call in seen.of(told["step"], name)]
        counted = dict.fromkeys([*first, "idle"], 0)
        grid = np.linspace(begin, end, 4001)[:-1] + (end - begin) / 8000
        for at in grid:
            now = set()
            for call in calls:
                if call["start"] <= at < call["stop"]:
                    inside = [
                        p
                        for p in seen.phases.get(call["lane"], ())  # an attempt that was lost has none
                        if p[1] <= at < p[2] and p[1] >= call["start"] - 1e-6
                    ]
                    inner = max(inside, key=lambda p: (p[1], -p[2]), default=None)
                    now.add(usual[call["group"]] if inner is None else meant[inner[0]])
                elif call["start"] - call["args"].get("start_s", 0.0) <= at < call["start"]:
                    now.add("starting")
            counted[next((part for part in first if part in now), "idle")] += 1
        parts = dict(told["parts"])
        assert sum(parts.values()) == pytest.approx(end - begin, abs=1e-3)
        parts["generating"] += parts.pop("tail")
        for part, count in counted.items():
            if part in ("starting", "idle"):
                continue  # a wait for a replica that was there is in no event of the trace
            assert parts[part] == pytest.approx(count / len(grid) * (end - begin), abs=0.01 * (end - begin) + 2e-3), (
                part
            )


def test_the_books(seen: Seen) -> None:
    cost, columns = seen.page["cost"], seen.page["cost_steps"]
    for name, price in PRICES.items():
        lives = seen.lives(name)
        own = cost["functions"][name]
        assert own["replica_s"] == pytest.approx(sum(s["stop"] - s["start"] for s in lives), rel=1e-4)
        assert own["busy_s"] == pytest.approx(sum(s["args"]["busy_s"] for s in lives), rel=1e-4)
        assert (own["starts"], own["gpu_s"]) == (len(lives), 0.0)
        assert own["usd"] == pytest.approx(own["replica_s"] / 3600 * price)
    assert columns["steps"] == list(range(STEPS + 1))
    spent = 0.0
    for step in range(STEPS + 1):
        spent += sum(columns["functions"][name]["usd"][step] for name in PRICES)
        closed = seen.window(step)[1], seen.window(step + 1)[0] if step < STEPS else 1e9
        least, most = (sum(usd(seen, (0.0, moment)).values()) for moment in closed)
        assert least - 1e-5 <= spent <= most + 1e-5, "to the moment of the commit, which the next step begins after"


def test_replicas_over_time(seen: Seen) -> None:
    shown = {f["name"]: f for f in seen.page["replicas"][0]["functions"]}
    for name in PRICES:
        lives = sorted((s["lane"], s["start"], s["stop"]) for s in seen.lives(name))
        told = sorted((life[5], life[1], life[4]) for life in shown[name]["lives"])
        assert [lane for lane, *_ in told] == [lane for lane, *_ in lives]
        assert np.allclose([times for _, *times in told], [times for _, *times in lives], atol=2e-4, rtol=0)
        assert len(shown[name]["calls"]) == sum(s["group"] == name and s["name"] != "replica" for s in seen.spans)
        counts = {f["name"]: f for f in seen.page["replicas"][-1]["functions"]}[name]["counts"]
        whole = seen.page["replicas"][-1]
        width = (whole["to_s"] - whole["from_s"]) / len(counts["busy"])
        alive = sum(sum(column) for column in counts.values()) * width
        assert alive == pytest.approx(sum(b - a for _, a, b in lives), rel=0.01)


def test_plans(seen: Seen) -> None:
    for plan in seen.page["plans"]:
        if plan["plan"]["chosen"] is None:
            continue  # before anything was seen
        [point] = [p for p in plan["plan"]["curve"] if p[0] == plan["plan"]["chosen"]]
        assert len({p[0] for p in plan["plan"]["curve"]}) == len(plan["plan"]["curve"]), "one point for each number"
        train = next(stop - start for name, start, stop in plan["plan"]["stages"] if name == "train")
        assert all(p[1] >= train for p in plan["plan"]["curve"]), "no step is shorter than its own training"
        assert point[1] > 0
        begin, end = seen.window(plan["step"])
        tests = [s["start"] for s in seen.spans if s["lane"] == "testing" and s["name"] == f"step {plan['step']}"]
        assert plan["actual"]["step_s"] == pytest.approx(min([end, *tests]) - begin, rel=0.2, abs=0.1)
        assert 0 < plan["actual"]["cost_usd"] <= 1.1 * sum(usd(seen, (begin, end)).values()) + 2e-6
    assert [plan["plan"]["chosen"] is not None for plan in seen.page["plans"]].count(True) >= 2


def test_samples(seen: Seen) -> None:
    rows = [json.loads(line) for line in (seen.run.path.parent / "train.jsonl").read_text().splitlines()]
    truth = {row["prompt"]: row["reward_model"]["ground_truth"] for row in rows}
    for entry in seen.page["samples"]["training"]:
        for told in entry["groups"]:
            own = [s for s in seen.samples[entry["step"]] if s["group"] == told["group"]]
            scores = [s["score"] for s in own]
            mean, deviation = statistics.fmean(scores), statistics.stdev(scores)
            assert (told["count"], told["mean"]) == (len(own), pytest.approx(mean))
            assert told["deviation"] == pytest.approx(deviation)
            for sample in own:
                assert sample["score"] == pytest.approx(
                    sample["response"].count(sample["ground_truth"]) / max(1, len(sample["response"])), abs=1e-6
                )
                assert sample["ground_truth"] == truth[sample["prompt"]]
                if sample["advantage"] is not None:  # GRPO, arXiv 2402.03300, equation 3
                    wanted = (sample["score"] - mean) / (deviation + 1e-6)
                    assert sample["advantage"] == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        assert sorted(entry["scores"]) == sorted(s["score"] for s in seen.samples[entry["step"]])
    assert [entry["step"] for entry in seen.page["samples"]["validation"]] == sorted(seen.held_out) == [0, 2, 4]


def test_health(seen: Seen) -> None:
    signs = {sign["name"]: sign for sign in seen.page["health"]["signs"]}
    last = seen.samples[STEPS]
    cut = statistics.fmean(sample["finish"] == "length" for sample in last)
    assert signs["Cut off"]["value"] == f"{100 * cut:.3g} %"
    assert signs["Cut off"]["level"] == ("bad" if cut >= 0.3 else "warn" if cut >= 0.1 else "good")
    off = statistics.fmean(s["mismatch"] for s in last if s["mismatch"] is not None)
    assert float(signs["Mismatch"]["value"]) == pytest.approx(off, rel=0.5, abs=1e-7), "by token there, by sample here"
    assert signs["Mismatch"]["level"] == "good"


def test_checkpoints_are_versions_that_are_kept(seen: Seen) -> None:
    store = seen.run.open_exchange(seen.run.job)
    listed = seen.page["checkpoints"]["checkpoints"]
    assert [c["step"] for c in listed] == sorted({c["step"] for c in listed})
    for checkpoint in listed:
        version = Version.from_json(checkpoint["versions"]["actor"])
        assert seen.journal[checkpoint["step"]]["pointers"]["versions"]["actor"] == version.to_json()
        assert read_manifest(store, version).version == version
    folders = (seen.run.path / "weights" / "actor").iterdir()
    kept = [folder for folder in folders if any(path.is_file() for path in folder.rglob("*"))]
    assert len(kept) == len({c["versions"]["actor"]["number"] for c in listed})


def test_the_command_line_says_the_same(seen: Seen) -> None:
    told = status(seen.run)
    assert told["step_time_s"] == seen.page["where"]["steps"][-1]["parts"]
    assert told["advice"] == seen.page["where"]["steps"][-1]["advice"]
    assert (told["cost_usd"], told["replica_s"]) == (seen.page["cost"]["usd"], seen.page["job"]["spent_replica_s"])
    assert told["health"] == seen.page["health"]["signs"]
    assert {k: v for k, v in told["metrics"].items() if k != "step"} == {
        name: seen.metric(name)[STEPS] for name in seen.page["metrics"]["names"] if STEPS in seen.metric(name)
    }
    books, reserved = books_of(seen.run), update_reserved(seen.run)
    assert cost_json(books, reserved)["functions"] == seen.page["cost"]["functions"]
    assert seen.page["reserved"] == reserved
    text = printed(cost_table(books, reserved))
    change = reserved["used"]["usd"] / reserved["dedicated"]["usd"] - 1
    assert f"this run took {abs(change):.0%} {'less' if change < 0 else 'more'}" in text
    console = Console(file=io.StringIO(), width=200, record=True)
    print_status(seen.run, console)
    rows = {row.split()[0]: row.split() for row in console.export_text().splitlines() if row.strip()}
    of_samples = [statistics.fmean(sample[key] for sample in seen.samples[STEPS]) for key in ("score", "tokens")]
    begin, end = seen.window(STEPS)
    held_out = statistics.fmean(sample["score"] for sample in seen.held_out[STEPS])
    last = [float(cell.replace(",", "")) for cell in rows[str(STEPS)]]
    assert last[1:3] == pytest.approx(of_samples, rel=1e-3), "reward, length"
    assert last[-2:] == pytest.approx([end - begin, held_out], rel=1e-3), "step s, validation"
    for name, price in PRICES.items():
        paid = sum(s["stop"] - s["start"] for s in seen.lives(name))
        busy = sum(s["args"]["busy_s"] for s in seen.lives(name))
        cells = next(row.split() for row in text.splitlines() if row.split()[:1] == [name])
        assert cells[1:4] == [f"{paid:.1f}", f"{busy:.1f}", f"{busy / paid:.0%}"]
        assert float(cells[-1].lstrip("$")) == pytest.approx(paid / 3600 * price, abs=1e-4)


def test_events_tell_what_the_journal_has(seen: Seen) -> None:
    told = [event for event in seen.page["events"] if event["type"] in ("step", "validation")]
    assert {(event["type"], event["data"]["step"]) for event in told} == {
        *(("step", step) for step in range(STEPS + 1)), *(("validation", step) for step in seen.held_out)
    }  # fmt: skip
    for event in told:
        step = event["data"]["step"]
        assert event["data"]["metrics"] == {name: seen.metric(name)[step] for name in event["data"]["metrics"]}
        if event["type"] == "step":
            spent = sum(usd(seen, (0.0, seen.window(step)[1])).values())
            assert event["data"]["cost_usd"] == pytest.approx(spent, rel=0.1, abs=2e-6), "to the moment of the commit"


def printed(what: Any) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(what, highlight=False)
    return console.export_text()
