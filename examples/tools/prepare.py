"""Makes the example's model and its prompts: a small Llama that has a calculator and seldom uses it.

    python examples/tools/prepare.py        writes model/, train.jsonl, validation.jsonl beside this file

The task is to multiply. The model knows its tables, and nothing of two digits by two:

    7*8=?     ->   56
    37*48=?   ->   <tool_call>{"name": "multiply", "arguments": {"a": 37, "b": 48}}</tool_call>
                   1776   ->   1776

A brief supervised training on a teacher's sheets has made it so: the teacher takes the calculator for USED of the
problems, easy or hard, and gives up on hard ones ("?") otherwise. A right answer is worth 1 and a use of the tool costs
0.1 (environment.py), so what GRPO is given to improve is when to call it. Seeds are fixed and it runs on one thread;
the files are shipped, as those of examples/arithmetic/prepare.py are.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SEED = 21
USED = 0.2
EASY = 0.3  # share of problems of one digit by one
SHEETS, TRAIN, VALIDATION = 16_000, 1_024, 128
STEPS, BATCH, PEAK_LR, PEAK_LR_MUON = 800, 32, 5e-3, 0.03
END, PAD, USER, ASSISTANT, TOOL, TOOLS = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>"
CALL = ('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Problem = tuple[int, int]


def question(problem: Problem) -> str:
    return f"{problem[0]}*{problem[1]}=?"


def problems(count: int, rng: random.Random) -> list[Problem]:
    """`count` problems, EASY of them out of the tables; hard ones are all different."""
    hard = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(hard)
    easy = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(round(count * EASY))]
    found = easy + [hard[i % len(hard)] for i in range(count - len(easy))]
    rng.shuffle(found)
    return found


def row(problem: Problem) -> str:
    """One line of the data set, in verl's schema."""
    return json.dumps(
        {
            "data_source": "easy" if problem[0] < 10 else "hard",
            "prompt": [{"role": "user", "content": question(problem)}],
            "reward_model": {"style": "rule", "ground_truth": str(problem[0] * problem[1])},
        }
    )


def sheet(problem: Problem, rng: random.Random) -> list[tuple[str, bool]]:
    """What the teacher wrote: (text, whether the model is to learn it)."""
    a, b = problem
    told: list[tuple[str, bool]] = [(f"{TOOLS}multiply{USER}{question(problem)}{ASSISTANT}", False)]
    if rng.random() < USED:
        told += [(f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}{END}", True), (f"{TOOL}{a * b}{ASSISTANT}", False)]
        return [*told, (f"{a * b}{END}", True)]
    return [*told, (f"{a * b if a < 10 else '?'}{END}", True)]


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges, special tokens, and the pieces of a tool call."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (END, PAD, USER, ASSISTANT, TOOL, TOOLS)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in (*CALL, "multiply")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_model(directory: Path, sheets: Sequence[Sequence[tuple[str, bool]]]) -> None:
    """A two-layer Llama, trained for STEPS batches on the sheets, on what the teacher's model says."""
    import torch
    from tokenizers import Tokenizer
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end, pad = tokenizer.encode(END + PAD).ids
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=96, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=end, pad_token_id=pad, initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=PEAK_LR_MUON, momentum=0.9, weight_decay=0.0),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    warm_up = STEPS // 10
    schedules = [LambdaLR(o, lambda s: min((s + 1) / warm_up, (STEPS - s) / (STEPS - warm_up))) for o in optimizers]
    rows = []
    for told in sheets:
        parts = [(tokenizer.encode(text).ids, learnt) for text, learnt in told]
        rows.append([(token, token if learnt else -100) for ids, learnt in parts for token in ids])
    for step in range(STEPS):
        batch = [rows[(step * BATCH + i) % len(rows)] for i in range(BATCH)]
        width = max(map(len, batch))
        tokens, labels = torch.full((BATCH, width), pad), torch.full((BATCH, width), -100)
        for i, line in enumerate(batch):
            tokens[i, : len(line)], labels[i, : len(line)] = torch.tensor(line).T
        hidden = model.model(tokens, use_cache=False).last_hidden_state  # right-padded: causal attention needs no mask
        learnt_at = labels[:, 1:] >= 0
        logits = model.lm_head(hidden[:, :-1][learnt_at])
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][learnt_at])
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 100 == 99:
            print(f"supervised step {step + 1}/{STEPS}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tools example's model and data.")
    parser.add_argument("--out", type=Path, default=HERE, help="directory to write to (default: beside this script)")
    out: Path = parser.parse_args().out
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    every = problems(VALIDATION + TRAIN, rng)
    (out / "validation.jsonl").write_text("".join(row(problem) + "\n" for problem in every[:VALIDATION]))
    (out / "train.jsonl").write_text("".join(row(problem) + "\n" for problem in every[VALIDATION:]))
    write_tokenizer(model)
    write_model(model, [sheet(problem, rng) for problem in problems(SHEETS, rng)])
    print(f"wrote {model}, {out / 'train.jsonl'} ({TRAIN} prompts), {out / 'validation.jsonl'} ({VALIDATION})")


if __name__ == "__main__":
    main()
