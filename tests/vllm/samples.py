"""Requests for the tests, and what comes back for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.vllm.engine import VllmEngine

VOCABULARY = 160
CONTEXT = 8192

Logprobs = Callable[[Path, Request, Sample, float], torch.Tensor]


def requests(prompts: Sequence[Sequence[int]], samples: int = 1) -> list[Request]:
    none, no = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return [
        Request(group * samples + index, group, index, np.array(prompt, np.int32), none, no)
        for group, prompt in enumerate(prompts)
        for index in range(samples)
    ]


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCABULARY, length).tolist() for length in lengths]


def run(engine: VllmEngine, wanted: Sequence[Request], sampling: Sampling) -> dict[int, Sample]:
    return {sample.number: sample for sample in engine.generate(wanted, sampling, lambda: False)}


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
