"""A tiny model whose responses have the lengths that it was made to have, in any engine, without a hook in any.

Qwen2 architecture, 4 layers of 256, vocabulary 1024, head of its own (3.5 M parameters). A token's id says its age, the
place in the response where it may stand: `kinds` tokens are of age 1, as many of age 2, and so on; the last token of
every prompt is of age 0. Embedding and head are planted so that after a token of age a

    P(end of sequence) = h(a + 1),      the rest of the probability falls evenly on the tokens of age a + 1,

where h is the hazard P(L = t | L >= t) of the lengths wanted: none before the limit ("full"), or lognormal with sigma
0.86, rounded and cut at the limit ("varying": what lengths of real responses look like; median 3/8 of the limit). The
layers between are random, a tenth of the usual size where they add to the residual, and computed like any other.
So two systems that sample from this model draw their lengths from the same distribution, and end a response the way
they end every response. A learning rate of 1e-6 leaves the plan in place for as long as a benchmark takes.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, HIDDEN = 1024, 256
PAD, END, FIRST = 0, 1, 64
"""Ids below FIRST are of no age."""
SIGMA, MEDIAN_SHARE = 0.86, 3 / 8
AGE_LOGIT = 15.0
"""Of the tokens of the right age; all others have about 0 and come up once in 3000 tokens."""

REWARD = '''\
def score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of even tokens."""
    numbers = [int(word[1:]) for word in solution_str.split()]
    return sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))
'''


def hazards(limit: int, lengths: str) -> list[float]:
    """h(t) for t = 1..limit - 1; a response that has not ended by then ends at the limit."""
    if lengths == "full":
        return [0.0] * (limit - 1)
    if lengths != "varying":
        raise ValueError(f"lengths {lengths!r}: wants full or varying")

    def below(x: float) -> float:
        return 0.5 * math.erfc(-math.log(x / (MEDIAN_SHARE * limit)) / (SIGMA * math.sqrt(2)))

    alive, found = 1.0, []
    for t in range(1, limit):
        left = 1.0 - below(t + 0.5)
        found.append(1.0 - left / alive)
        alive = left
    return found


def make_model(directory: Path, limit: int, lengths: str) -> None:
    """Writes model and tokenizer (words `w0` ... `w1023`)."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    hub: Any = importlib.import_module("transformers")
    if limit > HIDDEN - 8:
        raise ValueError(f"limit {limit}: wants at most {HIDDEN - 8}")
    torch.manual_seed(0)
    config = hub.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    model = hub.Qwen2ForCausalLM(config)
    kinds, size = (VOCABULARY - FIRST) // limit, 16.0
    unit = AGE_LOGIT / math.sqrt(HIDDEN)  # the final norm leaves sqrt(hidden) in the one large place
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight
        head.zero_()
        head[END] = -2 * unit
        for age, hazard in enumerate([*hazards(limit, lengths), 0.0]):
            embed[first_of(age, limit) : first_of(age, limit) + kinds, age] = size
            if age:
                head[first_of(age, limit) : first_of(age, limit) + kinds, age - 1] = unit
            if hazard:
                logit = AGE_LOGIT + math.log(kinds * hazard / (1 - hazard))
                head[END, age] = logit / math.sqrt(HIDDEN)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token=f"w{PAD}"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hub.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=f"w{END}", pad_token=f"w{PAD}", padding_side="left"
    ).save_pretrained(directory)


def first_of(age: int, limit: int) -> int:
    """The first token id of an age."""
    return FIRST + age * ((VOCABULARY - FIRST) // limit)


def make_prompts(file: Path, count: int, length: int, limit: int) -> None:
    """`count` random prompts of `length` tokens, in verl's schema."""
    rng = np.random.default_rng(7)

    def line(tokens: Sequence[int]) -> str:
        prompt = " ".join(f"w{token}" for token in tokens)
        return json.dumps({"data_source": "planted", "prompt": prompt, "reward_model": {"ground_truth": ""}}) + "\n"

    rows = [[*rng.integers(2, VOCABULARY, length - 1).tolist(), first_of(0, limit)] for _ in range(count)]
    file.write_text("".join(map(line, rows)))


def make(directory: Path, *, limit: int, lengths: str, prompts: int, prompt_length: int) -> None:
    """model/, train.jsonl, reward.py in `directory`."""
    make_model(directory / "model", limit, lengths)
    make_prompts(directory / "train.jsonl", prompts, prompt_length, limit)
    (directory / "reward.py").write_text(REWARD)
