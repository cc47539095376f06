"""Stages beside generation (reward, reference, critic): on how many replicas, and when what they work on is ready."""

from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from orchestrator.planner.arrays import Array
from orchestrator.planner.case import Case
from orchestrator.planner.fusion import Follower, Parts, StreamedStage, replica_counts
from orchestrator.planner.generation import Generations
from orchestrator.planner.room import Room
from orchestrator.planner.scaling import best
from orchestrator.planner.training import Batch


def followers(case: Case, steps: Generations, parts: Parts, room: Room) -> dict[str, Follower]:
    """Of every such stage. Takes their room."""
    costs, found = case.costs, dict[str, Follower]()
    gpus = {name: costs.limits[name].gpus for name in costs.followers}
    after = sum(gpus.values())
    for name in costs.followers:
        after -= gpus[name]
        found[name] = _follower(case, name, steps, parts, room, after)
        room.take(found[name].replicas * gpus[name], found[name].end_s)
    return found


def _follower(case: Case, name: str, steps: Generations, parts: Parts, room: Room, after: int) -> Follower:
    """The stage on as many replicas as the exchange likes best. It begins with the first samples, whenever they come:
    what is promised, and a replica of each stage after it (`after` GPUs), have to fit beside it. In turns its calls
    wait for those of generation on the same GPUs: it begins when half of these are let go.
    """
    costs, limits = case.costs, case.costs.limits[name]
    start_s = 0.0 if name in costs.warm else costs.start_s[name]
    most = min(limits.max_replicas, parts.sizes.shape[1])  # more have nothing to do
    counts = [limits.max_replicas] if case.policy.replicas == "all" else replica_counts(most)
    last_s, exchange = steps.finish_s[:, -1:], steps.exchange
    stage = StreamedStage(parts, costs.followers[name], start_s, case.ahead(exchange), case.late)
    rows = np.arange(len(last_s))
    rooms_s = np.broadcast_to(room.at_s([n * limits.gpus for n in counts]), (len(rows), len(counts)))
    if case.policy.colocated and limits.gpus:
        rooms_s = np.repeat(steps.gone_s[:, [(steps.gone_s.shape[1] - 1) // 2]], len(counts), axis=1)
    found = [stage.follow(n, rooms_s[:, k]) for k, n in enumerate(counts)]
    if len(found) == 1:
        return found[0]
    columns = {column.name: np.stack([getattr(f, column.name) for f in found], axis=1) for column in fields(Follower)}
    fits = room.fits([n * limits.gpus + after for n in counts]) | (np.array(counts) == 1)
    after_s = case.after.last_s(case.hurries(exchange))[:, None]
    end_s = np.where(fits, np.maximum(columns["end_s"], last_s) + after_s, np.inf)
    cost = np.where(fits, costs.price[name] * columns["replica_s"] + case.after.train_cost, np.inf)
    place = best(exchange, end_s, cost)
    return Follower(**{name: column[rows, place] for name, column in columns.items()})


def ready(case: Case, steps: Generations, parts: Parts, followers: Mapping[str, Follower]) -> tuple[Batch, Array]:
    """By prompt group; and when all samples and columns are there. [R]"""
    ready = steps.finish_s
    if followers:
        done_s = np.max([f.done_s for f in followers.values()], axis=0)
        ready = np.maximum(ready, np.take_along_axis(done_s, parts.place, axis=1))
    by_number = np.empty(ready.shape)
    np.put_along_axis(by_number, steps.numbers, ready, axis=1)
    ready_s: Array = ready.max(axis=1)
    if case.policy.colocated:  # stages that begin after generation take turns on the GPUs
        in_turn_s = last_s = steps.finish_s[:, -1]
        for f in (f for name, f in followers.items() if case.costs.limits[name].gpus):
            in_turn_s = in_turn_s + np.maximum(0.0, f.end_s - np.maximum(f.begin_s, last_s))
        ready_s = np.maximum(ready_s, in_turn_s)
    return case.load.at(by_number, steps.finish_s[:, -1]), ready_s


def awaited_s(steps: Generations, batch: Batch, per_prompt: int) -> Array:
    """So many groups cannot be whole before the tail has its replicas: whoever waits for them comes after those. [R]"""
    count = batch.ready_s.shape[1]
    groups = np.minimum(count - steps.cut_below // per_prompt + 1, count - 1)
    return np.take_along_axis(np.sort(batch.ready_s, axis=1), groups[:, None], axis=1)[:, 0]
