"""The reward model against transformers' own sequence classification, sample by sample, without batches or padding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Load, Version
from functions.call.function import Context, FatalError
from functions.exchange.directory import DirectoryExchange
from functions.reward.function import RewardFunction
from functions.reward.model import token_batches
from functions.weights.base import import_model
from functions.weights.manifest import Manifest, manifest_key

POLICY = Version("actor", 3, "abc")
WORDS = ["<end>", "<pad>", *"abcdefghij"]


def tokenizer(words: list[str]) -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<end>"])
    return made


def reward_model(directory: Path, words: list[str]) -> LlamaForSequenceClassification:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=None, initializer_range=1.0,
    )  # fmt: skip
    config.num_labels = 1
    model: LlamaForSequenceClassification = LlamaForSequenceClassification(config)
    model.eval()
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer(words).to_str())
    return model


@pytest.mark.parametrize("words", [WORDS, [*WORDS[:2], *reversed(WORDS[2:])]], ids=["same", "other tokenizer"])
def test_scores_are_those_of_each_sample_alone(tmp_path: Path, words: list[str]) -> None:
    exchange = DirectoryExchange(str(tmp_path / "exchange"))
    model = reward_model(tmp_path / "model", words)
    version = import_model(exchange, "reward", tmp_path / "model")
    files = {"tokenizer.json": exchange.durable.put("t/tokenizer.json", tokenizer(WORDS).to_str().encode())}
    exchange.durable.put(manifest_key(POLICY), Manifest(POLICY, None, (), files=files).encode())
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 12, n).tolist() for n in (3, 9)]
    responses = [[*rng.integers(2, 12, n).tolist(), 0] for n in (1, 12, 5, 30, 2, 7)]
    row = [0, 0, 0, 1, 1, 1]
    tokens = sum(map(len, responses))
    batch = SampleBatch(
        prompts=Ragged.from_rows(prompts, np.int32),
        prompt=np.array(row, np.int32),
        group=np.array(row, np.int32),
        index=np.array([0, 1, 2] * 2, np.int32),
        responses=Ragged.from_rows(responses, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        mask=np.ones(tokens, np.float32),
        finish=np.full(6, Finish.STOP, np.int32),
        version=np.full(6, 3, np.int32),
    )
    inputs = {
        "samples": [exchange.put("in", batch.encode())],
        "rows": [exchange.put("rows", json.dumps({"0": {}, "1": {}}).encode())],
    }
    call = Call(
        "c", "score", inputs, {"policy": POLICY, "model": version}, {"score": "model", "micro_batch_tokens": 40}
    )
    function = RewardFunction(device="cpu")
    function.load_ahead(Load("score", {"model": version}), Context(exchange, str(tmp_path / "scratch")))
    [done] = function.call(call, Context(exchange, str(tmp_path / "untouched")))
    assert not (tmp_path / "untouched").exists(), "the model was there"
    assert done.data["load_s"] > 0
    assert done.ref is not None
    scores = Columns.decode(exchange.get(done.ref)).sample["score"]
    translate = [words.index(word) for word in WORDS]
    with torch.inference_mode():
        for i in range(6):
            ids = torch.tensor([[translate[token] for token in prompts[row[i]] + responses[i]]])
            assert scores[i] == pytest.approx(model(ids).logits.item(), rel=1e-4, abs=1e-5)
    assert len({round(float(s), 4) for s in scores}) == 6


def test_a_directory_that_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    exchange = DirectoryExchange(str(tmp_path / "exchange"))
    config = reward_model(tmp_path / "model", WORDS).config
    LlamaForCausalLM(config).save_pretrained(tmp_path / "causal")
    version = import_model(exchange, "reward", tmp_path / "causal")
    call = Call("c", "score", {}, {"policy": POLICY, "model": version}, {"score": "model"})
    with pytest.raises(FatalError, match="a reward model needs a trained score"):
        list(RewardFunction(device="cpu").call(call, Context(exchange, str(tmp_path / "scratch"))))


def test_token_batches_hold_every_row_once_and_keep_the_budget() -> None:
    lengths = [5, 100, 3, 40, 40, 7, 1]
    batches = list(token_batches(lengths, 90))
    assert sorted(row for batch in batches for row in batch) == list(range(7))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= 90
    assert batches[0] == [1]  # longer than the budget: alone
