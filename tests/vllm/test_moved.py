"""Samples that go on elsewhere with their keys and values: they are the same, and transformers has the same values."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.engine.keys_values import KeysValues, Layout
from functions.generate.vllm.blocks import heads_of_rank, orders, read, write, writes
from functions.generate.vllm.engine import VllmEngine
from functions.models.pretrained import load_causal_lm
from tests.vllm.samples import Logprobs, random_prompts, requests, run
from tests.vllm.test_versions import make_adapter

SAMPLING = Sampling(200, seed=5, ignore_eos=True)
LENGTHS = (300, 40, 130)
BLOCK = 32


def cut(engine: VllmEngine, wanted: Sequence[Request], steps: int, sampling: Sampling = SAMPLING) -> list[Sample]:
    """Samples after so many steps."""
    left = steps

    def stop() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    return list(engine.generate(wanted, sampling, stop))


def rest(wanted: Sequence[Request], parts: Sequence[Sample]) -> list[Request]:
    """Requests for what is left, in the opposite order."""
    by_number = {sample.number: sample for sample in parts if sample.finish == Finish.UNFINISHED}
    return [
        replace(r, response=s.response, logprobs=s.logprobs, cache=s.cache)
        for r in reversed(wanted)
        if (s := by_number.get(r.number)) is not None
    ]


def elsewhere(engine: VllmEngine) -> None:
    """The engine is another replica: it has computed nothing yet."""
    engine.forget_prefixes()


@pytest.fixture(scope="module")
def wanted() -> list[Request]:
    return requests(random_prompts(0, LENGTHS), 4)


@pytest.fixture(scope="module")
def whole(engine: VllmEngine, wanted: list[Request]) -> dict[int, Sample]:
    return run(engine, wanted, SAMPLING)


@pytest.mark.vllm
def test_a_sample_that_moved_goes_on_as_if_it_had_not_been_cut(
    engine: VllmEngine, wanted: list[Request], whole: dict[int, Sample]
) -> None:
    """Cut twice. What is counted, by hand: with 100 response tokens, prompts of 300, 40 and 130 make 12, 4 and 7 full
    blocks; samples of a prompt share 9, 1 and 4 of them, which only the first brings."""
    elsewhere(engine)
    again = rest(wanted, cut(engine, wanted, 100))
    assert all(len(r.response) == 100 for r in again)
    elsewhere(engine)
    parts = cut(engine, again, 40)
    stats = engine.stats
    assert stats.moved_tokens == BLOCK * ((12 + 3 * 3) + (4 + 3 * 3) + (7 + 3 * 3))
    assert stats.shared_tokens == BLOCK * (3 * 9 + 3 * 1 + 3 * 4)
    assert stats.prefill_tokens == sum(4 * (n + 100) for n in LENGTHS) - stats.moved_tokens - stats.shared_tokens
    assert stats.moved_s > 0
    elsewhere(engine)
    for number, sample in run(engine, rest(again, parts), SAMPLING).items():
        assert len(rest(again, parts)[0].response) == 140
        assert np.array_equal(sample.response, whole[number].response)
        assert np.allclose(sample.logprobs, whole[number].logprobs, atol=1e-5)
        assert sample.finish == whole[number].finish
        assert sample.cache is None


@pytest.mark.vllm
def test_what_moves_is_what_transformers_computes(engine: VllmEngine, model: Path, wanted: list[Request]) -> None:
    reference = load_causal_lm(model)
    parts = cut(engine, wanted[::4], 30)
    assert engine.cache_layout == Layout(2, 2, 32, torch.float32)
    for request, sample in zip(wanted[::4], parts, strict=True):
        tokens = torch.tensor(np.concatenate((request.prompt, sample.response[:-1])))[None].long()
        with torch.no_grad():
            layers = reference(tokens, use_cache=True).past_key_values.layers
        expected = torch.stack([torch.stack([layer.keys[0], layer.values[0]], 1) for layer in layers], 1)
        assert sample.cache is not None
        assert sample.cache.tensor.shape == expected.shape
        assert torch.allclose(sample.cache.tensor, expected, atol=2e-5)


@pytest.mark.vllm
def test_another_replicas_keys_and_values_are_used_as_they_are(
    engine: VllmEngine, wanted: list[Request], whole: dict[int, Sample]
) -> None:
    """With others the samples are others: nothing is computed again behind one's back."""
    (request,) = wanted[:1]
    (part,) = rest([request], cut(engine, [request], 100))
    assert part.cache is not None
    elsewhere(engine)
    spoiled = replace(part, cache=KeysValues(part.cache.tensor.flip(0)))
    sample = run(engine, [spoiled], SAMPLING)[0]
    assert not np.array_equal(sample.response, whole[0].response)
    elsewhere(engine)
    assert np.array_equal(run(engine, [part], SAMPLING)[0].response, whole[0].response)


