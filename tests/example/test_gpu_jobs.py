"""The example jobs for GPUs pass all that is checked of a job before it starts, with a Hub that has their ids.

The models there are small ones with the real ones' context; rows have the data sets' columns. That this machine has
their GPUs and vLLM is all that `run` checks besides.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from tests.support.hub import Hub, Repository, serve_hub
from tests.support.tiny_job import ENV

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = sorted((EXAMPLES / "gpu").glob("*.toml"))
PLAN = """
import sys
from orchestrator.commands.main import main
print("[")
for number, job in enumerate(sys.argv[1:]):
    print("," * bool(number), flush=True)
    assert main(["plan", job, "--json"]) == 0, job
print("]")
"""
GSM8K = [{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}] * 300
CODE = [
    {
        "problem": "Add the numbers.", "starter_code": "", "metadata": "{}",
        "tests": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin", "metadata": {}}]),
    }
] * 64  # fmt: skip
PROMPTS = [{"prompt": [{"role": "user", "content": f"Say {n}."}]} for n in range(300)]


def rows(values: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(values), file)
    return file.getvalue()


def model(**changes: Any) -> Repository:
    files = {path.name: path.read_bytes() for path in (EXAMPLES / "arithmetic" / "model").iterdir()}
    config = json.loads(files["config.json"]) | {"max_position_embeddings": 32768} | changes
    return Repository(files | {"config.json": json.dumps(config).encode()})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-Coder-3B"):
            hub.repositories[f"models/Qwen/{name}-Instruct"] = model()
        score = model(architectures=["LlamaForSequenceClassification"], num_labels=1)
        hub.repositories["models/Skywork/Skywork-Reward-V2-Qwen3-0.6B"] = score
        both = {f"main/{split}-00000-of-00001.parquet": rows(GSM8K) for split in ("train", "test")}
        hub.repositories["datasets/openai/gsm8k"] = Repository(both)
        prompts = {"data/train-00000-of-00001.parquet": rows(PROMPTS)}
        hub.repositories["datasets/trl-lib/ultrafeedback-prompt"] = Repository(prompts)
        tests = {f"lcbv5/{split}-00000-of-00001.parquet": rows(CODE) for split in ("train", "test")}
        hub.repositories["datasets/agentica-org/DeepCoder-Preview-Dataset"] = Repository(tests)
        yield hub


def test_the_jobs_for_gpus_are_ones(hub: Hub, tmp_path: Path) -> None:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    clean = {name: value for name, value in ENV.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", PLAN, *JOBS], env=clean | own, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    plans = dict(zip((job.stem for job in JOBS), json.loads(done.stdout), strict=True))
    assert {"gsm8k-0.5b", "gsm8k-7b", "gsm8k-7b-lora", "ppo-reward-model", "code"} == set(plans)
    of_functions = {name: {life["function"] for life in plan["replicas"]} for name, plan in plans.items()}
    assert "train-critic" in of_functions["ppo-reward-model"]
    assert plans["gsm8k-7b"]["later_steps"]["cost_usd"] > 0
