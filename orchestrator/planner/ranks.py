"""Train functions: on how many ranks each, and from when. The choice for one leaves room to the next."""

from collections.abc import Mapping

import numpy as np

from orchestrator.planner.arrays import Array, Numbers
from orchestrator.planner.base import GENERATE
from orchestrator.planner.case import Case
from orchestrator.planner.room import Room
from orchestrator.planner.scaling import best, worth
from orchestrator.planner.training import Batch, Gangs, at_once, rank_counts, streamed

BEAM = 4


def trainers(
    case: Case, exchange: Array, batch: Batch, ready_s: Array, room: Room, generate_gpus: Numbers, spent: Array,
    beam: int,
) -> dict[str, Gangs]:  # fmt: skip
    """The train functions, those that are streamed first, on as many ranks as the exchange likes best; the best `beam`
    choices are followed up. `generate_gpus`: of the next step's; `spent`: before. [R] each
    """
    costs, placed = case.costs, dict[str, Gangs]()
    ready_s, spent = ready_s[:, None], spent[:, None]
    end_s = ready_s
    names = sorted(costs.trainers, key=lambda name: name not in case.streamed)
    for name in names:
        gangs = _options(case, exchange, name, batch, room, ready_s, end_s, spent)
        worked_out = _step(case, exchange, name, placed, gangs, generate_gpus, end_s, spent)
        time_s, cost = (value.reshape(len(value), -1) for value in worked_out)
        if name == names[-1] or beam == 1:
            places = best(exchange, time_s, cost)[:, None]
        else:
            places = np.argsort(worth(exchange[:, None], time_s, cost), axis=1, kind="stable")[:, :beam]
        before = places // gangs.end_s.shape[2]
        gang = gangs.flat().pick(places)
        placed = {n: g.pick(before) for n, g in placed.items()} | {name: gang}
        room = room.less(before, gang.counts * costs.limits[name].gpus, gang.end_s)
        spent = np.take_along_axis(spent, before, axis=1) + costs.price[name] * gang.mean_replica_s
        end_s = np.maximum(np.take_along_axis(end_s, before, axis=1), gang.end_s)
    return {name: gang.first() for name, gang in placed.items()}


def _options(
    case: Case, exchange: Array, name: str, batch: Batch, room: Room, ready_s: Array, end_s: Array, spent: Array
) -> Gangs:  # fmt: skip
    """After each way to place those before, one for each number of ranks. [R, B, N]"""
    cost, limits = case.costs.trainers[name], case.costs.limits[name]
    start_s = 0.0 if name in case.costs.warm else case.costs.start_s[name]
    most, price = limits.max_replicas, case.costs.price[name]
    counts = rank_counts(limits.min_replicas or most, most) if case.policy.stream else [most]
    rooms_s = room.at_s([count * limits.gpus for count in counts])
    rooms_s = np.broadcast_to(rooms_s.reshape(len(rooms_s), -1, len(counts)), (*end_s.shape, len(counts)))
    begin_s = end_s if case.policy.colocated else np.broadcast_to(ready_s, end_s.shape)
    found = at_once(
        batch, cost, counts, ready_s=begin_s, start_s=start_s, rooms_s=rooms_s, ahead=case.ahead(exchange),
        loads=case.policy.stream, late=case.late,
    )  # fmt: skip
    if name not in case.streamed:
        return found.first()
    found = found.beside(streamed(batch, cost, counts, start_s=start_s, rooms_s=rooms_s, paces=case.paces))
    ends_s: Array = np.maximum(ready_s[:, :, None, None], found.mean_end_s)
    hurries = case.hurries(exchange)[:, None, None, None]
    ends_s[..., 1:] = np.where(hurries, ends_s[..., 1:], np.inf)
    place = best(exchange[:, None, None], ends_s, price * found.mean_replica_s + spent[:, :, None, None])
    return found.pick(place[..., None]).first()


def _step(
    case: Case, exchange: Array, name: str, placed: Mapping[str, Gangs], gangs: Gangs, generate_gpus: Numbers,
    end_s: Array, spent: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Time and cost of the step so far. [R, B, N] each"""
    start_s, pool = case.costs.start_s[GENERATE], case.costs.pool_gpus
    ahead = case.ahead(exchange)[:, None, None]
    again_s = np.where(ahead, 0.0, np.full(gangs.end_s.shape, start_s))
    if pool is not None:  # else it finds room
        last_s = gangs.end_s
        for g in placed.values():
            last_s = np.maximum(last_s, g.end_s[:, :, None])
        last_s = last_s - start_s
        there = gangs.counts * (gangs.end_s > last_s)
        for g in placed.values():
            there = there + g.counts[:, :, None] * (g.end_s[:, :, None] > last_s)
        again_s[generate_gpus[:, None, None] + case.costs.rank_gpus * there > pool] = start_s
    time_s: Array = np.maximum(end_s[:, :, None], gangs.mean_end_s) + again_s
    return time_s, spent[:, :, None] + case.costs.price[name] * gangs.mean_replica_s
