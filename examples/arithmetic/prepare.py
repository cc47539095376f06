"""Makes the example's model and its prompts: a small Llama that adds digits as a careless teacher taught it.

    python examples/arithmetic/prepare.py        writes model/, train.jsonl, validation.jsonl beside this file

The task is to add up to six digits from the right, a running sum after each:

    5+8+7=?   ->   07 15 20

The teacher forgets to carry in FORGET of the places where a sum passes a ten (07 05 10 above, after one such slip), and
a brief supervised training on the teacher's sheets makes a model that does the same: it can carry, but mostly does not.
That is what GRPO is given to improve. The prompts that it trains on and those that it is measured on are different
problems, and neither were on the teacher's sheets.

The files are shipped; this script is how they were made. Seeds are fixed and it runs on one thread: the data and the
tokenizer come out the same to the byte everywhere, the weights on machines whose arithmetic agrees.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SEED = 20
TERMS = (2, 3, 4, 5, 6)
FORGET = 0.75
EASY = 0.34  # share of problems whose sum never passes a ten
SHEETS, TRAIN, VALIDATION = 16_000, 2_048, 256
STEPS, BATCH, PEAK_LR, PEAK_LR_MUON = 1_000, 32, 5e-3, 0.03
END, PAD, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def running_sums(digits: Sequence[int], forgotten: Sequence[bool]) -> list[int]:
    """Sums from the right; where one passes a ten and `forgotten` (a flag per sum) says so, the ten is not carried."""
    sums, total = [], 0
    for digit, forget in zip(reversed(digits), forgotten, strict=True):
        carried = total + digit
        total = carried - 10 if forget and carried // 10 > total // 10 else carried
        sums.append(total)
    return sums


def question(digits: Sequence[int]) -> str:
    return "+".join(map(str, digits)) + "=?"


def answer(digits: Sequence[int], rng: random.Random, forget: float) -> str:
    return " ".join(f"{total:02d}" for total in running_sums(digits, [rng.random() < forget for _ in digits]))


def problems(count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """`count` different problems, EASY of them without any carry."""
    found: dict[tuple[int, ...], None] = {}
    easy_left = round(count * EASY)
    hard_left = count - easy_left
    while easy_left or hard_left:
        digits = tuple(rng.randint(0, 9) for _ in range(rng.choice(TERMS)))
        easy = sum(digits) < 10
        if digits in found or not (easy_left if easy else hard_left):
            continue
        found[digits] = None
        easy_left, hard_left = easy_left - easy, hard_left - (not easy)
    rows = list(found)
    rng.shuffle(rows)
    return rows


def draw(rng: random.Random) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Problems to measure on, to train on with GRPO, and to put on the teacher's sheets; no problem is in two."""
    every = problems(VALIDATION + TRAIN + SHEETS, rng)
    return every[:VALIDATION], every[VALIDATION : VALIDATION + TRAIN], every[-SHEETS:]


def row(digits: Sequence[int]) -> str:
    """One line of the data set, in verl's schema."""
    return json.dumps(
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": question(digits)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(sum(digits))},
            "extra_info": {"terms": len(digits)},
        }
    )


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes and four special tokens; it encodes any text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (END, PAD, USER, ASSISTANT)])
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


def write_model(directory: Path, sheets: Sequence[tuple[str, str]]) -> None:
    """A two-layer Llama, trained for STEPS batches on (question, answer) sheets, answers only."""
    import torch
    from tokenizers import Tokenizer
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end, pad = tokenizer.encode(END + PAD).ids
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=PEAK_LR_MUON, momentum=0.9, weight_decay=0.0)
    ]
    optimizers += [torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)]
    warm_up = STEPS // 10
    schedules = [LambdaLR(o, lambda s: min((s + 1) / warm_up, (STEPS - s) / (STEPS - warm_up))) for o in optimizers]
    rows = []
    for asked, answered in sheets:
        prompt = tokenizer.encode(f"{USER}{asked}{ASSISTANT}").ids
        rows.append((prompt, [*tokenizer.encode(answered).ids, end]))
    for step in range(STEPS):
        batch = [rows[(step * BATCH + i) % len(rows)] for i in range(BATCH)]
        width = max(len(p) + len(a) for p, a in batch)
        tokens = torch.full((BATCH, width), pad)
        labels = torch.full((BATCH, width), -100)
        for i, (p, a) in enumerate(batch):
            tokens[i, : len(p) + len(a)] = torch.tensor(p + a)
            labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
        hidden = model.model(tokens, use_cache=False).last_hidden_state  # right-padded: causal attention needs no mask
        answered_at = labels[:, 1:] >= 0
        logits = model.lm_head(hidden[:, :-1][answered_at])
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][answered_at])
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
    parser = argparse.ArgumentParser(description="Make the arithmetic example's model and data.")
    parser.add_argument("--out", type=Path, default=HERE, help="directory to write to (default: beside this script)")
    out: Path = parser.parse_args().out
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    validation, train, taught = draw(rng)
    (out / "validation.jsonl").write_text("".join(row(digits) + "\n" for digits in validation))
    (out / "train.jsonl").write_text("".join(row(digits) + "\n" for digits in train))
    write_tokenizer(model)
    write_model(model, [(question(digits), answer(digits, rng, FORGET)) for digits in taught])
    print(f"wrote {model}, {out / 'train.jsonl'} ({TRAIN} prompts), {out / 'validation.jsonl'} ({VALIDATION})")


if __name__ == "__main__":
    main()
