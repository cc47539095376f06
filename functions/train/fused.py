"""Actor and critic trained in one gang of pipeline stages: each rank holds a stage of both, the critic's from the last
rank down, and executes one schedule of both, each model in the other's bubbles (RLHFuse, arXiv 2409.13221, section 5).

    step k of the actor, step k of the critic -> schedule of both (schedules.py) -> execute -> update of each
The updates are those of one after the other: only the order of work on a rank is another. A schedule is found by rank
0, once for a shape, and kept in the exchange: a later step, of whatever replicas, takes it from there.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress

from functions.base.wire import Json
from functions.call.function import Context
from functions.exchange.base import NotFound
from functions.train.gang import Ranks
from functions.train.pipeline import Item, execute
from functions.train.schedules import Pipelines, search
from functions.train.step import Work

FINEST = 12
"""Forwards of the heavier model's stage take at most so many units: nearly equal times count as equal."""
SOLVER_S = 5.0
"""Of a search: ranks wait for the first of a shape."""


def pipelines(works: Sequence[Work], ranks: Ranks) -> tuple[Pipelines, float]:
    """The problem, and the memory of a rank: what the heavier model's 1F1B holds, and one micro-batch of the other.

    A stage takes as long as it has parameters, the embedding's aside; a micro-batch holds that by width.
    """
    sizes = []
    for work in works:
        model = work.forward.model
        ends = {id(p) for e in (model.get_input_embeddings(), model.get_output_embeddings()) for p in _of(e)}
        sizes.append(sum(p.numel() for p in model.parameters() if id(p) not in ends))
    told = [max(own) for own in zip(*(part["sizes"] for part in ranks.gather({"sizes": sizes})), strict=True)]
    times = [max(1, round(size / max(told) * FINEST)) for size in told]
    unit = math.gcd(*times)
    held = [time / unit / work.forward.model.config.hidden_size for time, work in zip(times, works, strict=True)]
    held = [one / max(held) for one in held]
    stages, (m0, m1), (f0, f1) = ranks.count("pp"), (len(w.packs) for w in works), (t // unit for t in times)
    return Pipelines(stages, stages, m0, m1, f0, f1, *held), stages + min(held)


def _of(module: object) -> list[object]:
    return [*getattr(module, "parameters", list)()]


def run_fused(works: Sequence[Work], ranks: Ranks, context: Context) -> int:
    """Runs the first model's work and the other's in one schedule; the most micro-batches that this rank has held."""
    shape, memory = pipelines(works, ranks)
    found: Json = {}
    if ranks.rank == 0:
        digest = hashlib.sha256(repr((shape, memory)).encode()).hexdigest()
        store, key = context.exchange.durable, f"schedules/{digest[:16]}"
        with suppress(NotFound):
            found = json.loads(store.get(key))
        if not found:
            with context.phase("schedule"):
                fused = search(shape, memory=memory, solver_s=SOLVER_S).orders
            found = {"orders": [[[t.chain, t.micro_batch, int(t.backward)] for t in order] for order in fused]}
            store.put(key, json.dumps(found).encode())
    told = ranks.gather(found)[0]["orders"]
    orders = [[Item(model, number, bool(back)) for model, number, back in order] for order in told]
    return execute([work.passes for work in works], orders)
