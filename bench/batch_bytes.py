"""What each rank of a gang reads of a step's samples and columns, and what it gets of its peers: before and now.

python bench/batch_bytes.py [--cases plain-1000 plain-16000 experts-1000] [--meshes 2 4 4:tp2 4:pp2]

512 samples of 64 prompts, lengths around the case's mean, a third of the tokens an environment's; values of 16 samples
each, as generation hands them over, in a directory; columns: score, ref_logprobs (KL in the loss). `experts`: routing
replay of 48 layers x 8. Before: every rank reads all. Ranks are processes over gloo; rows are those of their packs.
Memory: the greatest resident size of the process less what it had before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import torch

from bench.gang_bytes import resident
from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Json, Ref
from functions.call.function import Context
from functions.call.parallel import Parallel
from functions.call.train_params import KlParams, TrainParams
from functions.exchange.directory import DirectoryExchange
from functions.models.packing import make_packs
from functions.train.batch import build
from functions.train.gang import ALONE, GangParams, Ranks, meet
from functions.train.parallel import share
from functions.train.protocols import Inputs

PROCESSES = multiprocessing.get_context("forkserver")
PARAMS = TrainParams(kl=KlParams(where="loss"))
SAMPLES, GROUP, SHARD = 512, 8, 16


def put(exchange: DirectoryExchange, mean: int, experts: bool) -> tuple[list[Ref], list[Ref]]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 1000, (SAMPLES // GROUP, 200)).tolist()
    base = SampleBatch.of_prompts(prompts, samples_per_prompt=GROUP, version=0)
    lengths = rng.integers(mean // 2, mean * 3 // 2, SAMPLES).astype(np.int32)
    samples, columns = list[Ref](), list[Ref]()
    for number, rows in enumerate(np.array_split(rng.permutation(SAMPLES), SAMPLES // SHARD)):
        own, total = base.select(rows), int(lengths[rows].sum())
        shard = replace(
            own, responses=Ragged(rng.integers(3, 1000, total, np.int32), lengths[rows]),
            logprobs=rng.normal(-1, 1, total).astype(np.float32),
            mask=(np.arange(total) // 100 % 3 < 2).astype(np.float32),
            finish=np.full(len(rows), Finish.STOP, np.int32),
            experts=rng.integers(0, 128, (total, 48, 8), np.uint8) if experts else None,
        )  # fmt: skip
        said = Columns.of(shard, sample={"score": rows.astype(np.float32)}, token={"ref_logprobs": shard.logprobs})
        samples.append(exchange.put(f"batches/s{number}", shard.encode()))
        columns.append(exchange.put(f"batches/c{number}", said.encode()))
    return samples, columns


def one_rank(root: str, who: Json, refs: tuple[list[Ref], list[Ref]], answer: Connection) -> None:
    torch.set_num_threads(1)
    gang = GangParams(**{**who, "parallel": Parallel(**who["parallel"])})
    moved = {"read": 0, "got": 0}

    class Counting(DirectoryExchange):
        def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
            moved["read"] += key.size_bytes if isinstance(key, Ref) else 0
            return super().get(key, start=start, length=length)

    class Told(Ranks):
        def gather_bytes(self, value: bytes, axis: str | None = None) -> list[bytes]:
            found = super().gather_bytes(value, axis)
            moved["got"] += sum(map(len, found)) - len(value)
            return found

        def swap(self, sent: torch.Tensor, to: list[int], of: list[int], axis: str | None = None) -> torch.Tensor:
            moved["got"] += sum(of) - of[self.rank]
            return super().swap(sent, to, of, axis)

    def rows() -> set[int]:
        assert met is not None
        samples = batch.samples
        blank = replace(samples, responses=Ragged(np.zeros(len(samples.mask), np.int32), samples.responses.lengths))
        blank = replace(blank, experts=None)
        found = share(lambda budget: make_packs(blank, range(SAMPLES), budget_tokens=budget, shared=True), 32768,
                      met.place("dp"), met.count("dp"), met.count("pp"))  # fmt: skip
        return {row for pack in found.packs for row in pack.rows}

    context = Context(Counting(root), root)
    with meet(gang, torch.device("cpu"), context, lambda: False) as met:
        assert met is not None
        told = Told(met.rank, met.size, met.mesh, met.device) if who["id"] == "now" else ALONE
        moved["read"], before, begun_s = 0, resident("VmRSS"), time.monotonic()
        inputs = Inputs(told, [PARAMS], context.exchange)
        samples, columns = inputs.read(*refs)
        whole = SampleBatch.concat(samples).in_order()
        batch = build(whole, Columns.align(whole, columns), PARAMS)
        del samples, columns, whole
        read_s = time.monotonic() - begun_s
        own = rows()
        inputs.filled(batch, lambda: own)
        answer.send((moved["read"], moved["got"], resident("VmHWM") - before, read_s, time.monotonic() - begun_s))
        met.gather({})


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["plain-1000", "plain-16000", "experts-1000"])
    parser.add_argument("--meshes", nargs="+", default=["2", "4", "4:tp2", "4:pp2"])
    options, found = parser.parse_args(given), list[Json]()
    print(f"{'case':>14} {'mesh':>6} {'':>6} {'MB':>7}   a rank: MB read, MB from peers, MB of memory, seconds")
    for case in options.cases:
        with tempfile.TemporaryDirectory() as root:
            refs = put(DirectoryExchange(root), int(case.split("-")[1]), case.startswith("experts"))
            every = sum(ref.size_bytes for kind in refs for ref in kind)
            for mesh in options.meshes:
                size, *axes = mesh.split(":")
                parallel = {axis[:2]: int(axis[2:]) for axis in axes}
                for how in ("before", "now"):
                    who = {"id": how, "attempt": secrets.token_hex(4), "size": int(size), "parallel": parallel}
                    started = []
                    for rank in range(int(size)):
                        ours, theirs = PROCESSES.Pipe(duplex=False)
                        args = (root, {**who, "rank": rank}, refs, theirs)
                        started.append((PROCESSES.Process(target=one_rank, args=args), ours))
                        started[-1][0].start()
                    ranks = [ours.recv() for _, ours in started]
                    for process, _ in started:
                        process.join()
                    of = zip(zip(*ranks, strict=True), (1e6, 1e6, 1e6, 1, 1), strict=True)
                    spans = [f"{min(told) / by:.1f} to {max(told) / by:.1f}" for told, by in of]
                    print(f"{case:>14} {mesh:>6} {how:>6} {every / 1e6:>7.1f}   {' | '.join(spans)}", flush=True)
                    found.append({"case": case, "mesh": mesh, "how": how, "bytes": every, "ranks": ranks})
    print(json.dumps({"bench": "batch_bytes", "rows": found}))


if __name__ == "__main__":
    main()
