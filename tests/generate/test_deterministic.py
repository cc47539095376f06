"""Deterministic mode: a sample is the same bits whatever else is generated with it, and however often it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.torch.engine import TorchEngine

GROUPS, SAMPLES, SLOTS = 4, 4, 9
SAMPLING = Sampling(24, temperature=0.9, top_p=0.95, seed=11)

Bits = dict[int, tuple[bytes, bytes, Finish]]


def bits(samples: Sequence[Sample]) -> Bits:
    return {s.number: (s.response.tobytes(), s.logprobs.tobytes(), s.finish) for s in samples}


def engine_for(directory: Path, slots: int = SLOTS) -> TorchEngine:
    torch.set_num_threads(1)
    engine = TorchEngine(dtype=torch.float32, device=torch.device("cpu"), slots=slots, deterministic=True)
    engine.load(Version("policy", 0), directory)
    return engine


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> TorchEngine:
    return engine_for(model_dir(request.param))


@pytest.fixture(scope="module")
def requests(requests_for: Callable[..., list[Request]]) -> list[Request]:
    return requests_for(GROUPS, SAMPLES)


@pytest.fixture(scope="module")
def alone(engine: TorchEngine, requests: list[Request]) -> Bits:
    """Each sample generated with no other."""
    found: Bits = {}
    for request in requests:
        found |= bits(list(engine.generate([request], SAMPLING, lambda: False)))
    return found


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_samples_do_not_depend_on_what_is_generated_with_them(
    engine: TorchEngine, requests: list[Request], alone: Bits, data: st.DataObject
) -> None:
    some = data.draw(st.permutations(requests))[: data.draw(st.integers(1, len(requests)))]
    found = bits(list(engine.generate(some, SAMPLING, lambda: False)))
    assert found == {r.number: alone[r.number] for r in some}


def enough(looks: Iterator[int], steps: int) -> bool:
    """Asked before each step: whether there were `steps` of them."""
    return next(looks) >= steps


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_samples_do_not_depend_on_cuts(
    engine: TorchEngine, requests: list[Request], alone: Bits, data: st.DataObject
) -> None:
    """Cut again and again, after a random number of steps, going on with what came in a random order, with or without
    the keys and values that it had."""
    left = {r.number: r for r in data.draw(st.permutations(requests))[:9]}
    wanted = {number: alone[number] for number in left}
    done: Bits = {}
    while left:
        # A replay takes as many steps as there are tokens: a cut must come later than that to make progress.
        steps = data.draw(st.integers(1, 12)) + max(len(r.response) for r in left.values())
        looks = iter(range(10**9))
        order = data.draw(st.permutations(list(left.values())))
        for sample in engine.generate(order, SAMPLING, partial(enough, looks, steps)):
            if sample.finish == Finish.UNFINISHED:
                cache = sample.cache if data.draw(st.booleans()) else None  # some are lost on the way
                left[sample.number] = replace(
                    left[sample.number], response=sample.response, logprobs=sample.logprobs, cache=cache
                )
            else:
                done |= bits([sample])
                del left[sample.number]
    assert done == wanted


def test_a_cut_replay_keeps_what_it_was_given(engine: TorchEngine, requests: list[Request], alone: Bits) -> None:
    number = max(alone, key=lambda n: len(alone[n][0]))
    response, logprobs = np.frombuffer(alone[number][0], np.int32), np.frombuffer(alone[number][1], np.float32)
    begun = replace(requests[number], response=response[:15], logprobs=logprobs[:15])
    looks = iter(range(100))
    (sample,) = engine.generate([begun], SAMPLING, lambda: next(looks) >= 5)
    assert sample.finish == Finish.UNFINISHED
    assert sample.response.tolist() == response[:15].tolist()
    assert sample.logprobs.tolist() == logprobs[:15].tolist()


@pytest.mark.parametrize("shape", [(64, 4, 2, 16), (96, 3, 3, 32), (256, 4, 2, 64), (40, 5, 1, 8)])
def test_holds_for_other_widths(
    tmp_path: Path, requests_for: Callable[..., list[Request]], shape: tuple[int, int, int, int]
) -> None:
    """Kernels choose their blocks by the sizes of the matrices: several, and the slots of real jobs."""
    import transformers

    hidden, heads, kv_heads, head_dim = shape
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=331,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    sampling = Sampling(16, seed=5, ignore_eos=True)
    requests = requests_for(7, 10, seed=3, longest=90)
    engine = engine_for(tmp_path, slots=64)
    whole = bits(list(engine.generate(requests, sampling, lambda: False)))
    rng = np.random.default_rng(0)
    order = rng.permutation(len(requests))
    for part in np.array_split(order, [1, 4, 23]):
        some = [requests[i] for i in part]
        assert bits(list(engine.generate(some, sampling, lambda: False))) == {r.number: whole[r.number] for r in some}
