"""A train call that is fed parts while samples are still being generated makes the step of all samples at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, FeedPart, Json, Ref, Version
from functions.call.function import Cancelled, Context, FatalError
from functions.call.parallel import Parallel
from functions.call.train_params import TrainParams
from functions.exchange.base import NotFound
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import save_model
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from functions.weights.store import fetch
from tests.support.gang import ranks_of, run_gangs
from tests.support.versions import fetch_state

GROUPS, N, VOCABULARY = 6, 3, 53
BASE = Version("policy", 0)
OPTIMIZER: Json = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
GRPO: Json = {
    "optimizer": OPTIMIZER, "temperature": 0.8, "entropy_coef": 0.01, "micro_batch_tokens": 30,
    "kl": {"where": "loss", "kind": "k3", "coef": 0.3}, "max_rollout_logprob_diff": 50.0,
    "correction": {"level": "sequence", "cap": 3.0, "floor": 0.01},
}  # fmt: skip
CRITIC: Json = {
    "optimizer": OPTIMIZER, "objective": "value", "advantage": "gae", "model": "critic", "micro_batch_tokens": 40,
    "kl": {"where": "reward", "kind": "k1", "coef": 0.1},
}  # fmt: skip


class Trickle(DirectoryExchange):
    """Shows a feed's parts one by one: the next when it is waited for."""

    shown = 0

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        name = key if isinstance(key, str) else key.key
        if ".feed/" in name and int(name[-6:]) >= self.shown:
            raise NotFound(name)
        return super().get(key, start=start, length=length)

    def wait(self, key: str, timeout_s: float) -> bool:
        self.shown += 1
        return super().wait(key, 0.0)


@dataclass
class Bench:
    exchange: DirectoryExchange
    root: Path
    scratch: Path
    samples: SampleBatch
    columns: Columns
    fed: int = field(default=0)

    def whole(self, params: Json, id: str = "whole") -> Json:
        inputs = {"samples": [self.put(self.samples.encode())], "columns": [self.put(self.columns.encode())]}
        return self.run(Call(id, "train", inputs, {"policy": BASE}, params, step=3))

    def feed(self, parts: Sequence[FeedPart], name: str = "feed", *, stream: bool = True) -> Json:
        """The parts of a feed, and what a call says to find them."""
        for number, part in enumerate(parts):
            self.exchange.put(f"calls/{name}/{number:06d}", json.dumps(part.to_json()).encode())
        return {"feed": {"prefix": f"calls/{name}/", "stream": stream}}

    def fed_call(self, params: Json, parts: Sequence[FeedPart], id: str = "fed", *, stream: bool = True) -> Call:
        feed = self.feed(parts, f"{id}.feed", stream=stream)
        return Call(id, "train", {}, {"policy": BASE}, {**params, **feed}, step=3)

    def run(self, call: Call, context: Context | None = None) -> Json:
        (event,) = TrainFunction(device="cpu").call(call, context or self.context())
        return dict(event.data)

    def trickled(self, call: Call) -> Json:
        """The call, whose parts come one by one."""
        return self.run(call, replace(self.context(), exchange=Trickle(self.root)))

    def context(self, cancelled: threading.Event | None = None) -> Context:
        return Context(self.exchange, str(self.scratch), cancelled=cancelled or threading.Event())

    def put(self, data: bytes) -> Ref:
        self.fed += 1
        return self.exchange.put(f"batches/{self.fed:04d}", data)

    def parts(
        self, groups: Sequence[Sequence[int]], *, identity: str = "whole", dropped: Sequence[tuple[int, int]] = ()
    ) -> list[FeedPart]:
        """The groups in that order. Samples come one by one, each of a later group already with the part before."""
        found: list[FeedPart] = []
        sent: set[int] = set()
        order = [row for part in groups for row in range(GROUPS * N) if row // N in part]
        for number, part in enumerate(groups):
            now = [row for row in order if row // N in part or (number == 0 and row % N == 0)]
            rows = [row for row in now if row not in sent]
            sent |= set(rows)
            found.append(
                FeedPart(
                    [self.put(self.samples.select([row]).encode()) for row in rows],
                    [self.put(self._column(rows, name)) for name in ("score", "token")],
                    part,
                    [key for key in dropped if key[0] in part],
                    identity if number == len(groups) - 1 else "",
                )
            )
        return found

    def _column(self, rows: Sequence[int], name: str) -> bytes:
        picked, lengths = self.samples.select(rows), self.samples.responses.lengths
        if name == "score":
            return Columns.of(picked, sample={"score": self.columns.sample["score"][list(rows)]}).encode()
        token = {k: Ragged(v, lengths).select(np.array(rows)).flat for k, v in self.columns.token.items()}
        return Columns.of(picked, token=token).encode()

    def tensors(self, data: Json) -> dict[str, Tensor]:
        version = Version.from_json(data["version"])
        state = fetch_state(self.exchange, version)
        return fetch(self.exchange, version) | {f"state/{name}": tensor for name, tensor in state.items()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    save_model(model, tmp_path / "model")
    exchange = DirectoryExchange(tmp_path / "exchange")
    import_model(exchange, "policy", tmp_path / "model")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, k).tolist() for k in (3, 1, 5, 2, 4, 2)]
    base = SampleBatch.of_prompts(prompts, samples_per_prompt=N, version=0)
    lengths = rng.integers(1, 12, GROUPS * N).astype(np.int32)
    lengths[4] = 0  # an empty response
    total = int(lengths.sum())
    mask = (rng.random(total) > 0.2).astype(np.float32)
    first = int(lengths[: 5 * N].sum())
    mask[first:] = 0.0  # the last group trains nothing
    samples = SampleBatch(
        prompts=base.prompts, prompt=base.prompt, group=base.group, index=base.index,
        responses=Ragged(rng.integers(3, VOCABULARY, total).astype(np.int32), lengths),
        logprobs=np.log(rng.uniform(0.05, 0.5, total)).astype(np.float32), mask=mask,
        finish=np.full(GROUPS * N, Finish.STOP, np.int32), version=base.version,
    )  # fmt: skip
    token = {name: rng.normal(-2, 0.5, total).astype(np.float32) for name in ("ref_logprobs", "values")}
    columns = Columns.of(samples, sample={"score": rng.random(GROUPS * N).astype(np.float32)}, token=token)
    return Bench(exchange, tmp_path / "exchange", tmp_path / "scratch", samples, columns)


def with_old(bench: Bench) -> None:
    rng = np.random.default_rng(9)
    old = rng.normal(-2, 0.5, len(bench.samples.logprobs)).astype(np.float32)
    columns = bench.columns
    bench.columns = replace(columns, token={**columns.token, "old_logprobs": old})


def equal(bench: Bench, one: Json, two: Json) -> None:
    first, second = bench.tensors(one), bench.tensors(two)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-6)
    assert one["metrics"].keys() == two["metrics"].keys()
    for name, value in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_the_update_is_that_of_all_samples_at_once(bench: Bench, advantage: str, aggregation: str) -> None:
    params = GRPO | {"advantage": advantage, "aggregation": aggregation}
    whole = bench.whole(params)
    fed = bench.trickled(bench.fed_call(params, bench.parts([[3], [5, 0], [1, 2], [4]], identity="other")))
    equal(bench, whole, fed)
    assert fed["stats"]["fed_batches"] == 4
    assert fed["stats"]["trained_samples"] == whole["stats"]["trained_samples"]


