"""Actor and critic in one gang of pipeline stages: one schedule of both against one 1F1B after the other.

python bench/pipelines.py [--unit-ms 10]

The executor of functions/train/pipeline.py on processes that meet over gloo; a stage's compute is a sleep in place, so
that as many ranks as wanted fit on few cores. Beside the ratio of times: that of the makespans that were planned.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functions.call.parallel import AXES
from functions.train.pipeline import Item, Passes, Stage, execute, one_f_one_b
from functions.train.schedules import FusedSchedule, Pipelines, search

# Stages, micro-batches and forwards (in units) of actor and critic.
CASES = [
    Pipelines(2, 2, 4, 4, 1, 1, 1.0, 1.0),
    Pipelines(2, 2, 8, 8, 3, 2, 1.0, 1.0),
    Pipelines(4, 4, 4, 4, 1, 1, 1.0, 1.0),
    Pipelines(4, 4, 8, 8, 3, 2, 1.0, 1.0),
]
ROUNDS = 3


class _Sleep(torch.autograd.Function):
    """A stage: `seconds` forwards, twice that backwards."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return states + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


def _passes(stage: Stage, micro_batches: int, seconds: float) -> Passes:
    def one(number: int, inputs: Tensor | None) -> Tensor:
        states = torch.zeros(1, 8, 4, requires_grad=True) if inputs is None else inputs
        found: Tensor = _Sleep.apply(states, seconds)  # type: ignore[no-untyped-call]
        return found.sum() if stage.last else found

    return Passes(stage, [(1, 8, 4)] * micro_batches, torch.float32, torch.device("cpu"), one)


def _rank(rank: int, case: Pipelines, orders: list[list[Item]], unit_s: float, meet: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=case.pp0)
    mesh = init_device_mesh("cpu", (case.pp0, 1, 1, 1), mesh_dim_names=AXES)
    turned = DeviceMesh("cpu", mesh.mesh.flip(0), mesh_dim_names=AXES)
    actor = _passes(Stage(mesh, None), case.m0, case.f0 * unit_s)
    for stages in (mesh, turned):
        dist.all_reduce(torch.zeros(1), group=stages.get_group("pp"))
    critic = _passes(Stage(turned, None), case.m1, case.f1 * unit_s)
    told = []
    for _ in range(1 + ROUNDS):  # the first connects
        times = []
        for work in (
            [([actor], one_f_one_b(case.pp0, case.m0)), ([critic], one_f_one_b(case.pp0, case.m1))],
            [([actor, critic], orders)],
        ):
            dist.barrier()
            begin, held = time.monotonic(), 0
            for models, order in work:
                held = max(held, execute(models, order))
            dist.barrier()
            times += [time.monotonic() - begin, held]
        told.append(times)
    answer.send(told[1:])
    dist.destroy_process_group()


def measure(case: Pipelines, found: FusedSchedule, unit_s: float) -> dict[str, Any]:
    """Seconds of both ways, the least of ROUNDS; micro-batches held at most on any rank."""
    orders = [[Item(t.chain, t.micro_batch, t.backward) for t in order] for order in found.orders]
    context, started = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(case.pp0):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, case, orders, unit_s, f"{folder}/meet", theirs))
            process.start()
            started.append((process, ours))
        rounds = [ours.recv() for _, ours in started]
        for process, _ in started:
            process.join()
    serial, fused = (min(max(rank[k][at] for rank in rounds) for k in range(ROUNDS)) for at in (0, 2))
    held = [max(rank[k][at] for rank in rounds for k in range(ROUNDS)) for at in (1, 3)]
    planned = found.makespan / case.serial
    return {
        "ranks": case.pp0, "micro_batches": case.m0, "forward": [case.f0, case.f1], "serial_s": round(serial, 3),
        "fused_s": round(fused, 3), "ratio": round(fused / serial, 3), "planned": round(planned, 3),
        "off": round(fused / serial / planned - 1, 3), "held": held, "bound": found.bound, "makespan": found.makespan,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-ms", type=float, default=20.0)
    unit_s = parser.parse_args().unit_ms / 1000
    print("ranks  micro-batches  forwards  serial s  fused s  ratio  planned   off  held: serial, fused")
    rows = []
    for case in CASES:
        row = measure(case, search(case, memory=case.pp0 + 1.0, solver_s=5.0), unit_s)
        print(
            f"{row['ranks']:5} {row['micro_batches']:14} {row['forward']!s:>9} {row['serial_s']:9} {row['fused_s']:8} "
            f"{row['ratio']:6} {row['planned']:8} {row['off']:5.1%}  {row['held']}",
            flush=True,
        )
        rows.append(row)
    print(json.dumps({"bench": "pipelines", "unit_ms": unit_s * 1000, "rows": rows}))


if __name__ == "__main__":
    main()
