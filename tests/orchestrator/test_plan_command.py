"""`plan` on a run made by hand, whose numbers can be worked out on paper; `simulate`; what both refuse, in one line."""

from __future__ import annotations

import asyncio
import json
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w

from orchestrator.calls.exchange import AsyncExchange
from orchestrator.commands.forecast import Forecast, forecast
from orchestrator.commands.main import main
from orchestrator.commands.plan import steps_of
from orchestrator.job.config import load_job
from orchestrator.job.data import Cursor
from orchestrator.job.prompts import Draw, PromptSource
from orchestrator.platforms.base import FunctionSpec, Usage
from orchestrator.run.directory import RunDirectory
from orchestrator.run.journal import Journal
from orchestrator.run.ledger import Ledger
from orchestrator.session.history import finished_steps
from orchestrator.session.session import prepare
from orchestrator.simulation.reserved import update_reserved, validations_s
from orchestrator.telemetry.trace import JOB, Trace, TraceSpan
from tests.support.tiny_job import make_job

OVERRIDES = ["algorithm.kl.coef=0.1",
    "data.prompts_per_step=2", "functions.generate.usd_per_hour=3600.0", "functions.train.usd_per_hour=7200.0",
]  # fmt: skip
STARTS = {"generate": 0.5, "reward": 0.25, "train": 0.25}
WORK = {"samples": 8, "tokens": 96}
COUNTS = {
    "prefill_tokens": 4.0, "prefill_s": 0.2, "decode_tokens": 32.0, "decode_steps": 8.0, "decode_s": 0.7,
    "samples": 4.0, "prompt_tokens": 16.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"), steps=4).file


@pytest.fixture(scope="module")
def run(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps: 2 prompts x 4 samples of 8 tokens; generate 1 s on each of two replicas, reward 0.5 s, train 2 s."""
    path = tmp_path_factory.mktemp("runs") / "made"
    job = load_job(file, OVERRIDES)
    directory, source = RunDirectory.create(path, job), PromptSource.load(job)
    trace = Trace(path / "trace.json", now_s=0.0, unix_s=0.0)

    async def write() -> None:
        journal = await Journal.open(AsyncExchange(directory.open_exchange(job)))
        cursor = Cursor.start(job.seed)
        for step in range(3):
            metrics: dict[str, float] = {}
            if step:
                draw = Draw(source, cursor, 2)
                draw.next()
                cursor = draw.cursor
                metrics = {f"planner/start_s/{name}": seconds for name, seconds in STARTS.items()}
                metrics |= {"perf/total_num_tokens": 96.0, "response_length/mean": 8.0, "prompt_length/mean": 4.0}
                at = 10.0 * step
                spans = [TraceSpan(JOB, "step", f"step {step}", at, at + 5, {"lengths": [[8] * 4] * 2})]
                for name, operation, begin, end, counts in (
                    ("generate-0", "generate", 1.0, 2.0, COUNTS), ("generate-1", "generate", 1.0, 2.0, COUNTS),
                    ("reward-0", "score", 2.0, 2.5, WORK), ("train-0", "train", 2.5, 4.5, WORK),
                ):  # fmt: skip
                    function = name.partition("-")[0]
                    start = {} if name == "generate-1" else {"start_s": STARTS[function]}
                    spans.append(TraceSpan(function, name, operation, at + begin, at + end, {**counts, **start}))
                trace.write(spans, [], at + 5)
            history = {"data": source.digest, "cursor": cursor.to_json(), "metrics": {}}
            await journal.commit(history=history, pointers={"versions": {}}, observed={"metrics": metrics})

    asyncio.run(write())
    trace.close()
    return path


@pytest.fixture
def found(file: Path, run: Path) -> Forecast:
    return forecast(prepare(load_job(file, OVERRIDES)), RunDirectory.open(run))


def test_a_runs_steps_are_read_back_with_their_prompts_lengths_and_calls(file: Path, run: Path) -> None:
    job = load_job(file, OVERRIDES)
    steps = finished_steps(RunDirectory.open(run), PromptSource.load(job))
    assert len(steps) == 2
    ids = [p.prompt_id for step in steps for p in step.prompts]
    assert len(set(ids)) == 4  # two steps of one epoch
    assert [list(step.by_prompt) for step in steps] == [ids[:2], ids[2:]]
    assert steps[0].lengths == [[8] * 4] * 2
    calls = [(c.function, c.cold, c.start_s, round(c.work_s, 6)) for c in steps[1].calls]
    assert calls == [
        ("generate", True, 0.5, 1.0), ("generate", False, 0.0, 1.0), ("reward", True, 0.25, 0.5),
        ("train", True, 0.25, 2.0),
    ]  # fmt: skip


def test_a_step_and_the_job_take_and_cost_what_their_parts_do(found: Forecast) -> None:
    step_s = 0.5 + 1.0 + 0.25 + 0.5 + 0.25 + 2.0  # each function starts when it is needed, and then goes
    step_s += 1.0  # in which no call was open
    step_usd = 2 * (0.5 + 1.0) * 1.0 + (0.25 + 2.0) * 2.0
    assert found.first.predicted_step_s == pytest.approx(step_s, rel=0.01)
    assert found.steady.predicted_step_s == pytest.approx(step_s, rel=0.01)
    assert found.steady.predicted_cost_usd == pytest.approx(step_usd, rel=0.01)
    assert found.job_s == pytest.approx(4 * step_s, rel=0.01)
    assert found.job_usd == pytest.approx(4 * step_usd, rel=0.01)
    assert found.unknown == ["reference"]  # the run made no call of it


def test_replicas_over_time_are_those_of_the_plan(found: Forecast) -> None:
    own = {name: [life for life in found.lives if life.function == name] for name in ("generate", "reward", "train")}
    changes = {name: [(round(at_s, 1), count) for at_s, count in steps_of(lives)] for name, lives in own.items()}
    assert changes["generate"][-1] == (1.5, 0)
    assert max(count for _, count in changes["generate"]) == 2
    assert changes["reward"] == [(1.5, 1), (2.2, 0)]
    assert changes["train"] == [(2.2, 1), (4.5, 0)]


def test_the_curve_has_fewer_replicas_slower_and_the_chosen_point(found: Forecast) -> None:
    one, two = found.curve
    assert (one.replicas, two.replicas) == (1, 2)
    assert one.time_s > two.time_s
    assert found.chosen is two


def test_plan_prints(file: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), *OVERRIDES, "--run", str(run)]) == 0
    text = capsys.readouterr().out
    assert "$7.5" in text
    assert "0:22, $3" in text
    assert [line.split()[0] for line in text.splitlines() if "<- chosen" in line] == ["2"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "error: nothing to predict by: name the GPU"),
        (["planner.gpu=L40S"], "planner.gpu wants functions.generate.gpus >= 1, got 0"),
        (["--run", "no-such-run"], "error: no-such-run: no run directory"),
        (["planner.policy=adaptive", "planner.deadline_s=0.1", "--run", "RUN"], "error: planner: deadline of 0.1 s"),
    ],
)  # fmt: skip
def test_plan_refuses_in_one_line(
    words: list[str], line: str, file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(file), *OVERRIDES, *(w.replace("RUN", str(run)) for w in words)]) != 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert line in told


def test_a_run_of_other_data_says_nothing(file: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), f"data.train={file.parent / 'validation.jsonl'}", "--run", str(run)]) == 1
    assert "was trained on other data" in capsys.readouterr().err


def test_a_roofline_knows_the_functions_on_gpus(file: Path) -> None:
    gpus = [f"functions.{name}.gpus=1" for name in ("generate", "reference", "train")]
    job = load_job(file, [*gpus, "planner.gpu=L40S", "model.dtype=bfloat16"])
    found = forecast(prepare(job))
    assert found.unknown == ["reward"]
    assert found.first.predicted_step_s is not None
    assert found.first.predicted_step_s > 25.0  # a cold start


SCENARIO = """
device = "L40S"
model = "Qwen2.5-3B"
gpus = 4
train_gpus = 2
prompts_per_step = 4
samples_per_prompt = 2
max_response_length = 300
steps = 3
"""


def test_simulate_compares_with_serverful(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(SCENARIO + "lengths = { mean = 100.0, sigma = 0.5 }")
    assert main(["simulate", str(tmp_path / "mine.toml"), "--policy", "adaptive"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    held, adaptive = (next(row for row in rows if row[0] == n) for n in ("serverful", "adaptive"))
    assert held[2] == "1.00"
    assert not any(row[0] in ("rlhfuse", "rlhfless") for row in rows)
    assert float(held[4]) == pytest.approx(4 * float(held[1]), rel=0.01)  # four GPUs, held all the time
    assert float(adaptive[2]) == pytest.approx(float(held[1]) / float(adaptive[1]), abs=0.01)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("lengths = { mean = 100.0 }", "lengths: wants mean and sigma, or trace"),
        ("lengths = { trace = 'trace.jsonl' }", "trace.jsonl: has no line for step 1, group 0, index 1"),
        ("lengths = { mean = 9.0, sigma = 1.0 }\nslotz = 3", "slotz: Extra inputs are not permitted"),
        (
            "lengths = { mean = 9.0, sigma = 1.0 }\ntools = { median_s = 1.0, p99_s = 0.5 }",
            "tools: p99_s is 0.5, not above median_s = 1",
        ),
        ("generate_gpus = 8\nlengths = { mean = 9.0, sigma = 1.0 }", "generate_gpus is 8, more than the 4 of gpus"),
    ],
)  # fmt: skip
def test_a_bad_scenario_is_refused_in_one_line(
    lines: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text('{"step": 1, "group": 0, "index": 0, "length": 5}\n')
    (tmp_path / "bad.toml").write_text(SCENARIO + lines)
    assert main(["simulate", str(tmp_path / "bad.toml")]) == 2
    assert told in (text := capsys.readouterr().err)
    assert text.count("\n") == 1


def test_a_scenario_or_goal_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "3b-dpo"]) == 2
    assert "wants a TOML file, or one of 3b-grpo-gsm8k" in capsys.readouterr().err
    assert main(["simulate", "3b-grpo-gpqa", "--deadline-s", "-1"]) == 2
    assert "deadline_s is -1.0 (wants more than 0)" in capsys.readouterr().err
    assert main(["simulate", "3b-grpo-gpqa", "--policy", "rlhfuse", "--objective", "cost"]) == 2
    assert "are for adaptive, which is not among the policies" in capsys.readouterr().err


@pytest.fixture
def replayable(run: Path, tmp_path: Path) -> Path:
    """The run made by hand, as one of a job without a reference model: it has calls of all its functions."""
    path = tmp_path / "again"
    shutil.copytree(run, path)
    job = tomllib.loads((path / "job.toml").read_text())
    del job["algorithm"]
    (path / "job.toml").write_text(tomli_w.dumps(job))
    return path


def test_a_run_is_replayed_with_its_lengths_and_measured_times(
    replayable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(replayable), "--policy", "adaptive"]) == 0
    text = capsys.readouterr().out
    assert "2 steps" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    # The first step starts generate (0.5 s); a call each of 1, 0.5 and 2 s.
    assert float(rows["serverful"][1]) == pytest.approx((0.5 + 3.5 + 3.5) / 2, rel=0.15)
    assert float(rows["adaptive"][4]) < float(rows["serverful"][4])


def test_reserved_machines_are_held_for_the_time_that_the_same_steps_take_on_them(replayable: Path) -> None:
    directory = RunDirectory.open(replayable)
    assert "has no closed books" in update_reserved(directory)["why"], "nothing to compare with"
    (replayable / "reserved.json").unlink()
    specs = [FunctionSpec("generate", "generate", usd_per_hour=3600.0)]
    ledger = Ledger(replayable / "cost.json", specs, next_step=0, now_s=0.0)
    for step in range(3):
        end_s = 10.0 * step + 9.0
        ledger.close_step(step, [Usage("generate", "generate-0", 0.0, end_s, 1.0)], end_s)
    found = update_reserved(directory)
    wall_s = found["dedicated"]["wall_s"]
    assert wall_s == pytest.approx(0.5 + 2 * 3.5, rel=0.15), "generate starts once; calls of 1, 0.5 and 2 s a step"
    assert found["steps"] == 2
    assert found["used"] == {"wall_s": 29.0, "replica_s": 29.0, "gpu_s": 0.0, "usd": pytest.approx(29.0)}
    assert found["dedicated"]["replica_s"] == pytest.approx(4 * wall_s), "two of generate, one of reward, one of train"
    assert found["dedicated"]["usd"] == pytest.approx((2 * 1.0 + 2.0) * wall_s), "dollars a second; reward has no price"
    together = found["colocated"]
    assert together["replica_s"] == pytest.approx(2 * together["wall_s"]), "as many as the function with the most has"
    assert together["usd"] == pytest.approx(2 * 2.0 * together["wall_s"]), "at the dearest price"
    assert update_reserved(directory) == found == json.loads((replayable / "reserved.json").read_text())


def test_a_run_is_held_while_its_validations_calls_are_at_work(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", now_s=0.0, unix_s=0.0)
    spans = [TraceSpan(JOB, "testing", f"step {step}", at, at + 10) for step, at in ((0, 0.0), (2, 100.0))]
    spans += [TraceSpan("generate", f"g{k}", "generate", start, stop) for k, start, stop in
              ((0, 2.0, 5.0), (1, 4.0, 6.0), (0, 50.0, 90.0), (0, 101.0, 103.0))]  # fmt: skip
    trace.write([*spans, TraceSpan("reward", "r0", "score", 6.5, 7.0)], [], 110.0)
    trace.close()
    assert validations_s(tmp_path / "trace.json", 1) == pytest.approx(4.0 + 0.5), "what overlaps counts once"
    assert validations_s(tmp_path / "trace.json", 2) == pytest.approx(6.5)


def test_a_trace_that_lacks_something_is_refused_in_one_line(
    run: Path, replayable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = replayable / "trace.json"
    whole = trace.read_text()

    def told(path: Path) -> str:
        assert main(["simulate", str(path)]) == 1
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    assert "trace.json: has no calls with counts of reference" in told(run)
    trace.write_text(whole.replace('"samples":8,', ""))
    assert "trace.json: has no calls with counts of reward, train" in told(replayable)
    trace.write_text(whole.replace('"lengths":[[8,8,8,8],[8,8,8,8]]', '"lengths":[]', 1))
    assert "trace.json: lacks the lengths of step 1: a replay needs every step from the first" in told(replayable)
    trace.write_text(whole.replace("[8,8,8,8],[8,8,8,8]", "[8,8,8,8]", 1))
    assert "step 1 has the lengths of 1 prompts, the journal says that it drew 2" in told(replayable)
    trace.write_text(whole.replace("[8,8,8,8],[8,8,8,8]", "[8,8,8],[8,8,8,8]", 1))
    assert "step 1, group 0 has 3 lengths, rollout.n is 4" in told(replayable)
    trace.unlink()
    assert "has no finished step with its calls: nothing to predict by" in told(replayable)