def test_a_step_that_has_nothing_to_train_goes_on(bench: Bench) -> None:
    bench.columns.sample["score"][:] = 0.5
    params = GRPO | {"filter_groups": True}
    whole, fed = bench.whole(params), bench.run(bench.fed_call(params, bench.parts([[3], [5, 0], [1, 2], [4]])))
    equal(bench, whole, fed)
    assert (whole["metrics"]["actor/skipped_updates"], whole["metrics"]["critic/score/mean"]) == (1, 0.5)
    assert whole["stats"]["trained_samples"] == whole["stats"]["optimizer_steps"] == 0
    every = [(group, index) for group in range(GROUPS) for index in range(N)]
    for stream in (True, False):
        parts = bench.parts([[3], [5, 0], [1, 2], [4]], dropped=every, identity=f"none-{stream}")
        none = bench.run(bench.fed_call(GRPO, parts, f"none-{stream}", stream=stream))
        assert (none["metrics"], none["stats"]["samples"]) == ({"actor/skipped_updates": 1, "actor/grad_norm": 0}, 0)


def test_a_critic_and_the_norm_of_dr_grpo(bench: Bench) -> None:
    with_old(bench)
    parts = bench.parts([[5], [3, 0], [1, 2, 4]], identity="other")
    equal(bench, bench.whole(CRITIC), bench.trickled(bench.fed_call(CRITIC, parts)))
    norm = GRPO | {"aggregation": "seq-mean-token-sum-norm", "aggregation_norm": 12.0, "filter_groups": True}
    equal(bench, bench.whole(norm, "norm"), bench.run(bench.fed_call(norm, parts, "fed-norm")))


def test_dropped_samples_are_left_out_as_in_a_whole_call(bench: Bench) -> None:
    dropped = [(3, 1), (0, 0), (0, 1), (0, 2)]
    whole = bench.whole(GRPO | {"dropped": [list(key) for key in dropped]})
    parts = bench.parts([[0], [3], [1, 2], [4, 5]], identity="other", dropped=dropped)
    equal(bench, whole, bench.trickled(bench.fed_call(GRPO, parts)))