@pytest.mark.vllm
def test_a_request_that_was_not_begun_comes_back_with_what_it_brought(
    engine: VllmEngine, wanted: list[Request]
) -> None:
    again = rest(wanted, cut(engine, wanted, 20))
    brought = {request.number: request.cache for request in again[:3]}
    for sample in cut(engine, [*again[:3], wanted[3]], 0):
        assert sample.cache is brought.get(sample.number)


@pytest.mark.vllm
def test_a_new_version_knows_nothing_of_what_moved(
    engine: VllmEngine, wanted: list[Request], model: Path, make_model: Callable[..., Path], logprobs: Logprobs
) -> None:
    again = rest(wanted, cut(engine, wanted, 100))
    elsewhere(engine)
    cut(engine, again, 1)
    other = make_model(1)
    engine.load(Version("policy", 4), other)
    without = [replace(request, cache=None) for request in again]
    found = run(engine, without, replace(SAMPLING, max_response_length=110))
    engine.load(Version("policy", 3), model)
    for request in wanted:
        expected = logprobs(other, request, found[request.number], 1.0)[100:]
        assert torch.allclose(torch.tensor(found[request.number].logprobs[100:]), expected, atol=1e-5)


@pytest.mark.vllm
def test_keys_and_values_that_do_not_fit_are_named(engine: VllmEngine, wanted: list[Request]) -> None:
    (part,) = rest(wanted[5:6], cut(engine, wanted[5:6], 20))
    assert part.cache is not None
    who, whole = r"sample \(group 1, index 1\): its keys and values are", part.cache.tensor
    for cache, message in (
        (KeysValues(whole.bfloat16()), f"{who} 2 kv heads .* in bfloat16, .*; this engine takes .* float32"),
        (KeysValues(whole[:, :, :, :39]), f"{who} of 39 tokens; wants those of its 40 prompt and 20 response tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            run(engine, [replace(part, cache=cache)], SAMPLING)


@pytest.mark.vllm
def test_more_comes_than_there_is_room_for(
    make_engine: Callable[..., VllmEngine], model: Path, wanted: list[Request], whole: dict[int, Sample]
) -> None:
    """31 blocks, and 12 samples of up to 16: they start as others end. Cut once more, and they are the same samples."""
    again = None
    for mb in (256, 1):
        engine = make_engine(slots=8, context=512, kv_cache_mb=mb)
        engine.load(Version("policy", 3), model)
        if again is None:
            again = rest(wanted, cut(engine, wanted, 100))  # 8 of them; 4 were not begun
            assert sum(r.cache is None for r in again) == 4
    assert again is not None
    parts = cut(engine, again, 90)
    assert engine.stats.moved_tokens > 0
    elsewhere(engine)
    found = {s.number: s for s in parts if s.finish == Finish.LENGTH} | run(engine, rest(again, parts), SAMPLING)
    assert len(found) == len(whole)
    for number, sample in found.items():
        assert np.array_equal(sample.response, whole[number].response)
        assert np.allclose(sample.logprobs, whole[number].logprobs, atol=1e-5)


@pytest.mark.vllm
def test_a_model_whose_keys_and_values_cannot_move_says_why(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path]
) -> None:
    engine = make_engine(context=512)
    assert engine.cache_layout == "the engine holds no policy"
    engine.load(Version("policy", 0), make_model(2, use_sliding_window=True, sliding_window=64, max_window_layers=0))
    why = "its cache is vLLM's SlidingWindowSpec, not that of attention to all tokens"
    assert engine.cache_layout == why
    (request,) = requests(random_prompts(1, [100]))
    (part,) = cut(engine, [request], 3)
    assert (len(part.response), part.cache) == (3, None)
    cache = KeysValues(torch.zeros(2, 2, 2, 102, 32))
    with pytest.raises(ValueError, match=f"this engine has none: {why}"):
        run(engine, [replace(request, response=part.response, logprobs=part.logprobs, cache=cache)], SAMPLING)


@pytest.mark.vllm
def test_keys_and_values_of_an_adapter_move(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], tmp_path: Path, wanted: list[Request]
) -> None:
    base, sampling = make_model(4), replace(SAMPLING, max_response_length=120)
    engine = make_engine(lora_rank=8, context=512)
    for number in (1, 2):
        engine.load(Version("policy", number), make_adapter(tmp_path / str(number), base, number))
        whole = run(engine, wanted, sampling)
        again = rest(wanted, cut(engine, wanted, 100, sampling))
        elsewhere(engine)
        found = run(engine, again, sampling)
        assert engine.stats.moved_tokens == BLOCK * (21 + 13 + 16)
        for name, sample in found.items():
            assert np.array_equal(sample.response, whole[name].response)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_ranks_of_a_split_model_move_their_heads(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], heads: int
) -> None:
    """Two worker processes: of two heads each has one, of one both have it. They go on as one process does, and no
    memory is left behind."""

    def memory() -> list[str]:
        opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
        return [line for line in [*opened, *Path("/proc/self/maps").read_text().splitlines()] if "keys and val" in line]

    names = set(os.listdir("/dev/shm"))
    model, wanted = make_model(3, num_key_value_heads=heads), requests(random_prompts(0, LENGTHS), 2)
    again, results = {}, []
    for gpus in (2, 1):
        engine = make_engine(slots=8, context=512, gpus=gpus)
        engine.load(Version("policy", 0), model)
        again[gpus] = rest(wanted, cut(engine, wanted, 100))
        assert len(memory()) == 6  # mapped, and not open, for those of two ranks
        for given in again.values():
            elsewhere(engine)
            results.append(run(engine, given, SAMPLING))
            assert engine.stats.moved_tokens > 0
    for two, one in zip(again[2], again[1], strict=True):
        assert two.cache is not None
        assert one.cache is not None
        assert torch.allclose(two.cache.tensor, one.cache.tensor, atol=2e-5)
    del two, given
    again.clear()
    gc.collect()
    assert memory() == []
    left = set(os.listdir("/dev/shm")) - names
    assert all(name.startswith("vllm_dist_") for name in left)  # vLLM's own, which it forgets on a CPU
    for name in left:
        os.unlink(f"/dev/shm/{name}")
    for result in results[1:]:
        for number, sample in results[0].items():
            assert np.array_equal(sample.response, result[number].response)


