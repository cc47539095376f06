"""Stale weights are caught by default, and nothing else is: samples of the engine itself, and what is done to them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import Call, FeedPart, Json, Ref, Version
from functions.call.function import Context, FatalError
from functions.exchange.directory import DirectoryExchange
from functions.generate.function import GenerateFunction
from functions.reference.function import ReferenceFunction
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from tests.support.train_call import ADAM, BASE, save_tiny

GROUPS, N = 4, 4
PART: Json = {"temperature": 0.9, "top_p": 0.5, "top_k": 3}
"""Of the distribution: what is kept of it has half its mass."""


@dataclasses.dataclass
class Bench:
    exchange: DirectoryExchange
    scratch: Path
    put: int = 0

    def generate(self, sampling: Json | None = None, version: Version = BASE, dtype: str = "float32") -> SampleBatch:
        prompts = [[4, 5, 6], [7], [8, 9], [10, 11, 12, 13]]
        empty = SampleBatch.of_prompts(prompts, samples_per_prompt=N, version=version.number)
        params = {"max_response_length": 12, "seed": 5, **(sampling or {})}
        call = Call("gen", "generate", {"samples": [self.ref(empty.encode())]}, {"policy": version}, params)
        events = list(GenerateFunction(device="cpu", dtype=dtype).call(call, self.context()))
        refs = [event.ref for event in events if event.kind == "samples" and event.ref is not None]
        return SampleBatch.concat([SampleBatch.decode(self.exchange.get(ref)) for ref in refs]).in_order()

    def logprobs(self, samples: SampleBatch, column: str) -> Columns:
        inputs = {"samples": [self.ref(samples.encode())]}
        params = {"column": column, "temperature": PART["temperature"]}
        call = Call("ref", "logprobs", inputs, {"model": BASE}, params)
        (done,) = ReferenceFunction(device="cpu").call(call, self.context())
        assert done.ref is not None
        return Columns.decode(self.exchange.get(done.ref))

    def train(
        self, samples: SampleBatch, params: Json, *columns: Columns, version: Version = BASE, fed: bool = False,
        id: str = "train",
    ) -> Json:  # fmt: skip
        """With a score that differs within each group, and `columns`."""
        score = Columns.of(samples, sample={"score": (samples.index % 2).astype(np.float32)})
        refs = {"samples": [self.ref(samples.encode())], "columns": [self.ref(c.encode()) for c in (score, *columns)]}
        params = {"optimizer": ADAM, "micro_batch_tokens": 40, **params}
        if fed:
            part = FeedPart(refs["samples"], refs["columns"], sorted(set(samples.group.tolist())), [], id)
            self.exchange.put("calls/feed/000000", json.dumps(part.to_json()).encode())
            params |= {"feed": {"prefix": "calls/feed/", "stream": True}}
        call = Call(id, "train", {} if fed else refs, {"policy": version}, params, step=1)
        (done,) = TrainFunction(device="cpu").call(call, self.context())
        return dict(done.data)

    def ref(self, data: bytes) -> Ref:
        self.put += 1
        return self.exchange.put(f"batches/{self.put:04d}", data)

    def context(self) -> Context:
        return Context(self.exchange, str(self.scratch))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(path)
    return path


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Bench:
    found = Bench(DirectoryExchange(tmp_path / "exchange"), tmp_path / "scratch")
    found.scratch.mkdir()
    import_model(found.exchange, "policy", model)
    return found


def refused(bench: Bench, samples: SampleBatch, params: Json, message: str, **how: Any) -> None:
    with pytest.raises(FatalError, match=message) as caught:
        bench.train(samples, params, **how)
    assert "\n" not in str(caught.value)
    assert not bench.exchange.list(f"weights/policy/v{how.get('version', BASE).number + 1:06d}")


@pytest.mark.parametrize("fed", [False, True], ids=["whole", "fed"])
@pytest.mark.parametrize("number", [-1, 1])
def test_one_sample_of_another_version(bench: Bench, number: int, fed: bool) -> None:
    samples = bench.generate()
    version = samples.version.copy()
    version[6] = number
    stale = dataclasses.replace(samples, version=version)
    message = rf"policy v000000.*\(group 1, index 2\) was made by version {number} of the policy, wants version 0"
    refused(bench, stale, {"max_rollout_logprob_diff": "off"}, message, fed=fed)


def test_a_critics_samples_are_of_one_version(bench: Bench) -> None:
    """It has versions of its own, whose numbers say nothing of the policy's."""
    samples = dataclasses.replace(bench.generate(), version=np.full(GROUPS * N, 7, np.int32))
    values = Columns.of(samples, token={"values": np.zeros(len(samples.logprobs), np.float32)})
    critic: Json = {"objective": "value", "advantage": "gae", "model": "critic"}
    bench.train(samples, critic, values)
    version = samples.version.copy()
    version[3] = 6
    with pytest.raises(FatalError, match=r"\(group 0, index 3\) was made by version 6 of the policy, wants version 7"):
        bench.train(dataclasses.replace(samples, version=version), critic, values, id="again")