@pytest.mark.parametrize("change", [{"mini_batches": 2, "epochs": 2}, {"advantage": "reinforce_plus_plus"}, {}])
def test_a_feed_that_does_not_stream_gives_the_bits_of_a_whole_call(bench: Bench, change: Json) -> None:
    whole = bench.whole(GRPO | change)
    parts = bench.parts([[3], [5, 0], [1, 2], [4]], identity="other")
    fed = bench.trickled(bench.fed_call(GRPO | change, parts, stream=False))
    assert fed["metrics"] == whole["metrics"]
    first, second = bench.tensors(whole), bench.tensors(fed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gangs_of_any_mesh_are_fed_alike(bench: Bench) -> None:
    whole = bench.whole(GRPO)
    gangs = []
    for name, mesh in (("dp", Parallel()), ("pp", Parallel(pp=2)), ("tp", Parallel(tp=2))):
        call = bench.fed_call(GRPO, bench.parts([[3], [5, 0], [1, 2, 4]], identity=name), name)
        gangs.append(ranks_of(call, 2, mesh))
    for ended in run_gangs(bench.root, bench.scratch, gangs):
        first, second = [rank.data for rank in ended]
        assert first["version"] == second["version"]
        assert first["stats"]["fed_batches"] >= 1
        equal(bench, whole, first)


def test_the_version_is_named_after_the_samples_and_trained_once(bench: Bench) -> None:
    """A feed that ends with the id of a call that was made: its version is answered, nothing is trained."""
    whole = bench.whole(GRPO)
    again = bench.run(bench.fed_call(GRPO, bench.parts([[0, 1, 2, 3, 4, 5]])))
    assert again == whole | {"waited_s": 0.0, "memory": {}}
    other = bench.run(bench.fed_call(GRPO, bench.parts([[0, 1, 2, 3, 4, 5]], identity="other"), "fed-2"))
    assert other["version"] != whole["version"]


def test_it_begins_before_the_samples_are_there_and_ends_when_it_is_not_wanted(bench: Bench) -> None:
    parts = bench.parts([[3], [5, 0], [1, 2, 4]], identity="other")
    call = bench.fed_call(GRPO, parts[:1])
    begun, context = threading.Event(), bench.context()
    context = replace(context, progress=lambda _data: begun.set())
    answer: list[Json] = []
    working = threading.Thread(target=lambda: answer.append(bench.run(call, context=context)))
    working.start()
    assert begun.wait(200)
    assert working.is_alive()
    bench.feed(parts, "fed.feed")
    working.join(200)
    equal(bench, bench.whole(GRPO), answer[0])

    late, errors = threading.Event(), list[Exception]()
    starved = bench.fed_call(GRPO, parts[:2], "starved")

    def starve() -> None:
        try:
            bench.run(starved, context=bench.context(late))
        except Cancelled as error:
            errors.append(error)

    working = threading.Thread(target=starve)
    working.start()
    late.set()
    working.join(200)
    assert len(errors) == 1
    assert len(bench.exchange.list("weights/policy/v000001")) == len(
        [key for key in bench.exchange.list("weights/policy/v000001") if "starved" not in key]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mini_batches": 2}, "needs all samples before its first gradient"),
        ({"advantage": "reinforce_plus_plus"}, "needs all samples before its first gradient"),
        ({"kl": {"where": "reward", "kind": "k1", "coef": 0.1}}, "needs all samples before its first gradient"),
    ],
)
def test_what_needs_the_whole_batch_is_refused(bench: Bench, change: Json, message: str) -> None:
    with pytest.raises(FatalError, match=message):
        bench.run(bench.fed_call(GRPO | change, bench.parts([[0, 1, 2, 3, 4, 5]])))


def test_wrong_feeds_are_refused(bench: Bench) -> None:
    twice = bench.parts([[0], [1, 2, 3, 4, 5]])
    twice[1] = replace(twice[1], groups=[0, 1])
    with pytest.raises(FatalError, match=r"step 3, weights .*: feed: group 0 is given twice"):
        bench.run(bench.fed_call(GRPO, twice, "twice"))
    short = bench.parts([[0], [1, 2, 3, 4, 5]])
    short[1] = replace(short[1], groups=[1, 2, 3])
    with pytest.raises(FatalError, match=r"feed: ended without group 4 \(2 groups have samples"):
        bench.run(bench.fed_call(GRPO, short, "short"))


@pytest.mark.parametrize(
    ("params", "streams"),
    [
        ({}, True),
        ({"epochs": 2}, False),
        ({"advantage": "gae"}, False),
        ({"advantage": "gae", "advantage_options": {"whiten_advantages": False}}, True),
        ({"advantage": "gae", "objective": "value"}, True),
        ({"advantage": "gae", "objective": "value", "kl": {"where": "reward", "target": 0.1}}, False),
        ({"loss": "mine.py:loss"}, False),
        ({"correction": {"level": "sequence"}}, True),
        ({"correction": {"reject": {"seq_mean_k3": 4.0}}}, False),  # its denominators want the old log-probabilities
        ({"advantage": "distillation"}, False),
    ],
)
def test_which_steps_stream(params: dict[str, Any], streams: bool) -> None:
    assert TrainParams.from_json(params).streams is streams
