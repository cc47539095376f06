"""A tiny job on real parts: a random Llama with a tokenizer of its own, real processes, the real command line."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.commands.main import main
from tests.support.forked import ForkedCommand, Main

STEPS = 3
MARK = f"RLHF_TEST_SESSION={uuid.uuid4()}"
"""In the environment of every process that these tests start, and of all their descendants."""
os.environ |= dict([MARK.split("=")])
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def make_model(directory: Path, *, head_dim: int = 8) -> None:
    """A random two-layer Llama with four heads over the characters `0-9 + =`."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<eos>", "<pad>", *"0123456789+= "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=4 * head_dim, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


JOB = """
name = "tiny"
steps = {steps}
seed = 1
deterministic = true
[model]
path = "model"
[data]
train = "train.jsonl"
validation = "validation.jsonl"
prompts_per_step = 3
[rollout]
n = 4
max_response_length = 8
slots = 8
[reward]
score = "reward.py:score"
[validation]
every = 2
[train]
lr = 0.01
[functions.generate]
replicas = 2
"""

REWARD = '''
def score(data_source, solution_str, ground_truth, extra_info=None):
    """How much of the response is the digit asked for."""
    return solution_str.count(ground_truth) / max(1, len(solution_str))
'''

RUNNING = {b"functions.server.agent", b"functions.server.forkserver", b"functions.server", b"run", b"resume"}
"""Words of the command lines of orchestrators and functions."""


@dataclass(frozen=True)
class Job:
    directory: Path

    @property
    def file(self) -> Path:
        return self.directory / "job.toml"


def make_job(directory: Path, *, head_dim: int = 8, steps: int = STEPS) -> Job:
    make_model(directory / "model", head_dim=head_dim)
    for name, start in (("train", 0), ("validation", 50)):
        lines = [
            json.dumps(
                {
                    "data_source": "sums",
                    "prompt": f"{a}+{a + 1}=",
                    "reward_model": {"ground_truth": str((2 * a + 1) % 10)},
                }
            )
            for a in range(start, start + 8)
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "reward.py").write_text(REWARD)
    (directory / "job.toml").write_text(JOB.format(steps=steps))
    return Job(directory)


def arguments(*words: object, module: str = "orchestrator.commands") -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def command(*words: object, timeout_s: float = 250) -> subprocess.CompletedProcess[str]:
    """`rlhf-orchestrate WORDS`, to its end."""
    told = [*map(str, words)]
    process = ForkedCommand(main, told, ENV)
    output, errors = process.communicate(timeout_s)
    return subprocess.CompletedProcess(told, process.wait(), output, errors)


def here(*words: object) -> subprocess.CompletedProcess[str]:
    """`rlhf-orchestrate WORDS` in this process, seconds faster: for what looks on or is refused, and starts nothing."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            code = main([*map(str, words)])
        except SystemExit as end:  # argparse's
            code = int(end.code or 0)
    return subprocess.CompletedProcess([*map(str, words)], code, output.getvalue(), errors.getvalue())


class Background:
    """`rlhf-orchestrate WORDS`, to be killed."""

    def __init__(self, *words: object, main: Main = main) -> None:
        self.process = ForkedCommand(main, [*map(str, words)], ENV, merged=True)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 200) -> None:
        """Returns when the condition holds; fails with the process's output when it ends before that."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            asked_s = time.thread_time()
            if condition():
                return
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"ended too early: {self.process.communicate()[0]}")
            assert time.monotonic() < give_up_s, "the awaited condition never came"
            time.sleep(max(0.005, 4 * (time.thread_time() - asked_s)))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


class Seen:
    """Counts the events of a run's calls that lie in its exchange, or have lain there when it was called before."""

    def __init__(self, run: Path) -> None:
        self.run, self.events = run, set[Path]()

    def __call__(self) -> int:
        for call in (self.run / "calls").glob("*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                self.events |= set((call / "events").iterdir())
        return len(self.events)


TIMED = ("timing_s/", "step_time_s/", "timing_per_token_ms/", "perf/", "cost/", "planner/", "rollout/", "time")


def history(run: Path) -> list[dict[str, Any]]:
    """What the journal promises, without its pointers and timings."""
    records = []
    for path in sorted((run / "journal").glob("*.json")):
        value = json.JSONDecoder().raw_decode(path.read_text())[0]
        records.append({key: value[key] for key in ("step", "parent", "history")})
    return records


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock or a bill says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]


def model(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "model").iterdir())}


def assert_same(run: Path, undisturbed: Path) -> None:
    assert history(run) == history(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    assert model(run) == model(undisturbed)


def assert_nothing_left() -> None:
    """No orchestrator and no function that this test session started is left."""
    deadline_s = time.monotonic() + 60
    while pids := left():
        assert time.monotonic() < deadline_s, f"processes are left: {pids}"
        time.sleep(0.1)


def left() -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _ours(pid)]


def _ours(process: int) -> bool:
    """But for the server of tests/support/forked.py and what it forks itself; agents of that have its words."""
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes()
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        forked = any(word.startswith(b"from multiprocessing.forkserver ") for word in words)
        kept = forked and os.getpid() in ((parent := _parent(process)), _parent(parent))
        return MARK.encode() in environment and (forked or not RUNNING.isdisjoint(words)) and not kept
    except OSError:
        return False


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
