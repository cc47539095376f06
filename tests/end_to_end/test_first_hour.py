"""What a stranger types first works: the smallest job, from its file to its model."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet
from safetensors.numpy import load_file

from orchestrator.job.config import load_job
from orchestrator.job.prompts import PromptSource
from tests.support.tiny_job import ENV, STEPS, Job, command, here

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]

MINIMAL = """
name = "minimal"
steps = 1
[model]
path = "{directory}/model"
[data]
train = "{directory}/train.jsonl"
[rollout]
max_response_length = 8
[reward]
score = "rule:number"
"""


def test_a_job_of_name_steps_model_data_and_reward_runs(job: Job, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(MINIMAL.format(directory=job.directory))
    done = command("run", tmp_path / "job.toml", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert not any(key.startswith("val-core/") for row in rows for key in row)


def test_a_written_job_runs_as_it_is(job: Job, tmp_path: Path) -> None:
    """GSM8K's columns: question and answer; a model without a chat template, whose context is short."""
    rows = [{"question": f"{a}+{a}=", "answer": f"{a}+{a} is <<{2 * a}>>\n#### {2 * a}"} for a in range(8)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows[:2]), tmp_path / "test.parquet")
    written = here("init", job.directory / "model", tmp_path / "train.parquet", "-o", tmp_path / "job.toml")
    assert written.returncode == 0, written.stderr
    found = load_job(tmp_path / "job.toml")
    assert (found.name, found.recipe, found.model.dtype) == ("train-grpo", "grpo", "float32")
    assert (found.data.prompt_key, found.data.apply_chat_template) == ("question", False)
    assert found.data.validation == str(tmp_path / "test.parquet")
    assert found.reward.score == "rule:number"
    assert (found.data.prompts_per_step, found.steps, found.data.max_prompt_length) == (2, 4, 4)
    assert found.rollout.max_response_length == 64 - 4
    for recipe, table in (("sft", "train"), ("reward_model", "critic")):  # what a recipe has no use for is not there
        file = tmp_path / f"{recipe}.toml"
        words = (job.directory / "model", tmp_path / "train.parquet", "--recipe", recipe, "-o", file)
        assert here("init", *words).returncode == 0
        written_job = tomllib.loads(file.read_text())
        assert "n" not in written_job["rollout"]
        assert (table in written_job, list(written_job["functions"])) == (True, [table])
        assert ("reward" in written_job, "validation" in written_job["data"]) == (recipe == "sft", recipe == "sft")
    again = here("init", job.directory / "model", tmp_path / "train.parquet", "-o", tmp_path / "job.toml")
    assert "job.toml: is there already; name another file with --output" in again.stderr
    done = command("run", tmp_path / "job.toml", "--run-dir", tmp_path / "run", "steps=1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("rows", "score", "key"),
    [
        ([{"prompt": "1+1=", "answer": "2"}] * 40, "rule:number", None),
        ([{"prompt": "1+1=", "answer": "two"}] * 40, "rule:exact", None),
        ([{"problem": "1+1=", "solution": "it is \\boxed{2}"}] * 40, "rule:boxed", "problem"),
        ([{"input": "1+1="}] * 40, "reward.py:compute_score", None),
    ],
)
def test_what_is_found_out(job: Job, tmp_path: Path, rows: list[dict[str, str]], score: str, key: str | None) -> None:
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    shutil.copytree(job.directory / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    written = here("init", tmp_path / "model", tmp_path / "sums.jsonl", "-o", tmp_path / "new" / "job.toml")
    assert written.returncode == 0, written.stderr
    found = load_job(tmp_path / "new" / "job.toml")
    assert str(found.reward.score).removeprefix(f"{tmp_path}/new/") == score
    assert (tmp_path / "new" / "reward.py").exists() == (score == "reward.py:compute_score")
    assert (found.data.prompt_key, found.data.validation_fraction) == (key, 0.05)
    assert found.data.apply_chat_template
    source = PromptSource.load(found)
    assert (len(source.train.rows), len(source.held_out.rows)) == (38, 2)
    assert {len(tokens) for tokens in source.train.tokens} == {5} == {found.data.max_prompt_length}, "with the template"


def test_status_says_why_and_resume_takes_more_steps(job: Job, tmp_path: Path) -> None:
    shutil.copytree(job.directory, tmp_path / "job")
    run, reward = tmp_path / "runs" / "tiny", tmp_path / "job" / "reward.py"
    good = reward.read_text()
    reward.write_text(good.replace("    return", "    raise ValueError('no such luck')\n    return"))
    assert command("run", tmp_path / "job" / "job.toml", "--run-dir", run, "steps=1").returncode != 0
    assert "failed: " in here("status", run).stdout
    told = json.loads(here("status", run, "--json").stdout)
    assert told["state"] == "failed"
    assert "no such luck" in told["reason"]
    assert f"once that is mended, go on with `rlhf-orchestrate resume {run}`" in told["reason"]
    reward.write_text(good)
    assert command("resume", run).returncode == 0
    assert json.loads(here("status", run, "--json").stdout)["state"] == "finished"
    refused = here("resume", run, "steps=9", "train.lr=0.5", "rollout.slots=4")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: train.lr: what ")
    assert tomllib.loads((run / "job.toml").read_text())["steps"] == 1, "what was refused has changed nothing"
    more = command("resume", run, f"steps={STEPS}", "rollout.slots=4")
    assert more.returncode == 0, more.stderr
    found = json.loads(here("status", run, "--json").stdout)
    assert (found["state"], found["step"], found["steps"]) == ("finished", STEPS, STEPS)
    books = json.loads(here("cost", run, "--json").stdout)
    assert [step["step"] for step in books["steps"]] == [*range(STEPS + 1)]
    assert books["executions"] == 3
    assert books["functions"]["generate"]["replica_s"] > 0


def test_the_model_and_the_adapter_of_a_run(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert here("export", undisturbed, out).returncode == 0
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (undisturbed / "model").iterdir()
    }
    assert "is there already; name a new directory" in here("export", undisturbed, out).stderr
    assert "the job has trained all weights" in here("export", undisturbed, "--adapter").stderr
    words = ("steps=1", "validation.every=0", "model.lora_rank=2", "profile.steps=[1]")
    done = command("run", job.file, "--run-dir", tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    kept = json.loads(here("status", tmp_path / "run", "--json").stdout)["profiles"]
    traces = {
        Path(path).name.split("-")[0]: json.loads(gzip.decompress(Path(path).read_bytes()))
        for path in kept
        if "000001" in path
    }
    for function, operator in (("generate", "aten::matmul"), ("train", "SiluBackward0")):
        assert any(operator in event.get("name", "") for event in traces[function]["traceEvents"]), function
    assert "profiled calls" in here("status", tmp_path / "run").stdout
    refused = here("run", job.file, "--run-dir", tmp_path / "never", "steps=1", "profile.steps=[2]")
    assert refused.stderr.rstrip().endswith("profile.steps: got 2, the job has 1")
    assert here("export", tmp_path / "run", "--adapter").returncode == 0
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(job.directory / "model")
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    peft = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").merge_and_unload().state_dict()
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = 0
    for name, tensor in merged.items():
        torch.testing.assert_close(peft[name], torch.from_numpy(tensor), rtol=1e-6, atol=1e-7)
        changed += not torch.equal(start[name], peft[name])
    assert changed, "the adapter does something"


SCRIPT = """
from orchestrator import run

def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))

JOB = {"name": "python", "steps": 4, "model": {"path": "model"},
       "data": {"train": "train.jsonl", "prompts_per_step": 2},
       "rollout": {"n": 2, "max_response_length": 4}, "reward": {"score": score}}

if __name__ == "__main__":
    import orchestrator.run.directory  # the room of the same name
    from orchestrator import run
    from orchestrator.base.errors import Stopped
    job = run(JOB, ["rollout.n=3"])
    try:
        for event in job:
            print(event.type)
            if event.type == "step" and event.data["step"] == 1:
                job.stop()
    except Stopped as error:
        print(error)
"""


def test_a_job_from_python(job: Job, tmp_path: Path) -> None:
    """A dict, with a function of the script itself; its events; stopped in order. (test_notebook.py has the rest.)"""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "model").symlink_to(job.directory / "model")
    (tmp_path / "train.jsonl").symlink_to(job.directory / "train.jsonl")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0] == "started"
    assert "step" in told
    assert told[-2:] == ["cancelled", "stopped; go on with `rlhf-orchestrate resume runs/python`"]
    assert tomllib.loads((tmp_path / "runs/python/job.toml").read_text())["rollout"]["n"] == 3
