"""Run by bench/parity_step.py in an environment with TRL 1.16: one step of GRPOTrainer on given weights and samples.

    python parity_step_peer.py MODEL_DIRECTORY INPUT.npz OUTPUT.npz
INPUT has prompts, responses, scores and the cases (JSON); OUTPUT loss, gradient norm and parameters of each case.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(vocabulary)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="w2", pad_token="w0", unk_token="w0", padding_side="left"
    )


def run(model_directory: str, data: dict[str, np.ndarray], case: dict[str, Any]) -> dict[str, np.ndarray]:
    lengths, n = data["response_lengths"], int(data["n"])
    ends = np.cumsum(lengths)
    responses = [data["responses"][end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
    prompt_ends = np.cumsum(data["prompt_lengths"])
    prompts = [data["prompts"][e - k : e].tolist() for e, k in zip(prompt_ends, data["prompt_lengths"], strict=True)]
    texts = [" ".join(f"w{t}" for t in prompt) for prompt in prompts]
    known = {text: i for i, text in enumerate(texts)}
    rows_of_call: list[int] = []

    def rollout(asked: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        seen: dict[int, int] = {}
        rows_of_call.clear()
        for text in asked:
            group = known[text]
            rows_of_call.append(group * n + seen.get(group, 0))
            seen[group] = seen.get(group, 0) + 1
        return {
            "prompt_ids": [prompts[row // n] for row in rows_of_call],
            "completion_ids": [responses[row] for row in rows_of_call],
            "logprobs": None,
        }

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(data["scores"][row]) for row in rows_of_call]

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    count = len(responses)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=count,
        num_generations=n,
        gradient_accumulation_steps=1,
        max_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_completion_length=int(max(lengths)),
        lr_scheduler_type="constant",
        save_strategy="no",
        use_bias_correction_kl=False,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        **case["trl"],
    )
    trainer = GRPOTrainer(
        model=model if case["trl"].get("beta", 0.0) == 0.0 else model_directory,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer(model.config.vocab_size),
        rollout_func=rollout,
    )
    trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    out = {"loss": np.array(log["loss"]), "grad_norm": np.array(log["grad_norm"])}
    own = trainer.accelerator.unwrap_model(trainer.model)
    return out | {f"weights/{name}": p.detach().cpu().numpy() for name, p in own.named_parameters()}


def main() -> None:
    model_directory, source, target = sys.argv[1:]
    data = dict(np.load(source))
    result = {}
    for name, case in json.loads(str(data["cases"])).items():
        result |= {f"{name}|{key}": value for key, value in run(model_directory, data, case).items()}
    np.savez(target, **result)


if __name__ == "__main__":
    main()
