"""Run by bench/against_trl.py in an environment with TRL 1.16: GRPOTrainer on a given task, step by step.

    python against_trl_peer.py TASK.json OUTPUT.json

TASK: model, data (JSONL, verl's schema), reward (<file.py>:<function>, verl's signature), n, prompts_per_step,
max_response_length, steps, lr, seeds, threads. OUTPUT: {seed: [a dict a step]}.

TRL as its users run it on a CPU, with what makes it slower turned off: fp32, no gradient checkpointing (its default is
on), no KL, no checkpoints, no reports; a step's samples in one micro-batch; prompts in the file's order.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is in an environment of its own
    """Adds up wall time of generation and reward; the rest of a step is log-probabilities, loss and optimizer."""

    gen_s = reward_s = 0.0
    lengths: Sequence[int] = ()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.gen_s += time.perf_counter() - begun_s
        self.lengths = [len(ids) for ids in result[0]]
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.perf_counter()
        result = super()._calculate_rewards(*args, **kwargs)
        self.reward_s += time.perf_counter() - begun_s
        return result


class Clock(TrainerCallback):
    """Steps from one log line to the next, like the job's from one metrics line to the next."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.before = self.now()
        self.steps: list[dict[str, float]] = []

    def now(self) -> tuple[float, float, float, float]:
        done = (0.0, 0.0) if self.trainer is None else (self.trainer.gen_s, self.trainer.reward_s)
        return time.perf_counter(), time.process_time(), *done

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.steps:
            self.before = self.now()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.trainer is None or "reward" not in (logs or {}):
            return
        now = self.now()
        wall_s, cpu_s, gen_s, reward_s = (b - a for a, b in zip(self.before, now, strict=True))
        self.before = now
        self.steps.append(
            {
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "gen_s": gen_s,
                "reward_s": reward_s,
                "train_s": wall_s - gen_s - reward_s,
                "length": statistics.fmean(self.trainer.lengths),
                "reward": float(logs["reward"]),
                "loss": float(logs["loss"]),
                "grad_norm": float(logs["grad_norm"]),
            }
        )


def load_reward(where: str) -> Callable[..., float]:
    file, _, name = where.rpartition(":")
    spec = importlib.util.spec_from_file_location("task_reward", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., float] = getattr(module, name)
    return function


def run(task: dict[str, Any], seed: int) -> list[dict[str, float]]:
    score = load_reward(task["reward"])
    count = task["prompts_per_step"] * task["steps"]
    rows = [json.loads(line) for line in Path(task["data"]).read_text().splitlines()][:count]

    def reward(completions: list[Any], data_source: list[str], reward_model: list[Any], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [
            score(source, text, model["ground_truth"], None)
            for source, text, model in zip(data_source, texts, reward_model, strict=True)
        ]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=task["prompts_per_step"] * task["n"],
        num_generations=task["n"],
        gradient_accumulation_steps=1,
        max_steps=task["steps"],
        max_completion_length=task["max_response_length"],
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        loss_type="grpo",
        beta=0.0,
        seed=seed,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(task["model"], padding_side="left"),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()
    return clock.steps


def main() -> None:
    source, target = sys.argv[1:]
    task = json.loads(Path(source).read_text())
    torch.set_num_threads(task["threads"])
    Path(target).write_text(json.dumps({str(seed): run(task, seed) for seed in task["seeds"]}))


if __name__ == "__main__":
    main()
