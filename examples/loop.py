"""A whole GRPO job in one file: where a reader of this project begins.   python examples/loop.py

            rows of the data set
                    |
    GenerateFunction: n samples of each prompt, with the log-probability of every token
                    |  SampleBatch
    RewardFunction: one score for each sample                   --+
                    |  Columns                                    |  all through the exchange, here a directory:
    TrainFunction: advantages in the group, loss, AdamW           |  a call names what it reads, an event what it wrote
                    |  the next version of the policy           --+
            and again, with this version

A function is a plain object with one method: `call(Call, Context)` yields events, `done` last. Here the three live in
this process and take turns. orchestrator/ makes the same calls, with weights that are the same to the bit
(tests/example/test_loop.py), and adds what is left out here: functions as processes or containers that exist only
while they work, many replicas of each, stages that overlap, a journal to go on from after a crash, what it all costs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import Call, Event, Ref, Version
from functions.call.function import Context, Function
from functions.exchange.open import open_exchange
from functions.generate.function import GenerateFunction
from functions.reward.function import RewardFunction
from functions.train.function import TrainFunction
from functions.weights.base import import_model

EXAMPLE = Path(__file__).parent / "arithmetic"
STEPS, PROMPTS, N, MAX_RESPONSE_LENGTH = 40, 32, 8, 20
TRAIN = {
    "advantage": "grpo",  # (score - mean of the prompt's group) / standard deviation of the group
    "loss": "vanilla",  # PPO's clipped ratio; with one update a step the ratio is 1
    "aggregation": "seq-mean-token-mean",
    "optimizer": {"lr": 5e-4},
}
Row = Mapping[str, Any]


class Loop:
    """The policy's newest version, and the functions that lead to the next one. Files are kept under `directory`."""

    def __init__(self, directory: Path) -> None:
        self.exchange, self.scratch = open_exchange(str(directory / "exchange"), "loop"), directory / "scratch"
        self.scratch.mkdir()
        self.generator = GenerateFunction(device="cpu", deterministic=True)
        self.scorer = RewardFunction()
        self.trainer = TrainFunction(device="cpu", threads=1)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(EXAMPLE / "model")
        self.policy: Version = import_model(self.exchange, "policy", EXAMPLE / "model")  # version 0

    def step(self, number: int, rows: Sequence[Row], *, seed: int) -> Mapping[str, float]:
        """One step of GRPO on the prompts of `rows`: `policy` is the next version afterwards. Returns its metrics."""
        samples = self.generate(f"{number}.generate", rows, n=N, temperature=1.0, seed=seed)
        scores = self.score(f"{number}.score", rows, samples)
        inputs = {"samples": samples, "columns": [scores]}
        done = self.call(self.trainer, Call(f"{number}.train", "train", inputs, {"policy": self.policy}, TRAIN))[-1]
        self.policy = Version.from_json(done.data["version"])
        metrics: Mapping[str, float] = done.data["metrics"]  # by verl's names
        return metrics

    def generate(self, id: str, rows: Sequence[Row], *, n: int, temperature: float, seed: int = 0) -> list[Ref]:
        """`n` samples of each row's prompt (group g is row g), as refs of SampleBatches; temperature 0 is greedy."""
        prompts = [
            self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            for row in rows
        ]
        empty = SampleBatch.of_prompts(prompts, samples_per_prompt=n, version=self.policy.number)
        inputs = {"samples": [self.exchange.put(f"prompts/{id}", empty.encode())]}
        params = {"max_response_length": MAX_RESPONSE_LENGTH, "temperature": temperature, "seed": seed}
        events = self.call(self.generator, Call(id, "generate", inputs, {"policy": self.policy}, params))
        return [event.ref for event in events if event.kind == "samples" and event.ref is not None]

    def score(self, id: str, rows: Sequence[Row], samples: Sequence[Ref]) -> Ref:
        """What examples/arithmetic/reward.py says of each sample: Columns with the column "score"."""
        by_group = json.dumps({str(group): row for group, row in enumerate(rows)}).encode()
        inputs = {"samples": samples, "rows": [self.exchange.put(f"rows/{id}", by_group)]}
        params = {"score": f"{EXAMPLE / 'reward.py'}:compute_score"}
        done = self.call(self.scorer, Call(id, "score", inputs, {"policy": self.policy}, params))[-1]
        assert done.ref is not None, "a scorer that fails raises"
        return done.ref

    def pass_rate(self, id: str, rows: Sequence[Row]) -> float:
        """Share of the prompts whose greedy answer is right."""
        samples = self.generate(f"{id}.generate", rows, n=1, temperature=0.0)
        scores = Columns.decode(self.exchange.get(self.score(f"{id}.score", rows, samples)))
        return float(np.mean(scores.sample["score"]))

    def call(self, function: Function, call: Call) -> list[Event]:
        """What functions/server does behind HTTP, with heartbeats, deadlines, cuts and retries."""
        return list(function.call(call, Context(self.exchange, str(self.scratch))))


def read_rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text().splitlines()]


def main(steps: int = STEPS) -> None:
    train, held_out = read_rows("train.jsonl"), read_rows("validation.jsonl")
    with TemporaryDirectory() as directory:
        loop = Loop(Path(directory))
        print(f"pass rate {loop.pass_rate('before', held_out):.3f} of {len(held_out)} held-out prompts")
        for number in range(1, steps + 1):
            metrics = loop.step(number, random.Random(number).sample(train, PROMPTS), seed=number)
            print(
                f"step {number:2}  reward {metrics['critic/score/mean']:.3f}  version {loop.policy.number}", flush=True
            )
        print(f"pass rate {loop.pass_rate('after', held_out):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