# --- without vLLM ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "ranks"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 4), (4, 4), (6, 3)])
def test_every_head_is_written_once(heads: int, ranks: int) -> None:
    """Ranks hold heads in their order, as many as there are for each, and replicas side by side."""
    held = [list(range(heads))[heads_of_rank(heads, ranks, rank)] for rank in range(ranks)]
    written = [head for rank in range(ranks) if writes(heads, ranks, rank) for head in held[rank]]
    assert written == list(range(heads))
    assert {len(part) for part in held} == {max(1, heads // ranks)}
    assert sorted(held) == held


def test_replicas_of_a_head_are_neighbours() -> None:
    """2 heads over 8 ranks, as vLLM loads them: rank // 4."""
    assert [heads_of_rank(2, 8, rank).start for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [writes(2, 8, rank) for rank in range(8)] == [True, False, False, False, True, False, False, False]


class SideBySide:
    """A GPU's attention: keys and values side by side, tokens outside of heads in memory (vllm flash_attn.py)."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        length, width = cache.shape[2], cache.shape[3] // 2
        keys, values = (cache.transpose(1, 2)[..., part] for part in (slice(width), slice(width, None)))
        keys[slots // length, slots % length] = key
        values[slots // length, slots % length] = value


class Rounded(SideBySide):
    """One that does not keep what it is given."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        super().do_kv_cache_update(layer, (key / 8).round() * 8, value, cache, slots)


@dataclass
class Layer:
    kv_cache: Tensor
    impl: SideBySide = field(default_factory=SideBySide)
    attn_backend: SideBySide = field(default_factory=SideBySide)
    head_size: int = 16


@pytest.mark.parametrize("chunk", [1, 48, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_of_several_kernel_blocks_in_a_gpus_layout(dtype: torch.dtype, chunk: int) -> None:
    """Blocks of 64 tokens that are 4 of the kernel's; written and read in another order than they lie."""
    torch.manual_seed(0)
    layers: list[Any] = [Layer(torch.randn(40, 16, 3, 32).to(dtype).transpose(1, 2)) for _ in range(2)]
    before = [layer.kv_cache.clone() for layer in layers]
    source, blocks = torch.randn(3, 2, 2, 150, 16).to(dtype), [7, 2, 9]
    found = orders(layers)
    assert all(torch.equal(layer.kv_cache, old) for layer, old in zip(layers, before, strict=True))
    write(layers, blocks, 64, source, chunk=chunk)
    back = torch.zeros(3, 2, 2, 130, 16, dtype=dtype)
    read(layers, found, blocks, 64, back, chunk=chunk)
    assert torch.equal(back, source[:, :, :, :130])
    token = layers[1].kv_cache[2 * 4 + 1, 2, 5]  # of the second block's 22nd token, the third head
    assert torch.equal(token, torch.cat((source[2, 1, 0, 64 + 21], source[2, 1, 1, 64 + 21])))
    for layer, old in zip(layers, before, strict=True):
        assert int((layer.kv_cache != old).any(3).any(1).sum()) == 150  # nothing else was touched


def test_an_attention_that_keeps_something_else_is_noticed() -> None:
    layers: list[Any] = [Layer(torch.zeros(2, 3, 16, 32), impl=Rounded())]
    with pytest.raises(ValueError, match="keeps keys and values in another form than they come"):
        orders(layers)