@pytest.mark.parametrize("params", [{}, {"epochs": 2}, {"dtype": "bfloat16"}, {"lora": {"rank": 2}}], ids=str)
def test_an_engine_that_claims_the_version_and_holds_the_one_before(bench: Bench, params: Json) -> None:
    old = bench.generate()
    first = Version.from_json(bench.train(old, params)["version"])
    claimed = dataclasses.replace(old, version=np.full(len(old), 1, np.int32))
    refused(bench, claimed, params, "differ .* on average.*version 1 made them: stale weights", version=first, id="2")
    bench.train(claimed, {**params, "max_rollout_logprob_diff": "off"}, version=first, id="3")
    own = bench.generate(version=first, dtype=params.get("dtype", "float32"))
    bench.train(own, params, version=first, id="4")


KL: Json = {"kl": {"where": "reward", "kind": "k1", "coef": 0.1}}
CASES: dict[str, Json] = {
    "one step": {},
    "two epochs": {"epochs": 2},
    "mini-batches": {"mini_batches": 2},
    "old log-probabilities": KL,
    "adapters": {"lora": {"rank": 2}},
    "correction": {"correction": {"cap": 2.0}},
    "rejection": {"correction": {"reject": {"token_k2": 50.0}}},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, two epochs": {"dtype": "bfloat16", "epochs": 2},
}


FED = ("one step", "adapters", "bfloat16", "correction")
"""Those that can begin with a part of the samples."""


@pytest.mark.parametrize("sampling", [{"temperature": 0.9}, PART], ids=["all", "a part"])
@pytest.mark.parametrize(("case", "fed"), [*((case, False) for case in CASES), *((case, True) for case in FED)])
def test_what_the_engine_sampled_is_trained_on(bench: Bench, case: str, sampling: Json, fed: bool) -> None:
    params = CASES[case]
    dtype = params.get("dtype", "float32")
    samples = bench.generate(sampling, dtype=dtype)
    columns = [bench.logprobs(samples, name) for name in ("old_logprobs", "ref_logprobs")] if params is KL else []
    metrics = bench.train(samples, {**params, **sampling}, *columns, fed=fed)["metrics"]
    assert metrics["rollout_corr/abs_diff_mean"] < (1e-5 if dtype == "float32" else 0.05)
    if sampling is PART and "epochs" not in params and "mini_batches" not in params:
        assert metrics["rollout_corr/kl"] > 0.3, "the ratio is to what was sampled from: a part, here about half"


def test_a_part_of_the_distribution_does_not_hide_stale_weights(bench: Bench) -> None:
    old = bench.generate(PART)
    first = Version.from_json(bench.train(old, PART)["version"])
    claimed = dataclasses.replace(old, version=np.full(len(old), 1, np.int32))
    refused(bench, claimed, PART, "stale weights", version=first, id="again")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
