"""Who of a gang reads what of samples and columns: each value is read once, each rank gets what it needs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import Json, Ref
from functions.call.parallel import DATA_PARALLEL, Parallel
from functions.call.train_params import TrainParams
from functions.exchange.directory import DirectoryExchange
from functions.train.protocols import all_as_dp, of_packs
from tests.support.forked import CONTEXT
from tests.support.gang_bench import GROUPS, N, ragged_batch

pytestmark = pytest.mark.timeout(300)

TOP_K = {"loss": "forward_kl_topk", "advantage": "distillation"}
KL: Json = {"kl": {"where": "loss", "coef": 0.1}}
WIDE = 40


def one_rank(root: str, who: Json, refs: tuple[list[Json], list[Json]], params: Json, answer: Any) -> None:
    """(this rank's batch, its rows, bytes read of each value, bytes that came from others' reading)."""
    from functions.call.function import Context
    from functions.train.batch import build
    from functions.train.gang import GangParams, Ranks, meet
    from functions.train.protocols import Inputs

    read: list[str] = []
    came: list[int] = []

    class Counting(DirectoryExchange):
        def get(self, key: Any, *, start: int = 0, length: int | None = None) -> bytes:
            if isinstance(key, Ref):
                read.append(key.key)
            return super().get(key, start=start, length=length)

    class Told(Ranks):
        def swap(self, sent: Any, to: Any, of: Any, axis: str | None = None) -> Any:
            came.append(sum(of))
            return super().swap(sent, to, of, axis)

    torch.set_num_threads(1)
    context, found = Context(Counting(Path(root)), root), TrainParams.from_json(params)
    gang = GangParams(**{**who, "parallel": Parallel(**who["parallel"])})
    with meet(gang, torch.device("cpu"), context, lambda: False) as met:
        assert met is not None
        ranks = Told(met.rank, met.size, met.mesh, met.device)
        inputs = Inputs(ranks, [found], context.exchange)
        samples, columns = inputs.read(*([Ref.from_json(ref) for ref in kind] for kind in refs))
        batch = SampleBatch.concat(samples).in_order()
        assert not batch.responses.flat.size
        rows = list(range(ranks.place("dp"), len(batch), ranks.count("dp")))
        batch_of = build(batch, Columns.align(batch, columns), found)
        filled = inputs.filled(batch_of, lambda: rows)
    token = {name: values.numpy() for name, values in filled.token.items()}
    assert np.array_equal(filled.rollout_logprobs.numpy(), filled.samples.logprobs)
    answer.send((filled.samples, token, rows, read, sum(came)))


@pytest.mark.parametrize(
    ("size", "parallel"), [(2, DATA_PARALLEL), (4, Parallel(tp=2)), (4, Parallel(pp=2)), (4, Parallel(cp=2))],
    ids=["dp2", "dp2xtp2", "dp2xpp2", "dp2xcp2"],
)  # fmt: skip
def test_each_value_is_read_once_and_each_rank_gets_its_rows(tmp_path: Path, size: int, parallel: Parallel) -> None:
    """Of experts and a teacher's top-k, which are wide, and of tokens; shards in any order, of any samples."""
    exchange, rng = DirectoryExchange(tmp_path), np.random.default_rng(5)
    samples, _ = ragged_batch(exchange, 53, 11)
    count, tokens = GROUPS * N, len(samples.mask)
    samples = replace(samples, experts=rng.integers(0, 4, (tokens, WIDE, 2)).astype(np.uint8))
    token = {"teacher_logprobs": (tokens, 8), "teacher_ids": (tokens, 8), "values": (tokens,)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in token.items()}
    whole = Columns.of(samples, sample={"score": rng.random(count).astype(np.float32)}, token=values)
    shards = [np.sort(part) for part in np.array_split(rng.permutation(count), 6)]
    put: tuple[list[Ref], list[Ref]] = ([], [])
    for n, rows in enumerate(shards):
        places = samples.responses.places(rows)
        own = Columns(
            whole.group[rows], whole.index[rows], whole.lengths[rows], {"score": whole.sample["score"][rows]},
            {name: column[places] for name, column in values.items()},
        )  # fmt: skip
        put[0].append(exchange.put(f"batches/s{n}", samples.select(rows).encode()))
        put[1].append(exchange.put(f"batches/c{n}", own.encode()))
    refs = tuple([ref.to_json() for ref in kind] for kind in put)
    who = {"id": "g", "attempt": "a", "size": size, "parallel": asdict(parallel)}
    started = []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=one_rank, args=(str(tmp_path), {**who, "rank": rank}, refs, TOP_K, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    ended = [ours.recv() for _, ours in started]
    for process, _ in started:
        process.join()
    sizes = {ref.key: ref.size_bytes for kind in put for ref in kind}
    read = [key for *_, keys, _ in ended for key in keys]
    assert sorted(read) == sorted(sizes)
    for _, _, _, keys, _ in ended:
        assert sum(sizes[key] for key in keys) <= sum(sizes.values()) / size + max(sizes.values())
    for found, columns, rows, _, came in ended:
        mine, places = np.zeros(tokens, bool), samples.responses.places(np.array(rows))
        mine[places] = True
        assert np.array_equal(found.mask, samples.mask)
        assert np.array_equal(columns["values"], values["values"])
        for got, put_in in (
            (found.responses.flat, samples.responses.flat), (found.logprobs, samples.logprobs),
            (found.experts, samples.experts), *((columns[n], values[n]) for n in ("teacher_logprobs", "teacher_ids")),
        ):  # fmt: skip
            assert put_in is not None
            assert got.dtype == put_in.dtype
            assert np.array_equal(got[mine], put_in[mine])
            assert not got[~mine].any()
        assert came == len(places) * (4 + 4 + WIDE * 2 + 2 * 8 * 4), "its rows, and no others"


@pytest.mark.parametrize(
    ("params", "alone"),
    [
        (KL, ["responses", "logprobs", "experts", "token.ref_logprobs"]),
        ({"kl": {"where": "reward", "coef": 0.1}}, ["responses", "logprobs", "experts"]),
        ({"advantage": "distillation"}, ["responses", "logprobs", "experts"]),
        (KL | {"advantage": "mine.py:own"}, ["responses", "logprobs", "experts"]),
        (KL | {"correction": {"level": "token", "normalize": True}}, ["responses", "experts", "token.ref_logprobs"]),
        (KL | {"resample": {}}, []),
    ],
    ids=["kl in the loss", "kl in the reward", "distillation", "a user's advantage", "correction", "resample"],
)
def test_packs_alone_read_what_no_target_follows_from(params: Json, alone: list[str]) -> None:
    found = TrainParams.from_json(params)
    names = ["responses", "logprobs", "experts", *(f"token.{n}" for n in ("ref_logprobs", "values", "old_logprobs"))]
    assert [name for name in names if of_packs(name, found)] == alone


def test_values_are_dealt_by_size() -> None:
    assert all_as_dp([9, 1, 5, 5, 1, 1], 2) == [0, 0, 1, 1, 0, 1]
    assert all_as_dp([3], 4) == [0]
